"""Random tokens for tests of models."""

import torch
from torch import Tensor


def tokens_of(batch: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Random tokens and next-token labels `[batch, length]`, the same on every rank."""
    generator = torch.Generator().manual_seed(11)
    window = torch.randint(vocab, (batch, length + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()
