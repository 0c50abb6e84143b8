"""Count the documents that a preparation contains more than once."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

MOST: Final = 1 << 16
"""Maximum number of distinct documents to count, so that memory does not grow with the data."""


class Repeats:
    """Counts equal documents. With more than `MOST` distinct documents, counts all copies of a
    random sample of the documents."""

    def __init__(self) -> None:
        self._counts: dict[int, Counter[str]] = {}
        self._one_in = 1

    def add(self, name: str, document: bytes) -> None:
        """Count a document of the set `name`."""
        key = hash(document)
        if key % self._one_in:
            return
        self._counts.setdefault(key, Counter())[name] += 1
        while len(self._counts) > MOST:
            self._one_in *= 2
            self._counts = {k: each for k, each in self._counts.items() if not k % self._one_in}

    def warnings(self, names: Sequence[str]) -> Iterator[str]:
        """Yield a warning for each set that repeats its own documents or an earlier set's
        documents."""
        about = "about " if self._one_in > 1 else ""
        for i, name in enumerate(names):
            counts = [each for each in self._counts.values() if name in each]
            total = sum(each[name] for each in counts)
            repeated = {"repeat an earlier document": total - len(counts)}
            for other in names[:i]:
                shared = sum(each[name] for each in counts if other in each)
                repeated[f"are also in {other}"] = shared
            for text, number in repeated.items():
                if number:
                    of = f"{number * self._one_in:,} of {total * self._one_in:,} documents"
                    yield f"token set {name}: {about}{of} {text}"
