"""Ranks that share parameters: their collectives, and each rank's part of a parameter."""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ..division import Box, intersection, numel_of, sizes_of
from ..local_part import local_of


class RankGroup:
    """A process group, its collectives, and a counter of the bytes sent by this rank.

    Attributes:
        ranks: global ranks of the members, in group order.
        rank, size: this process's rank within the group, and the group size.
        sent: number of bytes that this rank has sent to other ranks in exchanges.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.rank = dist.get_rank(group)
        self.size = len(self.ranks)
        self.sent = 0

    def all_to_all(self, send: Tensor, receive_counts: list[int], send_counts: list[int]) -> Tensor:
        """Exchange elements between all pairs of ranks. See `exchange.AllToAll`."""
        received = send.new_empty(sum(receive_counts))
        self.sent += (send.numel() - send_counts[self.rank]) * send.element_size()
        dist.all_to_all_single(received, send, receive_counts, send_counts, group=self.group)
        return received

    def agree(self, flag: Tensor, value: int = 0) -> tuple[Tensor, Tensor]:
        """Return two 0-d tensors on the device of `flag` (0-d bool): whether `flag` is True on all
        ranks, and whether `value` is the same on all ranks.
        """
        numbers = [torch.full_like(flag, x, dtype=torch.int64) for x in (value, -value)]
        figures = torch.stack([flag.long(), *numbers])
        dist.all_reduce(figures, dist.ReduceOp.MIN, group=self.group)
        least, smallest, largest = figures.unbind()
        return least > 0, smallest == -largest

    def differ(self, numbers: Sequence[Tensor]) -> list[bool]:
        """Return, for each 0-d number, whether it differs between ranks by more than a thousandth.

        Numbers must not be negative.
        """
        extremes = torch.stack([*numbers, *(-number for number in numbers)])
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self.group)
        largest, smallest = extremes[: len(numbers)], -extremes[len(numbers) :]
        return (largest - smallest > 1e-3 * largest).tolist()


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks in a device mesh. This is a collective."""
    if mesh.ndim == 1:
        mesh_group: dist.ProcessGroup = mesh.get_group()
        return mesh_group
    ranks = sorted(mesh.mesh.flatten().tolist())
    world: dist.ProcessGroup | None = dist.group.WORLD
    if world is not None and ranks == list(range(dist.get_world_size())):
        return world
    return _group_among(tuple(ranks), world)


