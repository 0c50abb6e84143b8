"""Find the inputs of a source: a file, a folder or glob pattern of files, or a hub dataset. Assign
inputs to shards."""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple

from scripts.data.hub import HubInput, parse_hub_input
from training.errors import TOKEN_FILES, DataError, near_name

NAMES: Final = re.compile(
    r".*(?P<kind>\.txt|\.md|\.jsonl|\.ndjson|\.json)(\.gz|\.xz|\.zst|\.zstd)?|.*\.parquet",
    re.DOTALL,
)
SUFFIXES = (
    ".txt, .md, .jsonl, .ndjson and .json (one row per line), each also with .gz, .xz, .zst or "
    ".zstd; .parquet"
)
REMEDY: Final = (
    "for other names of text or rows, create a link with one of these suffixes; for CSV, pass "
    f"hf:FOLDER; {TOKEN_FILES}"
)
SHARD_FILE: Final = "shard.json"
"""Name of the file that describes a shard, in the shard's folder."""
LOCK: Final = ".preparing.lock"
"""Suffix of the lock file that a preparation holds while it runs."""
SPLIT: Final = re.compile(r"(?:^|[-_./])(train|test|val|valid|validation|dev|eval)(?=[-_./]|$)")
"""Words in the names of files and folders that name a split of a dataset."""
PART: Final = re.compile(r"(.*?)(\d{2,})-of-(\d{2,})(.*)", re.DOTALL)
"""Names of a dataset's numbered files, such as train-00002-of-00005.parquet."""
DESCRIPTIONS: Final = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of metadata files written by `datasets`, which contain no rows."""


@dataclass(frozen=True)
class FileInput:
    """A document file whose name matches `NAMES`."""

    path: Path
    text_key: str | None = None  # field that contains the text; None: ReadOptions.text_key

    @property
    def kind(self) -> str:
        """The file's suffix, ignoring a compression suffix. For every format with one row per
        line, the suffix is `.jsonl`."""
        match = NAMES.fullmatch(self.path.name)
        assert match is not None
        kind = match["kind"] or ".parquet"
        return ".jsonl" if kind in (".ndjson", ".json") else kind

    @property
    def has_keys(self) -> bool:
        """Whether documents are fields of rows (true for JSON lines and Parquet)."""
        return self.kind in (".jsonl", ".parquet")

    def __str__(self) -> str:
        return str(self.path)


Input = FileInput | HubInput


class Position(NamedTuple):
    """A position in a preparation: the index of an input, and how many of its documents were
    read."""

    input: int = 0
    document: int = 0


START: Final = Position()

BLOCK: Final = 1024
"""Number of consecutive documents that go to the same shard when inputs are cut."""


@dataclass(frozen=True)
class Shard:
    """Shard `number` of `count`.

    Whole inputs are assigned to shards round-robin. If there are fewer inputs than shards, inputs
    are `cut`: each shard reads all inputs and encodes every `count`-th block of `BLOCK` documents.
    """

    number: int  # from 0
    count: int
    cut: bool = False

    def owns(self, unit: int, document: int | None) -> bool:
        """Return whether this shard encodes document number `document` of input number `unit`.

        If `document` is None, return whether the shard encodes any document of that input.
        """
        if self.cut:
            return document is None or document // BLOCK % self.count == self.number
        return unit % self.count == self.number

    def folder(self, output: Path) -> Path:
        """Return the folder of this shard, given the preparation's output folder."""
        return shards_folder(output) / f"{self.number + 1}-of-{self.count}"


def shards_folder(output: Path) -> Path:
    """Return the folder that contains all shards, given the preparation's output folder."""
    return output.with_name(output.name + ".shards")


WHOLE: Final = Shard(0, 1)
"""A single shard that covers everything."""


