"""The plan of a preparation and its fingerprint. Does not import torch."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path

from scripts.data.documents import ReadOptions, check_first_documents
from scripts.data.sources import FileInput, Found, Input
from training.data.hashes import file_sha256
from training.errors import DataError

TOKENIZER_BYTES = 1_000_000_000
"""Characters to train a tokenizer on, shared equally by the sets."""
_METHOD = 1  # increase when the same inputs and options would give other tokens


@dataclass(frozen=True)
class Portion:
    """Inputs that are read in order, until `tokens` of them are written if that is given."""

    inputs: list[Input]
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class SetPlan:
    """The sources of a set's training and validation documents."""

    name: str
    train: list[Portion]
    validation: list[Input] = field(default_factory=list)  # empty: a fraction of `train`
    fraction: Fraction = Fraction(0)
    train_source: list[str] = field(default_factory=list)  # as given, for the manifest
    validation_source: list[str] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)  # files of its folders that are not read

    def inputs(self) -> list[Input]:
        """All inputs of the set, those of training first."""
        return [*(each for portion in self.train for each in portion.inputs), *self.validation]

    def found(self) -> Found:
        """Return its inputs and ignored files."""
        return Found(self.inputs(), self.ignored)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Everything that determines the content of a prepared folder."""

    sets: list[SetPlan]
    vocabulary: int | None = None  # size of the BPE to train, or
    tokenizer: Path | None = None  # the tokenizer to use
    eod: str | None = None
    reading: ReadOptions = ReadOptions()

    def check(self) -> list[str]:
        """Check the first documents of every input; return warnings.

        Raises:
            DataError: one cannot be read, or its text is missing, no string or blank throughout.
        """
        warnings = []
        for plan in self.sets:
            empty = check_first_documents(plan.inputs(), self.reading)
            if empty:
                more = f" and {len(empty) - 1:,} more inputs give" if empty[1:] else " gives"
                warnings.append(f"set {plan.name}: {empty[0]}{more} no document")
            if mixture := plan.found().mixture():
                warnings.append(f"set {plan.name}: {mixture}")
        return warnings

    def fingerprint(self) -> str:
        """sha256 of the options and the content of every input file; of the hub, of its name."""
        tokenizer = self._tokenizer_files()
        description = {
            "method": _METHOD,
            "sets": [
                {
                    "name": plan.name,
                    "train": [each for portion in plan.train for each in _identities(portion)],
                    "validation": [_identity(each) for each in plan.validation],
                    "fraction": str(plan.fraction),
                }
                for plan in self.sets
            ],
            "vocabulary": self.vocabulary,
            "tokenizer": [file_sha256(path) for path in tokenizer],
            "eod": self.eod,
            "reading": asdict(self.reading),
            "tokenizer_bytes": TOKENIZER_BYTES,
        }
        keys = [[each.text_key for each in plan.inputs()] for plan in self.sets]
        if any(key is not None for each in keys for key in each):
            description["text_keys"] = keys
        return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()

    def _tokenizer_files(self) -> list[Path]:
        if self.tokenizer is None:
            return []
        if self.tokenizer.is_dir():
            return sorted(self.tokenizer.glob("*.json"))
        if not self.tokenizer.is_file():
            raise DataError(f"no tokenizer file or folder {self.tokenizer}")
        return [self.tokenizer]


def is_validation(index: int, fraction: Fraction) -> bool:
    """Whether document `index` of a set is held out.

    Held-out documents are evenly spaced: n * fraction, rounded, of the first n. The choice does
    not depend on later documents.
    """
    half = Fraction(1, 2)
    return (index * fraction + half) // 1 < ((index + 1) * fraction + half) // 1


def _identities(portion: Portion) -> list[str]:
    limit = [] if portion.tokens is None else [f"{portion.tokens} tokens"]
    return [*map(_identity, portion.inputs), *limit]


def _identity(each: Input) -> str:
    """The content of a file, or the name of a dataset, with its content if it is a local folder."""
    if isinstance(each, FileInput):
        return file_sha256(each.path)
    files = sorted(path for path in Path(each.name).rglob("*") if path.is_file())
    return " ".join([str(each), *map(file_sha256, files)])
