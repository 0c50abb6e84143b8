"""Whether documents come back from their tokens."""

from dataclasses import dataclass
from os.path import commonprefix
from typing import Final

from scripts.data.encoding import DECODED, EncodedChunk
from training.errors import DataError

LARGEST: Final = 0.01
"""Share of the decoded documents that may be another text, unless more is allowed."""
_AROUND: Final = 20


@dataclass
class RoundTrip:
    """How many documents of a set were decoded, and came back as another text."""

    decoded: int = 0
    lost: int = 0
    example: str = ""

    def add(self, chunk: EncodedChunk) -> None:
        """Count the documents of a chunk that were decoded."""
        for text, decoded in chunk.decoded:
            self.decoded += 1
            if text != decoded:
                self.lost += 1
                self.example = self.example or _difference(text, decoded)

    def check(self, name: str, *, allowed: bool, final: bool = False) -> None:
        """Refuse a tokenizer that loses text, once enough is decoded or the set `name` is `final`.

        Raises:
            DataError: more than `LARGEST` are another text, and that is not `allowed`.
        """
        if allowed or not (final or self.decoded >= DECODED):
            return
        if self.lost > LARGEST * self.decoded:
            raise DataError(
                f"set {name}: {self}; take a tokenizer that keeps the text, or --allow-lossy"
            )

    def __str__(self) -> str:
        share = self.lost / max(1, self.decoded)
        return (
            f"the tokenizer gives {share:.1%} of {self.decoded:,} decoded documents back as "
            f"another text, such as {self.example}"
        )


def _difference(text: str, decoded: str) -> str:
    """Return both texts around the first place where they differ."""
    start = max(0, len(commonprefix([text, decoded])) - _AROUND // 2)
    pieces = [repr(each[start : start + 2 * _AROUND]) for each in (text, decoded)]
    return " for ".join(reversed(pieces))
