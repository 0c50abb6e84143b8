"""The save plan: which rank writes which tensors, agreed on once and used for every save."""

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from parallel.checkpoint.part import Part, part_name
from parallel.comm.collectives import on_first


class StatePlanner(DefaultSavePlanner):
    """The plan of a run's saves, which differ only in folder and values, and host memory for them.

    All saves copy to the same host memory, so one must be over before the next is staged. Planning
    sends every rank's list of tensors to rank 0, which takes about 0.2 ms of processor time per
    tensor, and more with more ranks; therefore it is done for the first save only.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.index: Metadata | None = None
        """Index of all tensors, on rank 0, still without their places in files."""
        self._items: list[WriteItem] | None = None
        self._copies: dict[str, Tensor] = {}

    def stage(self, state: Mapping[str, Part]) -> SavePlan:
        """Copy the tensors that this rank writes to host memory, and return the plan to write them.

        All ranks call it together, with the same tensors in `state` every time.
        """
        if self._items is None:
            self._make(state)
        assert self._items is not None
        for name, copy in self._copies.items():
            value = state[name].value  # the copy may be under way if it is on a GPU
            copy.copy_(value.detach(), non_blocking=value.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return SavePlan(self._items)

    def _make(self, state: Mapping[str, Part]) -> None:
        written = {name: part for name, part in state.items() if part.written}
        self._items = [_item(part) for part in written.values()]
        self._copies = {name: host_buffer(part.value) for name, part in written.items()}
        plans = on_first(SavePlan(self._items))
        if plans:
            _, self.index = self.create_global_plan(plans)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the copy of what an item of the plan writes."""
        assert write_item.index.offset is not None
        return self._copies[part_name(write_item.index.fqn, write_item.index.offset)]


def _item(part: Part) -> WriteItem:
    return WriteItem(
        MetadataIndex(part.key, part.chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            part.chunk, TensorProperties(dtype=part.value.dtype), torch.Size(part.shape)
        ),
    )


def host_buffer(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor like `tensor` in host memory, pinned if that is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class StateWriter(FileSystemWriter):
    """torch's writer with an index of plain values alone, without the path that torch stores."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # all tensors are in host memory
        self.folder = folder

    def storage_meta(self) -> StorageMeta:
        """Return what the index says of the writer."""
        return StorageMeta(save_id=self.save_id)

    def own_plan(self, plan: SavePlan) -> SavePlan:
        """Return a plan with the names of this rank's files, which have its place among plans."""
        before = [SavePlan([])] * dist.get_rank()
        return self.prepare_global_plan([*before, plan])[-1]
