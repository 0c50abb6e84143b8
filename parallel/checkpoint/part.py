"""A rank's part of a tensor of the state, by its place in the whole tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


@dataclass(frozen=True)
class Part:
    """A box of a tensor, whose memory `value` is: it is saved from there, and loaded into it.

    key      name of the tensor in a checkpoint
    value    `[*sizes]`
    shape    of the whole tensor
    offset   of the box in it
    written  whether this rank saves it; others hold copies
    """

    key: str
    value: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    written: bool = True

    @property
    def name(self) -> str:
        """Its name among the parts of a rank."""
        return part_name(self.key, self.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Its place in the whole tensor, as torch states it."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.value.shape)


def part_name(key: str, offset: Sequence[int]) -> str:
    """Name, among the parts of a rank, of the part of tensor `key` at `offset`."""
    return f"{key}{list(offset)}"
