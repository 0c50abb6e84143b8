"""Model and optimizer state that can be saved on one layout and loaded on any other.

Every tensor in a checkpoint belongs to one unit or module, and its shape is independent of the
layout:

    weight/layers.0.q.3                float32 master weight if there is one, else the parameter
    optimizer/layers.0.q.3/momentum    elementwise state, with the shape of the unit
    optimizer/layers.0.q.3/u           whole-matrix state, stored by the owner
    optimizer/embedding/step           counter of an elementwise rule
    buffer/layers.0.router.expert_bias persistent buffer of a module

Each rank holds contiguous ranges (spans) of its flattened piece of a unit. A span of a row-major
array consists of a few boxes: the end of one row, several whole rows, and the start of another.
Each box is a view of the rank's memory, and is saved and loaded as one chunk of the unit. Therefore
nothing is gathered, and no rank needs memory for more than its own part of the state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from models.units import Unit
from parallel.checkpoint.safe_index import Reader, UnsafeIndexError, read_index, read_plain
from parallel.comm.collectives import found_by_any, from_all
from parallel.comm.groups import Axis
from parallel.error_text import last_line
from parallel.model import ParallelModel, named_buffers
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from parallel.optimizer.domain_optimizer import DomainOptimizer, Region
from parallel.storage.bucket_layout import Span
from spectral.batching import grouped
from spectral.division import Box, sizes_of, span_of


@dataclass(frozen=True)
class StatePart:
    """A box of a tensor, as stored in a checkpoint.

    key      name of the tensor in the checkpoint
    value    memory `[*sizes]` that the box is saved from and loaded into
    shape    shape of the whole tensor
    offset   position of the box in the tensor
    written  whether this rank saves the box; False on ranks with redundant copies
    """

    key: str
    value: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    written: bool = True

    @property
    def name(self) -> str:
        """Name of the part, unique within a rank."""
        return part_name(self.key, self.offset)

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Position of the part in the whole tensor, in torch's format for chunks."""
        return ChunkStorageMetadata(torch.Size(self.offset), self.value.shape)


def part_name(key: str, offset: Sequence[int]) -> str:
    """Return the name of the part of tensor `key` at `offset`. Names are unique within a rank."""
    return f"{key}{list(offset)}"


SCHEMA = 1
"""Version of the checkpoint's keys and shapes. Bump it if older checkpoints become unreadable."""

SHOWN_PROBLEMS = 8
"""Maximum number of problems listed in an error."""


UNREAD = ("/multiplier", "/slope")
"""Suffixes of SSO state entries that earlier versions saved and that loading ignores."""


class StateError(ValueError):
    """Raised if a checkpoint does not match the model it is loaded into."""


def load_state(
    folder: str | Path, model: ParallelModel, optimizer: DistributedOptimizer
) -> dict[str, Any]:
    """Load model and optimizer state in place from a checkpoint that was saved on any layout.

    Collective: all ranks must call this function. Returns the saved `extra`.

    Raises:
        StateError: on every rank. If tensors are missing or unexpected, or if shapes or dtypes do
        not match, the error is raised before any state is modified. If tensors cannot be read, or
        if counters that must be equal differ, part of the state may already have been loaded.
    """
    model.wait_for_weights()
    problems: list[str] = []
    try:
        index, plain = read_index(folder), read_plain(folder)
    except UnsafeIndexError as error:
        problems.append(str(error))
    _raise_together(problems)
    state = sharded_state(model, optimizer)
    prefix = f"checkpoint {folder}: "
    if plain.get("schema") != SCHEMA:
        raise StateError(f"{prefix}schema must be {SCHEMA}, got {plain.get('schema')}")
    check_fits(prefix, index, state)
    try:
        Reader(folder, index).read_into({}, _PartPlanner(state))
    except (Exception, CheckpointException) as error:
        problems.append(f"checkpoint {folder} cannot be read: {last_line(error)}")
    _raise_together(problems)
    # Update everything derived from the loaded tensors.
    _raise_together([text for domain in optimizer.domains for text in _set_counters(domain, state)])
    for domain in optimizer.domains:
        domain.publish()
        domain.reload_kept()
        domain.model.all_gather_weights()
    extra: dict[str, Any] = plain["extra"]
    return extra


