"""Inputs of a source: a file, the files of a folder or a glob pattern, or a dataset of the hub."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from scripts.data.hub import HubInput, parse_hub_input
from training.errors import DataError, near_name

NAMES: Final = re.compile(
    r".*(?P<kind>\.txt|\.md|\.jsonl|\.ndjson|\.json)(\.gz|\.xz|\.zst|\.zstd)?|.*\.parquet",
    re.DOTALL,
)
SUFFIXES = (
    ".txt and .md, .jsonl, .ndjson and .json (one row a line), each also .gz, .xz, .zst or .zstd; "
    ".parquet"
)
REMEDY: Final = "for other plain text, create a link whose name ends in .txt; hf:FOLDER reads CSV"
SHARD_FILE: Final = "shard.json"
"""Name of the file that describes a shard of a preparation."""
LOCK: Final = ".preparing.lock"
"""Suffix of the file that a preparation locks while it works."""
DESCRIPTIONS: Final = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of files in which `datasets` describes a dataset; they contain no rows."""


@dataclass(frozen=True)
class FileInput:
    """One file of documents, whose name matches `NAMES`."""

    path: Path
    text_key: str | None = None  # field that contains the text; None: the field in the options

    @property
    def kind(self) -> str:
        """The suffix without the suffix of a compression; `.jsonl` for every format with a row per
        line."""
        match = NAMES.fullmatch(self.path.name)
        assert match is not None
        kind = match["kind"] or ".parquet"
        return ".jsonl" if kind in (".ndjson", ".json") else kind

    @property
    def has_keys(self) -> bool:
        """Whether documents are fields of rows."""
        return self.kind in (".jsonl", ".parquet")

    def __str__(self) -> str:
        return str(self.path)


Input = FileInput | HubInput


class Position(NamedTuple):
    """A position in inputs: the number of an input, and how many of its documents were read."""

    input: int = 0
    document: int = 0


@dataclass(frozen=True)
class Listing:
    """The inputs of a source, and the files of its folder that are ignored."""

    inputs: list[Input] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        files = [each.path for each in self.inputs if isinstance(each, FileInput)]
        hub = [str(each) for each in self.inputs if isinstance(each, HubInput)]
        text = ", ".join([*([_by_suffix(files)] if files else []), *hub])
        if self.ignored:
            text += f"; ignores {_by_suffix(self.ignored)}, such as {self.ignored[0]}"
        return f"reads {text}"

    def mixture(self) -> str | None:
        """Return a warning if the folder mixes files of rows and files of text, such as data and a
        README."""
        files = [each for each in self.inputs if isinstance(each, FileInput)]
        text = [each.path for each in files if not each.has_keys]
        if not text or len(text) == len(files):
            return None
        names = ", ".join(path.name for path in text[:3])
        return (
            f"files of rows are mixed with {len(text):,} of text ({names}): the text is read as "
            "documents; leave it out with a quoted glob, such as 'FOLDER/**/*.parquet'"
        )


def find_inputs(source: str, text_key: str | None = None) -> Listing:
    """Return the inputs of a file, a folder, a glob pattern or `hf:NAME`; files are sorted.

    A folder stands for all files below it with a known suffix. Names that begin with a dot are
    skipped, links to folders are not followed, and prepared folders are not read. `text_key` is the
    field of the text in files of rows.

    Raises:
        DataError: nothing is found, a file has an unknown suffix, or `text_key` is given and no
            file contains rows.
    """
    inputs = Listing([parse_hub_input(source)]) if source.startswith("hf:") else _listing(source)
    if text_key is not None and not any(each.has_keys for each in inputs.inputs):
        raise DataError(
            f"key {text_key} requires files of rows, but {source} contains none: leave the key out"
        )
    keyed = [replace(each, text_key=text_key) if each.has_keys else each for each in inputs.inputs]
    return replace(inputs, inputs=keyed)


def _listing(source: str) -> Listing:
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_folder(path)
    matches = [path] if path.is_file() else map(Path, glob.glob(str(path), recursive=True))
    paths = sorted(match for match in matches if match.is_file())
    if not paths:
        meant = near_name(path)
        raise DataError(f"no file or folder {source}, and no file matches it as a pattern{meant}")
    for each in paths:
        if NAMES.fullmatch(each.name) is None:
            raise DataError(f"unknown suffix of {each}: known are {SUFFIXES}; {REMEDY}")
    return Listing([FileInput(each) for each in paths])


def _in_folder(folder: Path) -> Listing:
    paths = _visible(folder)
    _check_not_saved(folder, paths)
    readable = [path for path in paths if _has_documents(path)]
    if not readable:
        there = f"; there are {_by_suffix(paths)}" if paths else ""
        raise DataError(f"no file under {folder} has a known suffix: {SUFFIXES}{there}; {REMEDY}")
    read = set(readable)
    return Listing(
        [FileInput(each) for each in readable], [each for each in paths if each not in read]
    )


def _visible(folder: Path) -> list[Path]:
    """Return the files, links to folders and prepared folders below a folder, without hidden names.
    Raises OSError for a folder that cannot be listed, DataError for a broken link.
    """

    def fail(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        prepared = [name for name in folders if _is_prepared(Path(parent, name))]
        folders[:] = [name for name in folders if name not in prepared]
        names = [name for name in files if not name.startswith(".")]
        paths += [Path(parent, name) for name in [*links, *prepared, *names]]
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is a broken link: fetch its file or delete it")
    return sorted(paths)


def _is_prepared(folder: Path) -> bool:
    """Return whether a preparation wrote a folder or is writing it; such a folder is not an
    input."""
    from training.data.manifest import read_manifest  # imported here because it imports torch

    for end in (".preparing", ".preparing.state", ".replaced"):
        lock = folder.with_name(folder.name.removesuffix(end) + LOCK)
        if folder.name.endswith(end) and lock.exists():
            return True
    if (folder / SHARD_FILE).is_file() and folder.parent.name.endswith(".shards"):
        return True
    try:
        read_manifest(folder)
    except DataError:
        return False
    return True


def _has_documents(path: Path) -> bool:
    return (
        path.is_file() and NAMES.fullmatch(path.name) is not None and path.name not in DESCRIPTIONS
    )


def _check_not_saved(folder: Path, paths: Sequence[Path]) -> None:
    """Raise DataError for a folder written by `save_to_disk` of `datasets`."""
    for path in paths:
        if path.name == "dataset_dict.json" or (
            path.name == "state.json" and any(path.parent.glob("*.arrow"))
        ):
            saved = path.parent
            part = "['train']" if path.name == "dataset_dict.json" else ""
            raise DataError(
                f"{saved} was written by save_to_disk of datasets; write it as Parquet: python -c "
                f"\"import datasets; datasets.load_from_disk('{saved}'){part}"
                f".to_parquet('{folder.name}.parquet')\""
            )


def _by_suffix(paths: Iterable[Path]) -> str:
    """Return the number of files by suffix, most frequent first: `3 .jsonl.gz, 1 .md`."""
    counts = Counter(_suffix(path) for path in paths)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())


def _suffix(path: Path) -> str:
    match = NAMES.fullmatch(path.name)
    if path.is_dir():
        return "linked folder" if path.is_symlink() else "prepared folder"
    if match is None or match["kind"] is None:
        return path.suffix or "without a suffix"
    return path.name[match.start("kind") :]
