"""A corpus described in a file: sets of documents out of Debian packages and files of ours."""

import hashlib
import json
import lzma
import re
from collections.abc import Iterator
from dataclasses import field
from pathlib import Path

from models.section import Section
from scripts.data.debian import download, read_texts, version_of
from training.config import InvalidConfigError
from training.config.binding import bind
from training.config.yaml_files import read_merged
from training.data.hashes import file_sha256
from training.errors import DataError


class Source(Section):
    """Where documents come from: a Debian package or an .xz file of this repository."""

    licence: str
    package: str | None = None
    version: str = ""
    sha256: str = ""
    files: list[str] = field(default_factory=list)
    leave_out: list[str] = field(default_factory=list)
    file: str | None = None
    entry: str | None = None

    def __post_init__(self) -> None:
        if (self.package is None) == (self.file is None):
            raise ValueError("exactly one of package and file must be given")
        if self.package is not None and not (self.version and self.files):
            raise ValueError(f"files and version must be given for the package {self.package}")

    @property
    def name(self) -> str:
        """What the source is called in reports."""
        return self.package or str(self.file)


class DocumentSet(Section):
    """Sources of one set; `sha256` is that of its documents as JSON lines."""

    sources: list[Source]
    sha256: str


class Corpus(Section):
    """Sets of documents by name."""

    sets: dict[str, DocumentSet]


def read_corpus(path: Path) -> Corpus:
    """The corpus of a file. Raises ConfigError naming everything that is wrong with it."""
    try:
        return bind(Corpus, read_merged(path))
    except InvalidConfigError as error:
        raise InvalidConfigError([f"{path}: {problem}" for problem in error.problems]) from None


def write_set(name: str, content: DocumentSet, root: Path, output: Path) -> list[str]:
    """Write `output`/NAME.jsonl, a line `{"text": ..., "source": ...}` per document.

    Packages are downloaded to `output`/packages; `root` is the folder that files are relative to.
    Returns lines that say what was written, and what each source gave.

    Raises:
        DataError: a source cannot be read, or the documents are not those that were recorded.
    """
    reports: list[str] = []
    others: list[str] = []
    lines: list[str] = []
    for source in content.sources:
        before = len(lines)
        label = source.name
        if source.package is not None:
            deb = download(source.package, source.version, output / "packages")
            label += f" {version_of(deb)}"
            if file_sha256(deb) != source.sha256:
                others.append(label)
            texts = read_texts(deb, source.files, source.leave_out)
        else:
            texts = iter([(source.name, _read_xz(root / source.name))])
        size = 0
        for path, text in texts:
            for document in documents(text, source.entry):
                row = {"text": document, "source": f"{source.name}:{path}"}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
                size += len(document.encode())
        count = len(lines) - before
        reports.append(f"  {label}: {count:,} documents, {size:,} bytes, {source.licence}")
    encoded = "".join(lines).encode()
    found = hashlib.sha256(encoded).hexdigest()
    if found != content.sha256:
        raise DataError(
            f"the documents of {name} have sha256 {found}, expected {content.sha256}"
            f"; packages other than recorded: {', '.join(others) or 'none'}. Run `apt-get update` "
            "and try again, or record their sha256 in a --corpus file of your own"
        )
    (output / f"{name}.jsonl").write_bytes(encoded)
    return [f"{name}.jsonl: sha256 {found}", *reports]


def documents(text: str, entry: str | None) -> Iterator[str]:
    """The documents of a text: all of it, or cut at each line after a blank one that matches."""
    pieces = [text] if entry is None else re.split(rf"\n[ \t]*\n(?={entry})", text)
    for piece in pieces:
        document = piece.strip("\n")
        if document and not document.isspace():
            yield document + "\n"


def _read_xz(path: Path) -> str:
    try:
        return lzma.decompress(path.read_bytes()).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from None
