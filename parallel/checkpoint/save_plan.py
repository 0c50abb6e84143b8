"""The save plan: which rank writes which tensors, agreed on once and used for every save."""

from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from torch import Tensor

from models.engine import own_writer, without_advice
from parallel.checkpoint.state import entry_name


class SavePlan:
    """The plan of a run's saves, which differ only in folder and values, and host memory for them.

    All saves copy to the same host memory, so one must be over before the next is staged. Planning
    sends every rank's list of tensors to rank 0, which takes about 0.2 ms of processor time per
    tensor, and more with more ranks; therefore it is done for the first save only.
    """

    def __init__(self) -> None:
        self.metadata: Any = None
        """megatron-core's index of all tensors, on rank 0, still without their places in files."""
        self._files: list[tuple[str, list[tuple[Any, str]]]] | None = None
        self._copies: dict[str, Tensor] = {}

    def stage(self, folder: Path, state: ShardedStateDict) -> list[Any]:
        """Copy this rank's tensors to host memory.

        All ranks call it together, with the same tensors in `state` every time. Returns the files
        to write in the form that megatron-core's writers take.
        """
        if self._files is None:
            self._make(folder, state)
        assert self._files is not None
        if not self._copies:
            entries = [entry for _, members in self._files for _, entry in members]
            self._copies = {entry: host_buffer(state[entry].data) for entry in entries}
        staged: list[Any] = [
            (
                str(folder / name),
                name,
                ([], [(item, self._copy(entry, state[entry].data)) for item, entry in members]),
            )
            for name, members in self._files
        ]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return staged

    def _copy(self, entry: str, tensor: Tensor) -> Tensor:
        """Copy a tensor to host memory; the copy may be under way if the tensor is on a GPU."""
        return self._copies[entry].copy_(tensor.detach(), non_blocking=tensor.is_cuda)

    def writer(self, folder: Path) -> filesystem_async.FileSystemWriterAsync:
        """Make the writer of the index of `folder`, which is used once all files are there."""
        return filesystem_async.FileSystemWriterAsync(folder, thread_count=1)

    def _make(self, folder: Path, state: ShardedStateDict) -> None:
        # Otherwise megatron-core starts a manager process, which imports the main script, for a
        # queue that is not needed here.
        filesystem_async._results_queue = object()
        strategy = planning_strategy()
        with without_advice():
            strategy.async_save(state, folder, **own_writer(strategy.async_save))
        self.metadata = strategy.metadata
        self._files = []
        for _, name, (values, tensors) in strategy.storage.write_buckets:
            members = [(item, entry_name(item.index.fqn, item.index.offset)) for item, _ in tensors]
            assert not values, f"{name} has plain values, which differ between saves"
            for (_, entry), (_, tensor) in zip(members, tensors, strict=True):
                assert state[entry].data.shape == tensor.shape, f"{entry} has another shape"
            self._files.append((name, members))


def host_buffer(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor like `tensor` in host memory, pinned if that is on a GPU."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def planning_strategy() -> Any:
    """Make megatron-core's strategy, stopped once it has planned which rank writes what.

    Every rank then has `storage`, and rank 0 has `metadata`.
    """
    # This module asks for CUDA when it is imported: not before the environment is set.
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    class Planned(TorchDistSaveShardedStrategy):
        storage: filesystem_async.FileSystemWriterAsync
        metadata: Any

        def _get_save_and_finalize_callbacks(
            self, writer: Any, planned: Any, *_: Any
        ) -> AsyncRequest:
            self.storage, self.metadata = writer, planned[1]
            return AsyncRequest(None, (), [])

    return Planned("torch_dist", 1, thread_count=1)
