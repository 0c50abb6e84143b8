"""Texts inside Debian packages, which apt-get downloads and dpkg-deb opens."""

import gzip
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from training.errors import DataError

_COMPRESSED = (".gz", ".dz")  # .dz is gzip with an index, of dictionaries


def download(name: str, version: str, folder: Path) -> Path:
    """The .deb of a package in `folder`, downloaded unless the asked version is there already.

    If apt's sources have another version only, that one is taken: its texts may well be the same.

    Raises:
        DataError: there is no apt-get or no dpkg-deb, or the package cannot be downloaded.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise DataError(f"no {tool}: these texts are made on Debian 12 or in its container")
    folder.mkdir(parents=True, exist_ok=True)
    same = _of_version(_debs(folder, name), version)
    if same is not None:
        return same
    pinned = _apt_download(f"{name}={version}", folder)
    failed = bool(pinned) and not _debs(folder, name) and _apt_download(name, folder)
    found = _debs(folder, name)
    if failed or not found:
        raise DataError(
            f"cannot download {name} {version}: {pinned or 'apt-get left no file'}; it is in "
            "Debian 12: is there a network, did `apt-get update` run?"
        )
    return _of_version(found, version) or found[-1]


def _of_version(debs: Sequence[Path], version: str) -> Path | None:
    return next((deb for deb in debs if version_of(deb) == version), None)


def _debs(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}_*.deb"))


def _apt_download(package: str, folder: Path) -> str:
    """What went wrong, one line; empty if nothing did."""
    done = subprocess.run(
        ["apt-get", "download", "-q", package],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [line for line in done.stderr.splitlines() if line.startswith("E:")]
    return "" if done.returncode == 0 else (errors or [f"exit code {done.returncode}"])[0]


def version_of(deb: Path) -> str:
    """The version that a .deb says it has."""
    done = subprocess.run(
        ["dpkg-deb", "--field", str(deb), "Version"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def read_texts(
    deb: Path, patterns: Sequence[str], leave_out: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Path and text of every file of a .deb whose path matches one of `patterns`, sorted by path.

    Files whose name matches one of `leave_out` are not among them. Compressed ones are opened.

    Raises:
        DataError: dpkg-deb cannot read the package, a pattern matches nothing, or a text is not
            UTF-8.
    """
    command = ["dpkg-deb", "--fsys-tarfile", str(deb)]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise DataError(f"{deb} is not a readable package: {done.stderr.decode().strip()}")
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            path = PurePosixPath(member.name).as_posix().removeprefix("./")
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and any(fnmatchcase(path, pattern) for pattern in patterns):
                found[path] = file.read()
    unmatched = [p for p in patterns if not any(fnmatchcase(path, p) for path in found)]
    if unmatched:
        raise DataError(f"{deb.name} has no file {', '.join(unmatched)}")
    for path in sorted(found):
        name = PurePosixPath(path).name
        if not any(fnmatchcase(name, pattern) for pattern in leave_out):
            yield path, _text(found[path], path)


def _text(content: bytes, path: str) -> str:
    raw = gzip.decompress(content) if path.endswith(_COMPRESSED) else content
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error.reason} at {error.start}") from None