@dataclass(frozen=True)
class Listing:
    """The inputs of a source, and the files in its folder that are ignored."""

    inputs: list[Input] = field(default_factory=list)
    ignored: list[Path] = field(default_factory=list)

    def __str__(self) -> str:
        files = [each.path for each in self.inputs if isinstance(each, FileInput)]
        hub = [str(each) for each in self.inputs if isinstance(each, HubInput)]
        text = ", ".join([*([_by_suffix(files)] if files else []), *hub])
        if self.ignored:
            text += f"; ignores {_by_suffix(self.ignored)}, such as {self.ignored[0]}"
        return f"reads {text}"

    def warnings(self) -> Iterator[str]:
        """Warn about rows mixed with plain text, such as Parquet files with a README, file names
        that differ only in their suffix, and missing files of a numbered series."""
        files = [each for each in self.inputs if isinstance(each, FileInput)]
        text = [each.path for each in files if not each.has_keys]
        if text and len(text) < len(files):
            names = ", ".join(path.name for path in text[:3])
            yield (
                f"JSON or Parquet files are mixed with {len(text):,} text files ({names}), which "
                "are also read; to exclude text files, pass a quoted glob such as "
                "'FOLDER/**/*.parquet'"
            )
        named: dict[str, set[str]] = {}
        for path in (str(each.path) for each in files):
            named.setdefault(path.removesuffix(_suffix(Path(path))), set()).add(path)
        if same := [paths for paths in named.values() if len(paths) > 1]:
            paths = " and ".join(sorted(same[0]))
            yield (
                f"the names of several files differ only in their suffix ({paths}): if they have "
                "the same content, pass a quoted glob that matches only one of them"
            )
        found: dict[tuple[str, ...], set[int]] = {}
        for each in files:
            if match := PART.fullmatch(each.path.name):
                start, number, count, end = match.groups()
                series = f"{each.path.parent}/{start}", count, end
                found.setdefault(series, set()).add(int(number))
        for (start, count, end), numbers in found.items():
            if len(numbers) < int(count):
                yield (
                    f"only {len(numbers):,} of {int(count):,} files {start}*-of-{count}{end} are "
                    "read; if the others are missing, download them again"
                )


def joined(listings: Sequence[Listing]) -> Listing:
    """Return the inputs and ignored files of several listings."""
    return Listing(
        [each for listing in listings for each in listing.inputs],
        [each for listing in listings for each in listing.ignored],
    )


def held_out_files(paths: Sequence[Path]) -> list[Path]:
    """Return the files of a dataset's held-out splits, or [] if no file belongs to a training
    split.

    Splits are recognized by names below the common folder, such as test/a.txt or
    train-00000-of-00002.parquet.
    """
    parents = [str(path.parent.absolute()) for path in paths]
    root = os.path.commonpath(parents) if parents else ""
    names = [os.path.relpath(path.absolute(), root) for path in paths]
    splits = [{*SPLIT.findall(name.lower())} for name in names]
    if not any("train" in each for each in splits):
        return []
    return [path for path, each in zip(paths, splits, strict=True) if each and "train" not in each]


def find_inputs(source: str, text_key: str | None = None) -> Listing:
    """Return the inputs of a file, folder, glob pattern or `hf:NAME`. Files are sorted.

    The inputs of a folder are all files below it with a known suffix, except for hidden files,
    files in symlinked folders, and files in prepared folders. The inputs of a pattern are all
    matching files, except for files in prepared folders. `text_key` is the field that contains the
    text, if the inputs consist of rows.

    Raises:
        DataError: no file matches, a file has an unknown suffix, a symlink is broken, or `text_key`
            is given but no input contains rows.
    """
    inputs = Listing([parse_hub_input(source)]) if source.startswith("hf:") else _listing(source)
    if text_key is not None and not any(each.has_keys for each in inputs.inputs):
        raise DataError(
            f"key {text_key} is only valid for JSON lines or Parquet, but {source} contains only "
            "text; omit the key"
        )
    keyed = [replace(each, text_key=text_key) if each.has_keys else each for each in inputs.inputs]
    return replace(inputs, inputs=keyed)


