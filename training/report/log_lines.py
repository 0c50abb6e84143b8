"""Read and write a run's .jsonl files, which may be damaged by a crash or a full disk.

Metric names are `train/loss`, `val/<set>/loss`, `val/<set>/ppl`, `val/<set>/bpb`, `val/loss`,
`val/bpb`, `lr/<group>`, `optim/grad_norm` (before clipping), `optim/clip_coef`,
`optim/skipped_steps`, `perf/tokens_per_sec`, `perf/tokens_per_sec_per_gpu`, `perf/step_time_s`,
`perf/tflops_per_gpu`, `perf/mfu` (percent), `moe/max_vio`, `moe/max_vio/<layer>`,
`moe/<balancing loss>`, `progress/tokens`, `progress/pct`, `progress/eta_s`, `sample/<set>/prompt`,
`sample/<set>/text`.
"""

import contextlib
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from errno import ENOENT
from pathlib import Path
from typing import Any, Final

from parallel.disk import replace_file
from training.errors import Aid
from training.json_file import parse_json, read_regular

LOGS: Final = ("metrics.jsonl", "monitors.jsonl", "events.jsonl")
"""Files to which a run appends."""


class LogFile:
    """A .jsonl file to which a run appends lines.

    Lines that cannot be written are kept in memory, and written before the next line. The first
    write opens the file and removes the unfinished last line that a killed run may have left.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._aid = Aid(f"lines of {path.name} are not written yet")
        self._file: io.FileIO | None = None
        self._waiting = b""
        self._begun = 0
        """Number of bytes of the first pending line that are already in the file."""

    def append(self, line: Mapping[str, Any]) -> None:
        """Write `line` after all pending lines."""
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write as many pending lines as the disk accepts."""
        with self._aid:
            try:
                self._write()
            except OSError:
                self._release()
                raise

    def _write(self) -> None:
        if self._file is not None and not os.fstat(self._file.fileno()).st_nlink:
            print(f"warning: {self.path} was removed: creating a new file", flush=True)
            self._release()
        if self._file is None:
            if self.path.exists() and self.path.stat().st_nlink > 1:  # e.g. in a hard-link backup
                replace_file(self.path, self.path.read_bytes())
            drop_unfinished_line(self.path)
            self._file, self._begun = self.path.open("ab", buffering=0), 0
        while self._waiting:
            end = self._begun + self._file.write(self._waiting[self._begun :])
            whole = self._waiting.rfind(b"\n", 0, end) + 1
            self._waiting, self._begun = self._waiting[whole:], end - whole

    def _release(self) -> None:
        """Close the file, because its handle may be stale. The next line reopens the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def close(self) -> None:
        """Write all pending lines and close the file. A later line reopens the file."""
        if self._waiting:
            self.flush()
        if self._waiting:
            lost = self._waiting.count(b"\n")
            print(f"warning: {lost} lines of {self.path} could not be written", flush=True)
            self._waiting = b""
        self._release()


@dataclass
class LogLines:
    """The readable lines of a .jsonl file.

    lines    parsed lines, each a mapping with an integer `step`
    raw      the same lines as bytes
    numbers  their line numbers, starting at 1
    damaged  number of complete lines that cannot be parsed
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    damaged: int = 0


def read_lines(path: Path) -> LogLines:
    """Read all readable lines of a file. If the file does not exist, the result is empty.

    Text after the last newline is an unfinished line and is ignored.
    """
    log = LogLines()
    complete = read_regular(path).split(b"\n")[:-1] if os.path.lexists(path) else ()
    for number, raw in enumerate(complete, start=1):
        try:
            line = parse_json(raw)
            json.dumps(line, allow_nan=False)  # NaN is not valid JSON, and runs never write it
        except ValueError:
            line = None
        if isinstance(line, dict) and type(line.get("step")) is int:
            log.lines.append(line)
            log.raw.append(raw + b"\n")
            log.numbers.append(number)
        else:
            log.damaged += 1
    return log


def drop_later_lines(path: Path, step: int) -> int:
    """Remove all lines for steps after `step`, all damaged lines, and the last line if it is
    unfinished. Return the number of damaged lines.
    """
    if not path.exists():
        return 0
    log = read_lines(path)
    kept = [raw for line, raw in zip(log.lines, log.raw, strict=True) if line["step"] <= step]
    replace_file(path, b"".join(kept))
    return log.damaged


def drop_unfinished_line(path: Path) -> None:
    """Truncate a file after its last newline. A missing file is ignored."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)


class MetricsWriter(LogFile):
    """Writes `metrics.jsonl` or `monitors.jsonl` in the run folder, on rank 0."""

    def __init__(self, run_dir: str | Path, name: str = "metrics.jsonl") -> None:
        super().__init__(Path(run_dir) / name)

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Write one line `{"step": step, ...}`, in which null replaces NaN and infinities."""
        self.append({"step": step} | {name: _json_value(value) for name, value in metrics.items()})


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Read all readable lines of metrics.jsonl in a run folder, in order.

    Raises FileNotFoundError if the file does not exist.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
    return read_lines(path).lines


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
