"""Documents that share a window, and what becomes of their borders."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

SPREAD: Final = 1024
"""Windows of a set that its attended length is the mean of."""


@dataclass(frozen=True)
class Borders:
    """What a run makes of the borders between documents.

    mask               keeps attention within each document, where positions begin at 0
    first_token_loss   counts the loss of a document's first token
    """

    mask: bool = False
    first_token_loss: bool = True

    @property
    def needed(self) -> bool:
        """Whether a batch must contain the borders."""
        return self.mask or not self.first_token_loss


CROSSED: Final = Borders()
"""Attention crosses borders, and every token counts."""


def first_tokens(starts: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return for each of `count` tokens where the first token of its document is, `[count]`.

    `starts` are the places of first tokens, ascending. A document that began before the tokens
    begins with the first of them.
    """
    firsts = np.zeros(count, dtype=np.int64)
    firsts[starts] = starts
    return np.maximum.accumulate(firsts)


def squared_length(starts: NDArray[np.int64], count: int) -> int:
    """Return the sum of the squared lengths of the documents in `count` tokens."""
    lengths = np.diff(starts[starts > 0], prepend=0, append=count)
    return int((lengths**2).sum())
