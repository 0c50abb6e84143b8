"""What all ranks must agree on before the first step: settings, code, versions and data."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from parallel.comm.collectives import disagreements
from training.errors import InputError
from training.machine.facts import ROOT, library_versions

PACKAGES: Final = ("spectral", "models", "parallel", "training")


class RanksDifferError(InputError):
    """Ranks of one run that were given different settings, code, versions or data."""


def program() -> dict[str, Any]:
    """Return a hash of the source files of every package, and the versions of libraries."""
    facts: dict[str, Any] = {f"code of {name}": source_hash(ROOT / name) for name in PACKAGES}
    return facts | {f"version of {name}": version for name, version in library_versions().items()}


def source_hash(folder: Path) -> str:
    """Return a hash of all Python files in a folder, by their places in it."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def require_agreement(facts: Mapping[str, Any]) -> None:
    """Raise RanksDifferError, on every rank, with a line per fact that differs. Collective."""
    lines = disagreements(facts)
    if lines:
        raise RanksDifferError("\n".join(lines))
