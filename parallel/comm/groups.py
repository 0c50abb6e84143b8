"""Process groups for a parallel layout, and the layers of each model chunk."""

import datetime
import itertools
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from models.layout import ChunkSpec, Layout
from parallel.comm.cpu import prepare_megatron

WHOLE = Layout()


@dataclass(frozen=True)
class Axis:
    """A parallelism axis: its process group, and this rank's index in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Self:
        """Create an axis from an initialised process group."""
        return cls(group, dist.get_rank(group), dist.get_world_size(group))


@dataclass(frozen=True)
class Domain:
    """The ranks across which dense or expert parameters are sharded and replicated.

    name       "dense", or "expert" for the routed experts of mixture-of-experts layers
    tensor     the ranks that share each matrix
    replicas   ranks with the same parameters, across which gradients are reduced and state is
               sharded
    stage      tensor x replicas; a rank's index is its tensor rank + tensor size x replica rank
    divisor    divisor that turns a summed gradient into the mean over the global batch
    ends       for a tied embedding: the two ranks that hold copies of this rank's piece, one on the
               first and one on the last pipeline stage; None on other stages, or if there is only
               one stage
    """

    name: str
    tensor: Axis
    replicas: Axis
    stage: Axis
    divisor: int
    ends: Axis | None = None


@dataclass(frozen=True)
class Groups:
    """All process groups of a rank.

    layout     layout of the groups
    tensor     ranks that each dense matrix is sharded across
    pipeline   ranks that form one pipeline
    data       ranks that read different samples
    context    ranks that each sequence is split across
    expert     ranks that the experts of a layer are distributed across
    dense      domain of all parameters except routed experts; its replicas are data x context
    experts    domain of routed experts, whose tensor ranks are the expert-tensor-parallel ranks
    host       gloo group of all ranks for values in host memory, also used if tensors are on GPUs
    store      rendezvous store, which remains usable after a failed collective
    device     device of this rank's tensors
    """

    layout: Layout
    tensor: Axis
    pipeline: Axis
    data: Axis
    context: Axis
    expert: Axis
    dense: Domain
    experts: Domain
    host: dist.ProcessGroup
    store: Store
    device: torch.device

    @property
    def rank(self) -> int:
        """Global rank."""
        return dist.get_rank()


def chunk_specs(layers: int, layout: Layout, rank: int) -> list[ChunkSpec]:
    """Return the chunks of pipeline rank `rank`, ordered by virtual stage.

    Layers are split into `pipeline * virtual_pipeline` pieces. Piece `v * pipeline + rank` is chunk
    v of the rank. The embedding belongs to the first piece, and the head to the last. The layout
    may set the number of layers in the first or last piece. The remaining layers must be divisible
    by the number of other pieces.
    """
    pieces = layout.pipeline * layout.virtual_pipeline
    ends = ((0, layout.first_stage_layers), (pieces - 1, layout.last_stage_layers))
    given = {piece: count for piece, count in ends if count is not None}
    shared = (layers - sum(given.values())) // max(1, pieces - len(given))
    lengths = (given.get(piece, shared) for piece in range(pieces))
    bounds = list(itertools.accumulate(lengths, initial=0))
    return [
        ChunkSpec(tuple(range(bounds[i], bounds[i + 1])), i == 0, i == pieces - 1)
        for i in range(rank, pieces, layout.pipeline)
    ]


def world_size() -> int:
    """Return the world size set by torchrun, or 1 if this process was not started by torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


GENERATIONS = itertools.count()
"""Counts calls to `initialize`, which all ranks make in the same order."""


