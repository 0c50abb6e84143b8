"""Build document sets from Debian packages and files in this repository, as described by a corpus
file. Packages are downloaded with apt-get and unpacked with dpkg-deb.
"""

import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from models.section import Section
from scripts.command import counted
from training.config import InvalidConfigError
from training.config.binding import bind
from training.config.yaml_files import read_merged
from training.data.hashes import file_sha256
from training.errors import DataError

_COMPRESSED = (".gz", ".dz")  # .dz is dictd's format: gzip with an index


def download(name: str, version: str, folder: Path) -> Path:
    """Return a package's .deb file in `folder`. Download the file unless `folder` contains this
    version.

    If apt only offers another version, return the file of that version, because the texts may be
    the same in both versions.

    Raises:
        DataError: apt-get or dpkg-deb is missing, or the package cannot be downloaded.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DataError(f"{tool} is missing: use Debian 12 or a Debian 12 container")
    folder.mkdir(parents=True, exist_ok=True)
    debs, problem = _debs(folder, name), ""
    if version not in debs:
        problem = _apt_download(f"{name}={version}", folder)
        debs = _debs(folder, name)
    if not debs and not _apt_download(name, folder):
        debs = _debs(folder, name)
    if not debs:
        raise DataError(
            f"cannot download {name} {version} (Debian 12): {problem or 'apt-get wrote no file'}; "
            "check the network and run `apt-get update`"
        )
    return debs.get(version, [*debs.values()][-1])


def _debs(folder: Path, name: str) -> dict[str, Path]:
    """Return the .deb files of a package in `folder`, by version."""
    return {version_of(deb): deb for deb in sorted(folder.glob(f"{name}_*.deb"))}


def _apt_download(package: str, folder: Path) -> str:
    """Download a package. Return the first line of apt's error, or "" on success."""
    command = ["apt-get", "download", "-q", package]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
    return "" if done.returncode == 0 else (errors or [f"exit code {done.returncode}"])[0]


def version_of(deb: Path) -> str:
    """Return the version of a .deb file."""
    done = subprocess.run(
        ["dpkg-deb", "--field", str(deb), "Version"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def read_texts(
    deb: Path, patterns: Sequence[str], leave_out: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Yield the path and decompressed text of each file in a .deb that matches `patterns`, sorted
    by path.

    Files whose names match any of `leave_out` are skipped.

    Raises:
        DataError: dpkg-deb cannot read the package, a pattern matches no file, or a file is not
            UTF-8.
    """
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise DataError(f"{deb} is not a readable package: {done.stderr.decode().strip()}")
    texts: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            path = str(PurePosixPath(member.name))
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and any(fnmatchcase(path, pattern) for pattern in patterns):
                texts[path] = file.read()
    unmatched = [p for p in patterns if not any(fnmatchcase(path, p) for path in texts)]
    if unmatched:
        raise DataError(f"{deb.name} contains no files matching {', '.join(unmatched)}")
    for path in sorted(texts):
        name = PurePosixPath(path).name
        if any(fnmatchcase(name, pattern) for pattern in leave_out):
            continue
        raw = gzip.decompress(texts[path]) if path.endswith(_COMPRESSED) else texts[path]
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
        yield path, text


class Source(Section):
    """A document source: a Debian package or an .xz file in this repository."""

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
        """Name of the package or file."""
        return self.package or str(self.file)


class DocumentSet(Section):
    """The sources of a set, and the sha256 of the JSON lines file that holds its documents."""

    sources: list[Source]
    sha256: str


class Corpus(Section):
    """Sets of documents by name."""

    sets: dict[str, DocumentSet]


def read_corpus(path: Path) -> Corpus:
    """Read a corpus file. Raises InvalidConfigError listing every problem in the file."""
    try:
        return bind(Corpus, read_merged(path))
    except InvalidConfigError as error:
        raise InvalidConfigError([f"{path}: {problem}" for problem in error.problems]) from None


def write_set(name: str, content: DocumentSet, root: Path, output: Path) -> list[str]:
    """Write `output`/NAME.jsonl with a line `{"text": ..., "source": ...}` for each document.

    Packages are downloaded to `output`/packages. File paths are relative to `root`. Returns a
    report: one line with the hash of the file written, then one line per source.

    Raises:
        DataError: a source cannot be read, or the documents do not match the recorded hash.
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
            file = root / source.name
            try:
                unpacked = lzma.decompress(file.read_bytes()).decode("utf-8")
            except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
                raise DataError(f"cannot read {file}: {error}") from None
            texts = iter([(source.name, unpacked)])
        size = 0
        for path, text in texts:
            for document in documents(text, source.entry):
                row = {"text": document, "source": f"{source.name}:{path}"}
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
                size += len(document.encode())
        count = len(lines) - before
        sizes = f"{counted(count, 'document')}, {counted(size, 'byte')}"
        reports.append(f"  {label}: {sizes}, {source.licence}")
    encoded = "".join(lines).encode()
    digest = hashlib.sha256(encoded).hexdigest()
    if digest != content.sha256:
        raise DataError(
            f"the documents of {name} must have sha256 {content.sha256}, got {digest}; packages "
            f"whose sha256 differs from the recorded one: {', '.join(others) or 'none'}. Run "
            "`apt-get update` and try again, or record the new sha256 in your own --corpus file"
        )
    (output / f"{name}.jsonl").write_bytes(encoded)
    return [f"{name}.jsonl: sha256 {digest}", *reports]


def documents(text: str, entry: str | None) -> Iterator[str]:
    """Split a text before each line that matches `entry`. If `entry` is None, yield the whole text.

    A matching line only starts a new document if it follows a blank line.
    """
    pieces = [text] if entry is None else re.split(rf"\n[ \t]*\n(?={entry})", text)
    for piece in pieces:
        document = piece.strip("\n")
        if document.strip():
            yield document + "\n"
