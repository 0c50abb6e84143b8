"""Where documents begin in a stream of tokens, from Megatron's index."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.data.index_file import STEP


@dataclass(frozen=True)
class DocumentIndex:
    """The documents of an index, of one sequence or several each.

    places     first token of each sequence, in bytes, ascending
    borders    first sequence of each document, and the number of sequences
    tokens     of all documents
    itemsize   bytes of a token
    """

    places: NDArray[np.int64]
    borders: NDArray[np.int64]
    tokens: int
    itemsize: int

    def starts(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return where documents begin among tokens `start` to `stop`, ascending."""
        ends = np.array([start, stop], dtype=np.int64) * self.itemsize
        first, last = np.searchsorted(self.borders, np.searchsorted(self.places, ends))
        return np.unique(self.places[self.borders[first:last]]) // self.itemsize

    def count(self) -> int:
        """Return the number of documents that contain tokens.

        Raises ValueError if they are not in the order of the stream.
        """
        sequences = len(self.places)
        ordered, filled = self.borders[0] == 0 and self.borders[-1] == sequences, 0
        for first in range(0, len(self.borders) - 1, STEP):
            block = self.borders[first : first + STEP + 1]
            ordered = ordered and not (np.diff(block) < 0).any()
            if not ordered:
                raise ValueError("its documents are not in the order of the tokens")
            places = self.places[np.minimum(block, sequences - 1)]
            places[block == sequences] = self.tokens * self.itemsize
            filled += int(np.count_nonzero(np.diff(places)))
        return filled