@functools.cache
def _group_among(ranks: Sequence[int], world: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return the process group of `ranks`, created once per default group."""
    group: dist.ProcessGroup | None = dist.new_group(ranks, use_local_synchronization=True)
    if group is None:
        raise RuntimeError(f"this rank must be one of the ranks {ranks} in the device mesh")
    return group


def ranks_of(parameters: Iterable[Tensor], replicas: dist.ProcessGroup | None) -> RankGroup:
    """Return all ranks that hold a copy or a shard of a parameter: the ranks of the largest mesh,
    or `replicas` if there are no DTensors.

    Raises ValueError for a mesh that is not a submesh of the largest mesh.
    """
    meshes = [p.device_mesh for p in parameters if isinstance(p, DTensor)]
    if not meshes:
        assert replicas is not None
        return RankGroup(replicas)
    largest = max(meshes, key=lambda mesh: mesh.size())
    ranks = set(largest.mesh.flatten().tolist())
    for mesh in meshes:
        if not ranks.issuperset(mesh.mesh.flatten().tolist()):
            raise ValueError(
                "an optimizer's device meshes must be submeshes of the largest mesh, got "
                f"{mesh} and {largest}"
            )
    return RankGroup(group_of(largest))


def check_one_mesh(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError if parameters are on different device meshes, or only some are DTensors."""
    meshes = {p.device_mesh if isinstance(p, DTensor) else None for p in parameters}
    if len(meshes) > 1:
        raise ValueError(
            "an optimizer's matrices must all be on the same device mesh, got "
            f"{' and '.join(sorted(map(str, meshes)))}; create one optimizer per mesh"
        )


@dataclass(frozen=True)
class TensorLayout:
    """Each rank's part of a tensor.

    boxes   each rank's part, indexed by rank within the group
    copies  index of the copy that each part belongs to, indexed by rank within the group
    """

    boxes: tuple[Box, ...]
    copies: tuple[int, ...]

    def parts(self, box: Box) -> dict[int, Box]:
        """Map each rank whose part overlaps `box` to the intersection of the part and `box`."""
        common = ((rank, intersection(box, held)) for rank, held in enumerate(self.boxes))
        return {rank: part for rank, part in common if part is not None}

    @cached_property
    def numel(self) -> int:
        """Number of elements in a single copy of the parameter."""
        return sum(
            numel_of(box)
            for box, copy in zip(self.boxes, self.copies, strict=True)
            if copy == self.copies[0]
        )


def flat_state(layout: TensorLayout, parameter: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Create zeros `[elements]`, distributed across a parameter's ranks as in `flat_layout`."""
    device = local_of(parameter).device
    local = torch.zeros(sizes_of(layout.boxes[rank]), dtype=dtype, device=device)
    if not isinstance(parameter, DTensor):
        return local
    mesh, shape = parameter.device_mesh, torch.Size((layout.numel,))
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(1,))


def layout_of(parameter: Tensor, ranks: RankGroup) -> TensorLayout:
    """Return each rank's part of a parameter, which is the whole parameter if it is a plain tensor.

    Raises ValueError for placements in which this rank's part is not a box of consecutive indices.
    """
    if not isinstance(parameter, DTensor):
        return _copies(parameter.shape, ranks.size)
    layout = _layout(parameter.shape, parameter.device_mesh, parameter.placements, ranks)
    box = layout.boxes[ranks.rank]
    local = local_of(parameter)
    if numel_of(box) != local.numel() or layout.numel != parameter.numel():
        raise ValueError(
            f"placements {parameter.placements} of a parameter of shape {tuple(parameter.shape)} "
            f"are not supported: the local shape must be {sizes_of(box)}, got {tuple(local.shape)}"
        )
    return layout


def flat_layout(numel: int, parameter: Tensor, ranks: RankGroup) -> TensorLayout:
    """Return each rank's part of a parameter's flat state, which has `numel` elements.

    The state of a DTensor is sharded evenly; the state of a plain parameter is stored whole on
    every rank.
    """
    if not isinstance(parameter, DTensor):
        return _copies((numel,), ranks.size)
    mesh = parameter.device_mesh
    return _layout((numel,), mesh, [Shard(0)] * mesh.ndim, ranks)


def _copies(shape: Sequence[int], size: int) -> TensorLayout:
    return TensorLayout((tuple(map(range, shape)),) * size, tuple(range(size)))


def _layout(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement], ranks: RankGroup
) -> TensorLayout:
    for placement in placements:
        if not isinstance(placement, (Replicate, Shard, _StridedShard)):
            raise ValueError(f"parameters must be sharded or replicated, got {placement}")
    boxes, copies = [], []
    for rank in ranks.ranks:
        coordinate = (mesh.mesh == rank).nonzero()[0].tolist()
        boxes.append(_box(shape, tuple(mesh.shape), coordinate, placements))
        copy = 0
        for index, size, placement in zip(coordinate, mesh.shape, placements, strict=True):
            if isinstance(placement, Replicate):
                copy = copy * size + index
        copies.append(copy)
    return TensorLayout(tuple(boxes), tuple(copies))


def _box(
    shape: Sequence[int],
    mesh: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> Box:
    """Return the part of a tensor held at one coordinate of a mesh.

    A strided shard further splits the shards of later mesh dimensions (FSDP after tensor
    parallelism), at the boundaries of `torch.chunk`.
    """
    dims = range(len(placements))
    plain = [i for i in dims if not isinstance(placements[i], _StridedShard)]
    strided = [i for i in reversed(dims) if isinstance(placements[i], _StridedShard)]
    box = [*map(range, shape)]
    for i in (*plain, *strided):
        placement = placements[i]
        if isinstance(placement, (Shard, _StridedShard)):
            whole = box[placement.dim]
            size = -(-len(whole) // mesh[i])
            box[placement.dim] = whole[size * coordinate[i] :][:size]
    return tuple(box)
