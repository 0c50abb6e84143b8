"""Write small token sets and their manifests."""

import json
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from scripts.prepare_data import main as prepare


def write_token_set(prefix: Path, *, tokens: int, vocab: int, seed: int, documents: int = 8) -> str:
    """Write random walks over the token ids as a .bin/.idx pair and return its prefix.

    The walks have structure for a model to learn.
    """
    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        steps = generator.integers(1, 4, size=tokens // documents)
        walk = np.cumsum(steps) % (vocab - 1) + 1  # 0 ends a document
        walk[-1] = 0
        builder.add_document(torch.from_numpy(walk), [len(walk)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def write_stream(prefix: Path, tokens: np.ndarray, documents: int = 3) -> Path:
    """Write tokens as a .bin/.idx pair and return its prefix."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=tokens.dtype.type)
    for document in np.array_split(tokens, documents):
        builder.add_document(document, [len(document)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def prepare_text(folder: Path, line: str, lines: int) -> Path:
    """Prepare the set `tokens` from copies of `line`, replacing `{i}` with square numbers, using a
    300-token tokenizer trained on this text. Return the data folder."""
    (folder / "text.txt").write_text("".join(line.format(i=i * i) for i in range(lines)))
    options = ["--train-tokenizer", "300", "--document-bytes", "200", "--output", str(folder / "d")]
    assert prepare([f"tokens={folder / 'text.txt'}", *options]) == 0
    return folder / "d"


def write_manifest(folder: Path, **entry: object) -> None:
    """Write a manifest with a single set `a`. `entry` overrides fields of the set."""
    defaults: dict[str, object] = {
        "documents": 3,
        "tokens": 1000,
        "bytes": 4000,
        "max_token": 499,
        "dtype": "uint16",
        "sha256": {},
        "source": [],
    }
    tokenizer = {
        "file": "tokenizer.json",
        "sha256": "",
        "vocab_size": 500,
        "eod_id": 0,
        "byte_level": True,
    }
    content = {"format": 1, "tokenizer": tokenizer, "sets": {"a": defaults | entry}}
    (folder / "manifest.json").write_text(json.dumps(content))