class _PartPlanner(DefaultLoadPlanner):
    """Load planner that reads stored tensors into the parts of a state in place."""

    def __init__(self, state: Mapping[str, StatePart]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._state = state

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for part in self._state.values():
            stored = self.metadata.state_dict_metadata[part.key]
            assert isinstance(stored, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(part.key, stored, [part.chunk])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._state[part_name(index.fqn, index.offset)].value


def sharded_state(model: ParallelModel, optimizer: DistributedOptimizer) -> dict[str, StatePart]:
    """Return this rank's parts of the state, keyed by name.

    Parts are views. Only counters are copied, because many units share one counter in memory.
    """
    parts = [
        *(t for domain in optimizer.domains for t in _weights(domain)),
        *_buffers(model),
        *_in_graph(model),
        *(t for domain in optimizer.domains for t in _elementwise(domain)),
        *(t for domain in optimizer.domains for t in _matrices(domain)),
        *(t for domain in optimizer.domains for t in _counters(domain)),
    ]
    return {part.name: part for part in parts}


def check_fits(prefix: str, index: Metadata, state: Mapping[str, StatePart]) -> None:
    """Raise StateError on every rank if the checkpoint's tensors do not match the model's.

    The model's tensors are the union of `state` over all ranks. The message starts with `prefix`.
    """
    stored = {
        key: tensor
        for key, tensor in index.state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
        and key.startswith(("weight/", "optimizer/", "buffer/", "pc/"))
        and not (key.startswith("optimizer/") and key.endswith(UNREAD))
    }
    parts = {part.key: part for part in state.values()}
    pc_keys = found_by_any(key for key in parts if key.startswith("pc/"))
    model_layers = {key.split("/")[1] for key in pc_keys}
    saved_layers = {key.split("/")[1] for key in stored if key.startswith("pc/")}
    problems = []
    if saved_layers != model_layers:
        one = min(saved_layers ^ model_layers)
        side = "checkpoint" if one in saved_layers else "model"
        problems.append(
            f"it has {len(saved_layers)} PC layers, but the model has {len(model_layers)}; for "
            f"example, {one} is only in the {side}: set pc.blocks as in the checkpoint's config"
        )
    _raise_together(problems, prefix)
    for key, part in parts.items():
        tensor = stored.get(key)
        if tensor is None:
            problems.append(f"{key} is missing")
        elif tuple(tensor.size) != part.shape:
            problems.append(f"{key} has shape {tuple(tensor.size)}, but {part.shape} in the model")
        elif tensor.properties.dtype != part.value.dtype:
            dtype = tensor.properties.dtype
            problems.append(f"{key} has dtype {dtype}, but {part.value.dtype} in the model")
    _raise_together(problems, prefix)
    firsts = sum(not any(part.offset) and part.written for part in state.values())
    # Names are only gathered if the checkpoint has unexpected tensors.
    if sum(from_all(firsts)) != len(stored):
        names = set(found_by_any(parts))
        _raise_together([f"the model has no {key}" for key in stored if key not in names], prefix)


def boxes(start: int, stop: int, axes: Sequence[int]) -> list[Box]:
    """Split the range `[start, stop)` of a row-major array of shape `axes` into boxes, in order.

    Each box is contiguous in the array. An n-dimensional array is split into at most 2 n - 1 boxes.
    """
    if len(axes) == 1:
        return [(range(start, stop),)]
    inner, rest = prod(axes[1:]), axes[1:]
    result: list[Box] = []
    while start < stop:
        row, column = divmod(start, inner)
        if column == 0 and stop - start >= inner:
            rows = (stop - start) // inner
            result.append((span_of(row, rows), *map(range, rest)))
            start += rows * inner
        else:
            end = min(stop - row * inner, inner)
            result += [(span_of(row, 1), *box) for box in boxes(column, end, rest)]
            start = row * inner + end
    return result


def _pieces(key: str, unit: Unit, span: Span, flat: Tensor, tensor: Axis) -> Iterator[StatePart]:
    """Split a span of a unit into boxes and yield each as a part, a view of `flat`
    `[span.length]`."""
    axes, cut, position = unit.local_axes(tensor.size), unit.shard_axis, 0
    for box in boxes(span.piece_start, span.piece_start + span.length, axes):
        sizes = sizes_of(box)
        offset = [places.start for places in box]
        if cut is not None:
            offset[cut] += tensor.rank * axes[cut]
        value = flat.narrow(0, position, prod(sizes)).view(sizes)
        yield StatePart(key, value, unit.axes, tuple(offset), unit.counts_on(tensor.rank))
        position += value.numel()


def _whole(key: str, value: Tensor, written: bool = True) -> StatePart:
    """Return a part that covers a whole tensor."""
    return StatePart(key, value, tuple(value.shape), (0,) * value.dim(), written)


def _weights(domain: DomainOptimizer) -> Iterator[StatePart]:
    """Yield this rank's parts of a domain's weights, omitting the weights of PC layers."""
    for unit, span, start, _ in _region_spans(domain):
        flat = domain.model.masters[span.bucket].detach().narrow(0, start, span.length)
        yield from _pieces(f"weight/{unit.name}", unit, span, flat, domain.domain.tensor)


def _elementwise(domain: DomainOptimizer) -> Iterator[StatePart]:
    """Yield this rank's parts of the elementwise state, which has the shape of the units."""
    for key, unit, span, start, value in _region_state(domain, counters=False):
        flat = value[0].narrow(0, start, span.length)
        yield from _pieces(key, unit, span, flat, domain.domain.tensor)


def _buffers(model: ParallelModel) -> Iterator[StatePart]:
    written = model.domains[0].domain.stage.rank == 0
    for name, value in named_buffers(model.chunks, model.parameters):
        yield _whole(f"buffer/{name}", value, written)


def _in_graph(model: ParallelModel) -> Iterator[StatePart]:
    """Yield the state of in-graph PC layers, under the same keys as `MaterializedStack.saved`."""
    for effective in model.in_graph:
        for i, unit in enumerate(effective.units):
            written = model.reports(unit)
            u, v = effective.pair(i)
            yield _whole(f"pc/{unit.name}/u", u[0], written)
            yield _whole(f"pc/{unit.name}/v", v[0], written)
            if not isinstance(effective.gamma, torch.nn.Parameter):
                yield _whole(f"weight/{unit.name}.gamma", effective.gamma[i : i + 1], written)


def _matrices(domain: DomainOptimizer) -> Iterator[StatePart]:
    """Yield the state of the matrices owned by this rank."""
    for stack in domain.stacks:
        for key, transfer, value in stack.saved():
            yield _whole(key, value, not transfer.unit.is_copy)


def _region_state(
    domain: DomainOptimizer, *, counters: bool
) -> Iterator[tuple[str, Unit, Span, int, Tensor]]:
    """Yield (key, unit, span, start in the region, value) for the state of all unit spans: either
    the counters `[1]`, or all other values, which are `[1, length of the region]`."""
    for unit, span, start, region in _region_spans(domain):
        for name, value in region.state.items():
            if (value.dim() == 1) == counters:
                yield f"optimizer/{unit.name}/{name}", unit, span, start - region.start, value


def _counters(domain: DomainOptimizer) -> Iterator[StatePart]:
    """Yield the counters of all units that this rank stores in whole or in part.

    A unit's counters are saved by the rank that holds its first element.
    """
    tensor, seen = domain.domain.tensor, set()
    for key, unit, span, _, value in _region_state(domain, counters=True):
        if key not in seen:  # the unit's first span, because spans are sorted
            seen.add(key)
            other_piece = tensor.rank > 0 and (unit.replicated or unit.shard_axis is not None)
            copy = other_piece or unit.is_copy
            yield _whole(key, value.clone(), not copy and span.piece_start == 0)


def _set_counters(domain: DomainOptimizer, state: Mapping[str, StatePart]) -> Iterator[str]:
    """Set every region's counters to the counters loaded for its units.

    Yields a message for each unit whose counter differs from that of the first unit in its region.
    """
    loaded: dict[int, tuple[str, Tensor]] = {}
    for key, *_, value in _region_state(domain, counters=True):
        new = state[part_name(key, [0])].value
        first_key, first_value = loaded.setdefault(id(value), (key, new))
        if not torch.equal(first_value, new):
            yield f"{key} must equal {first_key}, got {new.item()} and {first_value.item()}"
        value.copy_(new)


def _region_spans(domain: DomainOptimizer) -> Iterator[tuple[Unit, Span, int, Region]]:
    """Yield (unit, span, start in the shard, region) for all unit spans in this rank's regions,
    which do not contain PC layers."""
    layout, rank = domain.model.bucket_layout, domain.domain.replicas.rank
    regions = grouped(domain.regions, lambda region: region.bucket)
    for unit in domain.model.units:
        for span in layout.shard_spans(unit, rank):
            start = span.start - rank * layout.shard_numel(span.bucket)
            # A bucket has no regions if all of its weights are stored by owners.
            for region in regions.get(span.bucket, ()):
                if region.start <= start < region.start + region.length:
                    yield unit, span, start, region


def _raise_together(problems: Iterable[str], prefix: str = "") -> None:
    """Raise StateError on every rank if any rank has problems. The message starts with `prefix`."""
    all_problems = found_by_any(islice(problems, SHOWN_PROBLEMS + 1))
    if all_problems:
        more = "; and more" if len(all_problems) > SHOWN_PROBLEMS else ""
        raise StateError(f"{prefix}{'; '.join(all_problems[:SHOWN_PROBLEMS])}{more}")