def _listing(source: str) -> Listing:
    path = Path(source).expanduser()
    if path.is_dir():
        return _in_folder(path)
    if path.is_file():
        paths, ignored = [path], list[Path]()
    else:
        paths, ignored = _matches(str(path))
    if not paths:
        meant = near_name(path)
        raise DataError(f"{source} must be a file, a folder or a pattern that matches files{meant}")
    for each in paths:
        if NAMES.fullmatch(each.name) is None:
            raise DataError(f"the suffix of {each} must be one of {SUFFIXES}; {REMEDY}")
    return Listing([FileInput(each) for each in paths], ignored)


def _matches(pattern: str) -> tuple[list[Path], list[Path]]:
    """Return the files that match a glob pattern, and the folders that are ignored.

    Ignored folders are prepared folders that contain matches, and matching folders that contain no
    other match.
    """
    found = sorted(map(Path, glob.glob(pattern, recursive=True)))
    _check_links(found)
    root = Path(*takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts))
    folders = {folder for path in found for folder in path.parents}
    below = {folder for folder in folders if folder != root and folder.is_relative_to(root)}
    prepared = {folder for folder in below if _is_prepared(folder)}
    rest = [path for path in found if not prepared.intersection((path, *path.parents))]
    ignored = [path for path in rest if path.is_dir() and path not in folders]
    return [path for path in rest if path.is_file()], sorted({*prepared, *ignored})


def _check_links(paths: Iterable[Path]) -> None:
    """Raise DataError if one of the paths is a broken symlink."""
    for path in paths:
        if not path.exists():
            raise DataError(f"{path} is a broken symlink; restore its target or delete the symlink")


def _in_folder(folder: Path) -> Listing:
    paths = _visible(folder)
    _check_not_saved(folder, paths)
    readable = [
        path
        for path in paths
        if path.is_file() and NAMES.fullmatch(path.name) and path.name not in DESCRIPTIONS
    ]
    if not readable:
        found = f", got {_by_suffix(paths)}" if paths else ""
        raise DataError(f"{folder} must contain files with suffix {SUFFIXES}{found}; {REMEDY}")
    read = set(readable)
    return Listing(
        [FileInput(each) for each in readable], [each for each in paths if each not in read]
    )


def _visible(folder: Path) -> list[Path]:
    """Return the contents of a folder at any depth: files, symlinks to folders, prepared folders.

    Hidden files and folders are skipped.

    Raises OSError if a folder cannot be listed, or DataError for a broken symlink.
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
    _check_links(paths)
    return sorted(paths)


def _is_prepared(folder: Path) -> bool:
    """Return whether prepare_data.py wrote or is writing a folder. Such folders are not read."""
    from training.data.manifest import read_manifest  # deferred: imports torch

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


def _check_not_saved(folder: Path, paths: Sequence[Path]) -> None:
    """Raise DataError if the folder was written by `datasets.save_to_disk`."""
    for path in paths:
        if path.name == "dataset_dict.json" or (
            path.name == "state.json" and any(path.parent.glob("*.arrow"))
        ):
            saved = path.parent
            part = "['train']" if path.name == "dataset_dict.json" else ""
            raise DataError(
                f"{saved} was written by datasets' save_to_disk; convert it to Parquet: python -c "
                f"\"import datasets; datasets.load_from_disk('{saved}'){part}"
                f".to_parquet('{folder.name}.parquet')\""
            )


def _by_suffix(paths: Iterable[Path]) -> str:
    """Return file counts by suffix, most frequent first, such as `3 .jsonl.gz, 1 .md`."""
    counts = Counter(_suffix(path) for path in paths)
    return ", ".join(f"{count:,} {suffix}" for suffix, count in counts.most_common())


def _suffix(path: Path) -> str:
    match = NAMES.fullmatch(path.name)
    if path.is_dir():
        kind = "prepared " if _is_prepared(path) else "linked " if path.is_symlink() else ""
        return f"{kind}folder"
    if match is None or match["kind"] is None:
        return path.suffix or "without a suffix"
    return path.name[match.start("kind") :]
