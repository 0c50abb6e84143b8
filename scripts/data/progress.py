"""Progress on stderr: a live bar on a terminal, else a line every half minute."""

import sys
import time

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts the bytes of text and the tokens of one stage, and shows the rate."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._bytes = self._tokens = 0
        self._start = self._last_line = time.monotonic()
        self._live = sys.stderr.isatty()
        self._bar = tqdm(desc=stage, unit="B", unit_scale=True, leave=False, disable=not self._live)

    def passing(self, text: str) -> str:
        """Count a text and return it."""
        self.add(len(text), 0)
        return text

    def add(self, size: int, tokens: int) -> None:
        """Count `size` more bytes of text and `tokens` more tokens."""
        self._bytes += size
        self._tokens += tokens
        self._bar.update(size)
        now = time.monotonic()
        if self._live:
            if self._tokens:
                rate = self._tokens / max(now - self._start, 1e-9)
                self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            self._print_line()

    def _print_line(self) -> None:
        seconds = time.monotonic() - self._start
        parts = [f"{self._stage}: {self._bytes / 1e6:.2f} MB of text"]
        if self._tokens:
            rate = self._tokens / max(seconds, 1e-9)
            parts.append(f"{self._tokens:,} tokens, {rate:,.0f} tokens/s")
        print(", ".join([*parts, f"{seconds:.1f} s"]), file=sys.stderr)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._bar.close()
        if kind is None:
            self._print_line()
