"""Preparation plans and their fingerprints. This module must not import torch."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import islice
from pathlib import Path

from scripts.command import counted
from scripts.data.document_files import ReadOptions, check_first_documents
from scripts.data.hub import HubInput
from scripts.data.sources import WHOLE, FileInput, Input, Listing, Shard, held_out_files, joined
from training.data.hashes import file_sha256
from training.errors import DataError

TOKENIZER_BYTES = 1_000_000_000
"""Maximum number of characters to train a tokenizer on, split evenly across sets."""
_EMPTY = hashlib.sha256().hexdigest()
_METHOD = 1  # bump if a code change alters the tokens for the same inputs and options


@dataclass(frozen=True, kw_only=True)
class Portion(Listing):
    """Inputs that are read in sequence, up to a token limit.

    source    command-line arguments that specify the inputs, recorded in the manifest
    tokens    number of tokens after which to stop reading; None: read all inputs
    held_out  whether the entire portion is used for validation
    """

    source: list[str]
    tokens: int | None = None
    held_out: bool = False


@dataclass(frozen=True)
class SetPlan:
    """The portions of a set. The validation data is the last portion or a `fraction` of all
    documents."""

    name: str
    portions: list[Portion]
    fraction: Fraction = Fraction(0)

    def inputs(self) -> list[Input]:
        """Return all inputs of the set, in order."""
        return [each for portion in self.portions for each in portion.inputs]

    def with_hub_files(self) -> "SetPlan":
        """Return the plan with each hub dataset split into its files."""
        portions = []
        for portion in self.portions:
            inputs: list[Input] = []
            for each in portion.inputs:
                inputs += each.files() if isinstance(each, HubInput) else [each]
            portions.append(replace(portion, inputs=inputs))
        return replace(self, portions=portions)

    def output(self, *, held_out: bool) -> str:
        """Return the name of the training set, or of the validation set."""
        return f"{self.name}.{'validation' if held_out else 'train'}"

    def outputs(self) -> dict[str, list[str]]:
        """Return the sources of each token set, keyed by NAME.train or NAME.validation."""
        outputs: dict[str, list[str]] = {}
        for portion in self.portions:
            for name in self.outputs_of(portion):
                outputs[name] = [*outputs.get(name, []), *portion.source]
        return outputs

    def outputs_of(self, portion: Portion) -> list[str]:
        """Return the names of the sets that a portion's documents are written to."""
        if portion.held_out or not self.fraction:
            return [self.output(held_out=portion.held_out)]
        return [self.output(held_out=held_out) for held_out in (False, True)]

    def listing(self) -> Listing:
        """Return the inputs and ignored files of all portions."""
        return joined(self.portions)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """All inputs and options that determine the contents of a prepared folder."""

    sets: list[SetPlan]
    vocabulary: int | None = None  # vocabulary size of the BPE to train; None: use `tokenizer`
    tokenizer: Path | None = None  # tokenizer to use if `vocabulary` is None
    eod: str | None = None
    reading: ReadOptions = ReadOptions()
    allow_lossy: bool = False  # accept a tokenizer that changes documents

    def check(self) -> list[str]:
        """Check the first documents of every input and return warnings.

        Raises:
            DataError: an input cannot be read, or its text field is missing, not a string or always
                blank.
        """
        return [
            f"token set {plan.name}: {text}"
            for plan in self.sets
            for text in _warnings(plan, self.reading)
        ]

    def inputs(self) -> list[Input]:
        """Return all inputs, in order."""
        return [each for plan in self.sets for each in plan.inputs()]

    def identities(
        self, shard: Shard = WHOLE, cached: Mapping[Input, str] | None = None
    ) -> list[str]:
        """Return the content identity of each input, or "" for inputs that `shard` does not read.

        Files are identified by their sha256, hub datasets by name and commit. `cached` contains
        identities that are already known.
        """
        inputs, folders, cached = self.inputs(), dict[str, str](), cached or {}
        return [
            cached.get(each) or _identity(each, folders) if shard.owns(number, None) else ""
            for number, each in enumerate(inputs)
        ]

    def fingerprint(self, identities: list[str] | None = None) -> str:
        """Return the sha256 of the options and of the inputs' identities.

        By default, the identities are computed.
        """
        tokenizer = self._tokenizer_files()
        left = iter(self.identities() if identities is None else identities)
        description = {
            "method": _METHOD,
            "sets": [
                {
                    "name": plan.name,
                    "train": _described(plan, left, held_out=False),
                    "validation": _described(plan, left, held_out=True),
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

    def with_hub_files(self) -> "Preparation":
        """Return the preparation with each hub dataset split into its files."""
        return replace(self, sets=[plan.with_hub_files() for plan in self.sets])

    def shard(self, number: int, count: int) -> Shard:
        """Return shard `number` (from 0) of `count`. If there are fewer than `count` inputs, the
        inputs are cut."""
        return Shard(number, count, cut=len(self.inputs()) < count)

    def repeated(self, identities: list[str]) -> list[str]:
        """Return a list with one warning if several inputs have the same content, else []."""
        inputs = (
            (plan.output(held_out=portion.held_out), each)
            for plan in self.sets
            for portion in plan.portions
            for each in portion.inputs
        )
        users: dict[str, list[tuple[str, Input]]] = {}
        for user, identity in zip(inputs, identities, strict=True):
            if identity != _EMPTY:
                users.setdefault(identity, []).append(user)
        repeated = [same for same in users.values() if len(same) > 1]
        if not repeated:
            return []
        (one, first), *_, (other, last) = max(repeated, key=lambda same: len({n for n, _ in same}))
        count = counted(len(repeated), "case")
        example = f"{one} ({first}) and {other} ({last})"
        return [f"several inputs have the same content ({count}), for example {example}"]

    def _tokenizer_files(self) -> list[Path]:
        if self.tokenizer is None:
            return []
        if self.tokenizer.is_dir():
            return sorted(self.tokenizer.glob("*.json")) + sorted(self.tokenizer.glob("*.jinja"))
        if not self.tokenizer.is_file():
            raise DataError(f"the tokenizer {self.tokenizer} must be an existing file or folder")
        return [self.tokenizer]


def is_validation(index: int, fraction: Fraction) -> bool:
    """Return whether document `index` of a set is held out for validation.

    Held-out documents are evenly spaced: for every n, round(n * fraction) of the first n documents
    are held out.
    """
    half = Fraction(1, 2)
    return (index * fraction + half) // 1 < ((index + 1) * fraction + half) // 1


def _warnings(plan: SetPlan, reading: ReadOptions) -> Iterator[str]:
    """Check the first documents of a set's inputs and yield warnings; see `Preparation.check`."""
    inputs = plan.inputs()
    counts = check_first_documents(inputs, reading)
    empty = [each for each, (n, blank, _) in zip(inputs, counts, strict=True) if blank == n]
    if empty:
        rest = len(empty) - 1
        more = f" and {counted(rest, 'more input')} contain" if rest else " contains"
        yield f"{empty[0]}{more} no documents"
    number, blank, replaced = map(sum, zip(*counts, strict=True))
    first = f"of the first {counted(number, 'document')}"
    if blank:
        verb = "is" if blank == 1 else "are"
        yield f"{blank:,} {first} {verb} blank; blank documents are skipped"
    if replaced:
        verb = "contains" if replaced == 1 else "contain"
        yield (
            f"{replaced:,} {first} {verb} U+FFFD, which replaces bytes that could not be decoded; "
            "convert the original files to UTF-8 again"
        )
    yield from plan.listing().warnings()
    train = [each for part in plan.portions if not part.held_out for each in part.inputs]
    held_out = held_out_files([each.path for each in train if isinstance(each, FileInput)])
    if held_out:
        verb = "is" if len(held_out) == 1 else "are"
        yield (
            f"{counted(len(held_out), 'file')} of held-out splits, such as {held_out[0]}, {verb} "
            "read as training documents; to exclude them, pass a quoted glob such as "
            "'FOLDER/**/train*'"
        )


def _described(plan: SetPlan, identities: Iterator[str], *, held_out: bool) -> list[str]:
    described: list[str] = []
    for portion in (each for each in plan.portions if each.held_out == held_out):
        described += islice(identities, len(portion.inputs))
        described += [] if portion.tokens is None else [f"{portion.tokens} tokens"]
    return described


def _identity(each: Input, folders: dict[str, str]) -> str:
    """Return a file's hash, or a dataset's name and commit plus the hashes of its local files.

    `folders` caches local folder hashes.
    """
    if isinstance(each, FileInput):
        return file_sha256(each.path)
    if each.name not in folders:
        files = sorted(path for path in Path(each.name).rglob("*") if path.is_file())
        folders[each.name] = "".join(f" {file_sha256(path)}" for path in files)
    return f"{each.identity}{folders[each.name]}"
