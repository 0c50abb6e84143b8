"""Host memory for a copy of many tensors: a few large pieces instead of one for each."""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

SLAB: Final = 1 << 28
"""Bytes of a piece. Pinned memory is rounded up to a power of two, and pinning takes as long for a
small tensor as for a large one; a rank's share of a state is thousands of small ones."""

ALIGNMENT: Final = 64


def host_rooms(tensors: Mapping[str, Tensor], *, pinned: bool) -> dict[str, Tensor]:
    """Uninitialised tensors in host memory of the shapes and dtypes of `tensors`, by name.

    Each has a storage of its own, as a file of it must have, which lies in a slab of `SLAB` bytes,
    or alone if it is larger. With `pinned` a copy from a GPU need not be waited for.
    """
    rooms: dict[str, Tensor] = {}
    together: dict[str, int] = {}  # name to its place in the slab
    end = 0
    for name, tensor in tensors.items():
        if together and end + tensor.nbytes > SLAB:
            rooms |= _slab(tensors, together, end, pinned)
            together, end = {}, 0
        together[name] = end
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return rooms | _slab(tensors, together, end, pinned)


def _slab(
    tensors: Mapping[str, Tensor], places: Mapping[str, int], size: int, pinned: bool
) -> dict[str, Tensor]:
    """The rooms of some tensors at their places in one piece of memory of `size` bytes."""
    whole = torch.empty(size, dtype=torch.uint8, pin_memory=pinned).numpy()
    rooms = {}
    for name, start in places.items():
        like = tensors[name]
        # From NumPy a part is a storage of its own, which keeps the whole alive.
        part = torch.from_numpy(whole[start : start + like.nbytes])
        rooms[name] = part.view(like.dtype).view(like.shape)
    return rooms
