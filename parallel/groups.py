"""Process groups from the config, and which layers a pipeline stage holds."""

import datetime
import os
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from parallel.cpu import prepare_megatron


@dataclass(frozen=True)
class Axis:
    """One axis of parallelism: its process group and this rank's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """The axis of an initialised process group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


@dataclass(frozen=True)
class Groups:
    """Every process group a rank works with.

    tensor, pipeline, data   the three axes
    stage                    tensor x data: the ranks that hold the same layers; a rank's place is
                             its tensor rank + tensor size * its data rank
    device                   where this rank's tensors live
    """

    tensor: Axis
    pipeline: Axis
    data: Axis
    stage: Axis
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pipeline.rank == self.pipeline.size - 1


@dataclass(frozen=True)
class Stage:
    """What one model chunk of one pipeline rank holds."""

    layers: tuple[int, ...]
    embedding: bool
    head: bool


def stages(layers: int, *, rank: int, size: int, virtual: int = 1) -> list[Stage]:
    """The chunks of pipeline rank `rank` of `size`, in the order of virtual stages.

    Layers are dealt in `size * virtual` equal runs; run `v * size + rank` is chunk v of the rank.
    Raises ValueError if the layers do not divide.
    """
    runs = size * virtual
    if layers % runs:
        raise ValueError(
            f"layers must be divisible by pipeline x virtual_pipeline, got {layers} layers "
            f"for {size} x {virtual}"
        )
    length = layers // runs
    mine = [v * size + rank for v in range(virtual)]
    return [
        Stage(tuple(range(run * length, (run + 1) * length)), run == 0, run == runs - 1)
        for run in mine
    ]


def world_size() -> int:
    """Number of processes torchrun started, 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def initialize(
    *, tensor: int = 1, pipeline: int = 1, virtual_pipeline: int = 1, timeout_minutes: float = 10.0
) -> Groups:
    """The process groups of this run: NCCL with one GPU per rank where there are GPUs, else gloo.

    Without torchrun it makes a world of one. Call `shutdown` at the end.
    """
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    store = None
    if "MASTER_ADDR" not in os.environ:
        store = dist.HashStore()
    prepare_megatron()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=int(os.environ["RANK"]),
        world_size=world_size(),
        store=store,
        timeout=datetime.timedelta(minutes=timeout_minutes),
        **({"device_id": device} if device.type == "cuda" else {}),
    )
    parallel_state.initialize_model_parallel(
        tensor,
        pipeline,
        virtual_pipeline_model_parallel_size=virtual_pipeline if virtual_pipeline > 1 else None,
    )
    return Groups(
        tensor=Axis.of(parallel_state.get_tensor_model_parallel_group()),
        pipeline=Axis.of(parallel_state.get_pipeline_model_parallel_group()),
        data=Axis.of(parallel_state.get_data_parallel_group()),
        stage=Axis.of(parallel_state.get_tensor_and_data_parallel_group()),
        device=device,
    )


def shutdown() -> None:
    """None; leaves the process groups, so that a process may initialise others."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
