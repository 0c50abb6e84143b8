"""Reads the pickles of a checkpoint without executing code that they name.

torch writes the index of a checkpoint's tensors, `.metadata`, as a pickle and would load it as one.
`read_index` allows it to name only what an index consists of. `untrusted` checks a folder before
torch or megatron-core read it. The tensors themselves are read by torch with weights_only.
"""

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.metadata import Metadata

INDEX_FILE: Final = ".metadata"

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
"""Modules and names that an index may refer to; all of them only hold values."""


class UnsafeIndexError(ValueError):
    """An index that refers to more than values, or a file that is not an index."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in ALLOWED.get(module, ()) or (module == "torch" and _is_dtype(name)):
            return super().find_class(module, name)
        raise UnsafeIndexError(f"it asks for {module}.{name}")


def _is_dtype(name: str) -> bool:
    return isinstance(getattr(torch, name, None), torch.dtype)


def read_index(folder: str | Path) -> Metadata:
    """Read the index of the state in `folder`.

    Raises UnsafeIndexError, having executed nothing.
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
        raise UnsafeIndexError(f"{path} is not an index of tensors")
    for name in index_files(index):
        if name != os.path.basename(name) or not (Path(folder) / name).is_file():
            raise UnsafeIndexError(f"{path} is not trusted: {name!r} is not a file of its folder")
    return index


def index_files(index: Metadata) -> list[str]:
    """Return the names of the files that an index says tensors lie in."""
    stored = index.storage_data if isinstance(index.storage_data, dict) else {}
    return sorted({str(getattr(entry, "relative_path", "")) for entry in stored.values()})


def untrusted(folder: str | Path) -> Iterator[str]:
    """Yield a sentence for each pickle in a state folder that refers to more than values."""
    try:
        read_index(folder)
    except UnsafeIndexError as error:
        yield str(error)
    path = Path(folder) / COMMON_STATE_FNAME
    try:
        common = torch.load(path, weights_only=True)
    except Exception as error:
        yield f"{path} is not trusted: {(str(error) or 'it is empty').splitlines()[0]}"
    else:
        if not isinstance(common, dict) or not isinstance(common.get("extra"), dict):
            yield f"{path} must be a mapping with a mapping 'extra'"