def initialize(
    layout: Layout = WHOLE,
    *,
    timeout_seconds: float = 600.0,
    device_type: Literal["cuda", "cpu"] | None = None,
    agree: Callable[[], None] = lambda: None,
) -> Groups:
    """Create a layout's process groups, using NCCL on GPUs (one GPU per rank) or gloo on CPUs.

    `device_type` defaults to "cuda" if available. Without torchrun, the world size is 1.
    Collectives fail if they wait longer than `timeout_seconds` for a rank. Call `shutdown` at the
    end.

    `agree` is called as soon as all ranks are connected, before the groups of the layout are
    created. If `agree` raises an error, all groups are destroyed.
    """
    rank = os.environ.get("RANK", "0")
    device = torch.device("cpu")
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    prepare_megatron()
    timeout = datetime.timedelta(seconds=timeout_seconds)
    store = _store(timeout)
    store.set(f"host/{rank}", socket.gethostname())  # for `collectives.absent_ranks`
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=int(rank),
        world_size=world_size(),
        store=store,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        agree()
    except BaseException:
        dist.destroy_process_group()
        raise
    virtual = layout.virtual_pipeline
    parallel_state.initialize_model_parallel(
        layout.tensor,
        layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        distributed_timeout_minutes=timeout_seconds / 60,
        create_gloo_process_groups=False,  # `host` is the only gloo group needed
    )
    host = dist.new_group(backend="gloo", timeout=timeout)
    return _groups(layout, device, host, store, _expert_stage(timeout))


def _expert_stage(timeout: datetime.timedelta) -> Axis:
    """Create the axis of this pipeline stage's ranks that hold the same experts, whole or as
    shards.

    megatron-core orders the ranks of a stage by expert tensor rank, then expert rank, then replica,
    and does not create a group for this axis.
    """
    state = parallel_state
    tensor = state.get_expert_tensor_parallel_world_size()
    if tensor == 1:
        return Axis.of(state.get_expert_data_parallel_group())
    apart = tensor * state.get_expert_model_parallel_world_size()
    ranks = torch.arange(dist.get_world_size()).view(
        state.get_pipeline_model_parallel_world_size(), -1, apart // tensor, tensor
    )
    sets = ranks.transpose(1, 2).flatten(2).flatten(0, 1).tolist()
    group, _ = dist.new_subgroups_by_enumeration(sets, timeout=timeout)
    return Axis.of(group)


def _store(timeout: datetime.timedelta) -> Store:
    """Return the rendezvous store, with a separate prefix for each call to `initialize`.

    torchrun's own store survives restarts, so each restart also has its own prefix. Without the
    prefixes, a rank could read a stale address from before the last `shutdown` or restart. A single
    rank ignores MASTER_ADDR, which a shell or job script may set for other programs.
    """
    if world_size() == 1 or "MASTER_ADDR" not in os.environ:  # rehearsals set no address
        return dist.HashStore()  # type: ignore[attr-defined]
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"restart/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    return PrefixStore(f"groups/{next(GENERATIONS)}", store)


def _groups(
    layout: Layout, device: torch.device, host: dist.ProcessGroup, store: Store, expert_stage: Axis
) -> Groups:
    """Collect the process groups created by megatron-core."""
    state = parallel_state
    tensor = Axis.of(state.get_tensor_model_parallel_group())
    replicas = Axis.of(state.get_data_parallel_group(with_context_parallel=True))
    context = Axis.of(state.get_context_parallel_group())
    # The loss of a micro-batch is the mean over its own rank's tokens, even if they are processed
    # by experts on other ranks.
    divisor = replicas.size
    ends = None  # connects the first and last pipeline stages
    if layout.pipeline > 1:
        # After a shutdown, is_rank_in_embedding_group would still refer to the old groups.
        group = state.get_embedding_group(check_initialized=False)
        ends = None if group is None else Axis.of(group)
    return Groups(
        layout=layout,
        tensor=tensor,
        pipeline=Axis.of(state.get_pipeline_model_parallel_group()),
        data=Axis.of(state.get_data_parallel_group()),
        context=context,
        expert=Axis.of(state.get_expert_model_parallel_group()),
        dense=Domain(
            "dense",
            tensor,
            replicas,
            Axis.of(state.get_tensor_and_data_parallel_group(with_context_parallel=True)),
            divisor,
            ends,
        ),
        experts=Domain(
            "expert",
            Axis.of(state.get_expert_tensor_parallel_group()),
            Axis.of(state.get_expert_data_parallel_group()),
            expert_stage,
            divisor,
        ),
        host=host,
        store=store,
        device=device,
    )


def abort() -> None:
    """Abort the process groups after an error, without waiting for other ranks.

    A regular NCCL shutdown would wait for pending collectives until they time out.
    """
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()
    else:
        shutdown()


def shutdown() -> None:
    """Destroy the process groups, so that new ones can be initialised."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
