"""Manifest of a prepared data folder (manifest.json)."""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from pydantic import ConfigDict

from training.config.binding import InvalidConfigError, bind
from training.config.data import DataConfig
from training.data.hashes import file_sha256
from training.errors import DataError
from training.json_file import read_json

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
"""Version of the manifest.json format; bump it if older files become unreadable."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class TokenizerEntry:
    """Tokenizer of the token sets in a folder."""

    file: str  # relative to the folder
    sha256: str
    vocab_size: int  # largest token id the tokenizer can produce, plus one
    eod_id: int  # the token that ends every document
    byte_level: bool  # whether the exact bytes of each token are known
    eod_token: str | None = None


@dataclass(frozen=True, kw_only=True)
class SetEntry:
    """A token set in a folder: NAME.bin and NAME.idx."""

    documents: int
    tokens: int  # including one EOD per document
    bytes: int  # UTF-8 bytes of the documents' text
    max_token: int
    dtype: str
    sha256: dict[str, str]  # by file suffix: bin, idx, and blocks if present
    source: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)  # sha256 of each file, name of each dataset


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A prepared folder: its tokenizer, its token sets, and how they were prepared."""

    __pydantic_config__ = ConfigDict(strict=True)  # ignores unknown keys from later versions

    folder: Path
    tokenizer: TokenizerEntry
    sets: dict[str, SetEntry]
    fingerprint: str | None = None  # of the inputs and options used to prepare the folder
    files: dict[str, int] = field(default_factory=dict)  # sizes of all other files, in bytes

    @property
    def tokenizer_path(self) -> Path:
        """Path to the folder's tokenizer.json."""
        return self.folder / self.tokenizer.file

    def to_json(self) -> str:
        """Serialize to the text of manifest.json. Equal manifests serialize to equal texts."""
        content = {"format": MANIFEST_FORMAT, **dataclasses.asdict(self)}
        del content["folder"]
        return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def read_manifest(folder: str | Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: manifest.json is missing, unreadable or incomplete, or has another format.
    """
    path = Path(folder) / MANIFEST_FILE
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise DataError(
            f"{path} does not exist: {folder} must be a folder written by scripts/prepare_data.py"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
    version = content.get("format") if isinstance(content, dict) else None
    if version != MANIFEST_FORMAT:
        raise DataError(f"format of {path} must be {MANIFEST_FORMAT}, got {version!r}")
    try:
        manifest = bind(Manifest, {**content, "folder": str(folder)})
    except InvalidConfigError as error:
        raise DataError(f"{path}: {error.problems[0]}") from None
    for name in (manifest.tokenizer.file, *manifest.sets):
        if not name or name != Path(name).name:
            raise DataError(f"{path} must list only files in the same folder, got {name!r:.60}")
    return manifest


def manifest_of(prefix: str | Path) -> Manifest | None:
    """Return the manifest in a set's folder, or None if there is no manifest or the manifest does
    not list the set.

    Raises DataError if the manifest is unreadable.
    """
    folder = Path(prefix).parent
    manifest = read_manifest(folder) if (folder / MANIFEST_FILE).exists() else None
    return manifest if manifest is not None and Path(prefix).name in manifest.sets else None


def check_tokenizer(manifest: Manifest) -> None:
    """Raise DataError if the folder's tokenizer.json is not the tokenizer used for the folder's
    token sets."""
    path, stated = manifest.tokenizer_path, manifest.tokenizer.sha256
    if path.is_file() and (found := file_sha256(path)) != stated:
        raise DataError(
            f"{path} must have sha256 {stated} as listed in {MANIFEST_FILE}, got {found}: restore "
            "the tokenizer that produced the tokens, or prepare the data again"
        )


def check_one_tokenizer(sets: Iterable[tuple[str, str]], tokenizer: Path | None = None) -> None:
    """Check that all sets with a manifest use the same tokenizer.

    `sets` contains a (name, prefix) pair per set. `tokenizer` is the tokenizer.json set in the
    config, if any.

    Raises:
        DataError: the tokenizers differ; the message lists each tokenizer with its sets.
    """
    files: dict[str, str] = {}
    users: dict[str, dict[str, None]] = {}
    if tokenizer is not None and tokenizer.is_file():
        digest = file_sha256(tokenizer)
        files[digest], users[digest] = str(tokenizer), {"data.tokenizer": None}
    for name, prefix in sets:
        manifest = manifest_of(prefix)
        if manifest is not None:
            digest = manifest.tokenizer.sha256
            files.setdefault(digest, str(manifest.tokenizer_path))
            users.setdefault(digest, {})[name] = None
    if len(files) > 1:
        parts = [f"{', '.join(users[digest])} from {file}" for digest, file in files.items()]
        raise DataError(
            f"all token sets must use the same tokenizer, got {len(files)} tokenizers: "
            f"{'; '.join(parts)}\nTo replace the token sets of a base config, set `replace: true` "
            "in the data section. To change the tokenizer of a token set, prepare the token set "
            "again with --tokenizer"
        )


def shared_text(data: DataConfig) -> Iterator[str]:
    """Yield a message for each pair of sets that contain the same text. Mock sets are ignored.

    Two sets contain the same text if they are the same file, if their manifests list equal hashes
    of the tokens, or if both manifests list the same input. Without manifests, the sizes and the
    first and last MiB of the files are compared. A training set and its held-out split
    share inputs but no documents, so such a pair is not reported.
    """
    if data.mock:
        return
    sets = [(f"training set {name}", Path(each.path)) for name, each in data.train.items()]
    sets += [(f"validation set {name}", Path(each.path)) for name, each in data.validation.items()]
    for (one, first), (other, second) in combinations(sets, 2):
        if one.startswith("validation"):
            continue
        how = _shared(first, second)
        if how is not None:
            yield f"{one} and {other} contain the same text: {how}"


def _shared(first: Path, second: Path) -> str | None:
    """Return the reason why two sets contain the same text, or None if there is no evidence for
    this."""
    same = first.resolve() == second.resolve()
    with suppress(OSError):  # a missing file is reported elsewhere
        same = same or os.path.samefile(f"{first}.bin", f"{second}.bin")
    if same:
        return f"both sets are {first}"
    manifests = [manifest_of(prefix) for prefix in (first, second)]
    if manifests[0] is None or manifests[1] is None:
        with suppress(OSError):
            if _equal_ends(Path(f"{first}.bin"), Path(f"{second}.bin")):
                return f"{first} and {second} are equal in size and in the first and last MiB"
        return None
    one, other = manifests[0].sets[first.name], manifests[1].sets[second.name]
    if one.sha256.get("bin") is not None and one.sha256.get("bin") == other.sha256.get("bin"):
        return f"{first} and {second} have equal tokens"
    if first.resolve().parent == second.resolve().parent and first.stem == second.stem:
        return None
    common = len({*one.inputs} & {*other.inputs})
    return f"{first} and {second} have {common:,} inputs in common" if common else None


def _equal_ends(first: Path, second: Path) -> bool:
    """Return whether two files are equal in size, and in the first and last MiB."""
    size = first.stat().st_size
    if size != second.stat().st_size:
        return False
    with first.open("rb") as one, second.open("rb") as other:
        for offset in (0, max(0, size - MIB)):
            one.seek(offset)
            other.seek(offset)
            if one.read(MIB) != other.read(MIB):
                return False
    return True
