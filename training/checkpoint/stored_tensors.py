"""Tensors of a checkpoint's state folder, read one by one without process groups."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from parallel.checkpoint.safe_index import Reader, read_index
from parallel.error_text import last_line
from training.errors import BrokenCheckpointError


class StoredTensors:
    """Tensors stored in `folder`, whatever layout saved them.

    All keys are those of `parallel.checkpoint.state`. The index is read once, tensors when they are
    asked for. Raises BrokenCheckpointError if the folder cannot be read, here and in `read_into`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            index = read_index(folder)
        except Exception as error:
            raise broken(folder, error) from error
        self._reader = Reader(folder, index)
        self._tensors = {
            key: entry
            for key, entry in index.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that begin with `prefix`."""
        return [key for key in self._tensors if key.startswith(prefix)]

    def empty(self, key: str) -> Tensor:
        """Return an uninitialised tensor with the shape and dtype of a stored one."""
        entry = self._tensors[key]
        return torch.empty(entry.size, dtype=entry.properties.dtype)

    def read_into(self, places: Mapping[str, Tensor]) -> None:
        """Fill each tensor with what is stored under its key; the shapes must agree."""
        missing = [key for key in places if key not in self]
        if missing:
            raise BrokenCheckpointError(f"{self.folder} has no {named(missing)}")
        for key, place in places.items():
            if place.shape != self._tensors[key].size:
                raise BrokenCheckpointError(
                    f"{self.folder}: {key} must have shape {tuple(place.shape)}, "
                    f"got {tuple(self._tensors[key].size)}"
                )
        try:
            self._reader.read_into(places)
        except (Exception, CheckpointException) as error:
            raise broken(self.folder, error) from error

    def read(self, keys: Sequence[str]) -> dict[str, Tensor]:
        """Return the tensors of `keys`, whole, on the CPU, in the stored dtype."""
        try:
            found = {key: self.empty(key) for key in keys}
        except Exception as error:  # whatever an index may say of a tensor
            raise broken(self.folder, error) from error
        self.read_into(found)
        return found


def named(keys: Collection[str]) -> str:
    """Return the first of some tensors' names in order, and how many more there are.

    `weight/head (and 79 others)`
    """
    first, others = min(keys), len(keys) - 1
    return f"{first} (and {others} other{'s' if others > 1 else ''})" if others else first


def broken(folder: Path, error: BaseException) -> BrokenCheckpointError:
    """Return the error that says why a folder cannot be read."""
    return BrokenCheckpointError(f"{folder} cannot be read: {last_line(error)}")
