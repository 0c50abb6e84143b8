"""Reads checkpoint state without executing code from its pickles.

torch writes `.metadata`, the index of a checkpoint's tensors, as a pickle. `read_index` unpickles
only the classes that such an index contains. `read_plain` uses torch.load with weights_only, as
does torch's own reader of the tensor files.
"""

import os
import pickle
import warnings
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load

from parallel.error_text import first_line

INDEX_FILE: Final = ".metadata"
PLAIN_FILE: Final = "common.pt"
"""File with the non-tensor entries of a state: `schema` and `extra`."""

ALLOWED: Final = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.planner": {
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.serialization": {"_get_layout"},
}
"""Classes and functions, by module, that an index may refer to; the classes hold only data."""


class UnsafeIndexError(ValueError):
    """Raised if an index refers to code, or if a file is unreadable or invalid."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        raise UnsafeIndexError(f"the file refers to {module}.{name}")


def _member(enumeration: Any, name: Any) -> Any:
    """Return an enum member. Needed because Python 3.11.2 pickles enum members as getattr calls."""
    is_enumeration = isinstance(enumeration, type) and issubclass(enumeration, Enum)
    if is_enumeration and name in enumeration.__members__:
        return enumeration[name]
    raise UnsafeIndexError(f"the file refers to the attribute {name!r:.60} of {enumeration!r:.60}")


def read_index(folder: str | Path) -> Metadata:
    """Read the index of the state in `folder`.

    Raises UnsafeIndexError if the contents are unsafe or invalid. Never executes code from the
    file.
    """
    path = Path(folder) / INDEX_FILE
    try:
        with path.open("rb") as file:
            index = _Unpickler(file).load()
    except UnsafeIndexError as error:
        raise UnsafeIndexError(f"{path} is not trusted: {error}") from None
    except Exception as error:
        raise UnsafeIndexError(f"{path} cannot be read: {error}") from None
    if not isinstance(index, Metadata):
        raise UnsafeIndexError(f"{path} is not checkpoint metadata")
    for name in index_files(index):
        if name != os.path.basename(name) or not (Path(folder) / name).is_file():
            raise UnsafeIndexError(
                f"{path} is not trusted: {name!r} is not a file in the same folder"
            )
    return index


def index_files(index: Metadata) -> list[str]:
    """Return the names of the tensor files listed in an index."""
    stored = index.storage_data if isinstance(index.storage_data, dict) else {}
    return sorted({str(getattr(entry, "relative_path", "")) for entry in stored.values()})


def read_plain(folder: str | Path) -> dict[str, Any]:
    """Read the non-tensor values of the state in `folder`.

    Raises UnsafeIndexError if the contents are unsafe or invalid. Never executes code from the
    file.
    """
    path = Path(folder) / PLAIN_FILE
    try:
        plain = torch.load(path, weights_only=True)
    except Exception as error:
        reason = first_line(error)
        raise UnsafeIndexError(f"{path} is not trusted: {reason}") from None
    if not isinstance(plain, dict) or not isinstance(plain.get("extra"), dict):
        raise UnsafeIndexError(f"{path} must contain a dict whose 'extra' entry is a dict")
    return plain


class Reader(FileSystemReader):
    """torch's checkpoint reader for a state folder, using the index that `read_index` returned."""

    def __init__(self, folder: str | Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the index."""
        assert self._index.storage_meta is not None
        self._index.storage_meta.load_id = self.load_id
        return self._index

    def read_into(self, targets: Mapping[str, Tensor], planner: LoadPlanner | None = None) -> None:
        """Read stored tensors in place into `targets`, which maps their keys to tensors.

        If `planner` is given, reads the parts that the planner requests instead. Not collective:
        only this process reads. Raises CheckpointException.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            load(dict(targets), storage_reader=self, planner=planner, no_dist=True)
