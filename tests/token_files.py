"""Small token sets for tests: a text with structure, so that a model can learn something."""

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder


def write_token_set(prefix: Path, *, tokens: int, vocab: int, seed: int, documents: int = 8) -> str:
    """The prefix of a new .bin/.idx pair of `documents` random walks over the token ids."""
    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for _ in range(documents):
        steps = generator.integers(1, 4, size=tokens // documents)
        walk = np.cumsum(steps) % (vocab - 1) + 1  # 0 ends a document
        walk[-1] = 0
        builder.add_document(torch.from_numpy(walk), [len(walk)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)
