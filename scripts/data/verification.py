"""Comparison of a prepared folder with its manifest: every file, hash and token."""

from collections.abc import Iterator
from pathlib import Path

from training.data.hashes import file_sha256
from training.data.manifest import Manifest, read_manifest
from training.data.token_set import TokenSet
from training.errors import DataError


def problems(folder: Path) -> Iterator[str]:
    """Yield a sentence for each thing in a prepared folder that is not as its manifest says.

    Raises DataError if there is no readable manifest.
    """
    manifest = read_manifest(folder)
    for name, size in manifest.files.items():
        path = folder / name
        if not path.is_file():
            yield f"no file {path}"
        elif path.stat().st_size != size:
            yield f"{path} must have {size} bytes, got {path.stat().st_size}"
    try:
        if file_sha256(manifest.tokenizer_path) != manifest.tokenizer.sha256:
            yield f"{manifest.tokenizer_path} is damaged: its sha256 differs from the manifest"
    except DataError as error:
        yield str(error)
    for name in manifest.sets:
        try:
            yield from _set_problems(manifest, name)
        except DataError as error:
            yield str(error)


def _set_problems(manifest: Manifest, name: str) -> Iterator[str]:
    """Yield what of a set's tokens is not as its entry says; raises DataError for damage."""
    entry, prefix = manifest.sets[name], manifest.folder / name
    tokens = TokenSet(name, prefix, 1, vocab_size=manifest.tokenizer.vocab_size, verify="full")
    for kind, expected in entry.sha256.items():
        if file_sha256(f"{prefix}.{kind}") != expected:
            yield f"{prefix}.{kind} is damaged: its sha256 differs from the manifest"
    largest = max(int(block.max()) for block in tokens.blocks(0, tokens.tokens))
    if largest != entry.max_token:
        yield f"set {name}: max_token must be {entry.max_token}, got {largest}"
