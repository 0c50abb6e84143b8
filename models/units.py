"""Units: the matrices, gains and biases that make up a model's parameters.

A matrix unit is the smallest matrix that a spectral operation treats as a whole, such as q, k or v
of one attention head, or a gate, up or down projection. Megatron fuses several such matrices into
one parameter, and shards parameters across tensor-parallel ranks. A unit describes its view of the
local parameter, and how the pieces on all ranks form the whole matrix. Initialisation, optimizers
and monitors only work with units, so no other file depends on how weights are fused.

Units are declared by pure functions of the config, without building a model, creating process
groups or allocating memory.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

Index = tuple[int | slice, ...]
ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One matrix, gain or bias of the model on a tensor-parallel rank.

    name         global name, the same for every layout, e.g. `layers.3.q.5`
    parameter    global name of the parameter that contains the unit, e.g. `layers.3.attention.qkv`
    role         q, k, v, o, gate, up, down, embedding, head, gain, bias ...
    view_shape   shape of a view of the local parameter
    index        index of the unit in this view
    axes         n-dimensional shape of the whole unit; flattening all axes but the last yields
                 `[rows, cols]`
    shard_axis   axis of `axes` that is sharded over tensor-parallel ranks, or None if each rank
                 holds the whole unit
    replicated   whether every tensor-parallel rank has a copy of the unit (gains)
    partial_over_tensor  whether each tensor-parallel rank computes a partial gradient of the unit,
                 as for the gains of query and key norms, whose heads are sharded over the ranks
    whole_gradient   for a replicated unit: whether every tensor-parallel rank computes the full
                 gradient, even under sequence parallelism (gamma of a sharded PC layer)
    draws        (name, rows) of the random draws that initialise the unit, in row order
    start        initial value of every element of a unit without draws
    tied_stage   for a tied embedding with copies on two pipeline stages: the stage of this copy,
                 first or last; otherwise None
    domain       ranks that replicate the unit: dense = the data-parallel group, expert = the
                 expert-data-parallel group (routed experts)
    """

    name: str
    parameter: str
    role: str
    view_shape: tuple[int, ...]
    index: Index
    axes: tuple[int, ...]
    shard_axis: int | None = None
    replicated: bool = False
    partial_over_tensor: bool = False
    whole_gradient: bool = False
    draws: tuple[tuple[str, int], ...] = ()
    start: float = 1.0
    tied_stage: Literal["first", "last"] | None = None
    domain: Literal["dense", "expert"] = "dense"

    @property
    def is_copy(self) -> bool:
        """Whether the unit is a copy of a unit that another pipeline stage counts, saves and
        reports."""
        return self.tied_stage == "last"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole unit: `(rows, cols)` for a matrix, `(n,)` for a gain or bias."""
        return flat_shape(self.axes)

    @cached_property
    def layer(self) -> int | None:
        """Global index of the unit's layer, or None for units outside the layers."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "layers" else None

    @property
    def is_matrix(self) -> bool:
        """Whether the unit is a matrix rather than a gain or bias."""
        return len(self.axes) > 1

    @property
    def numel(self) -> int:
        """Number of elements of the whole unit."""
        return prod(self.axes)

    def local_axes(self, tensor_size: int) -> tuple[int, ...]:
        """Return the n-dimensional shape of a rank's piece."""
        if self.shard_axis is None:
            return self.axes
        return tuple(
            n // tensor_size if i == self.shard_axis else n for i, n in enumerate(self.axes)
        )

    def summed_over_tensor(self, sequence_parallel: bool) -> bool:
        """Return whether the gradient must be summed over tensor-parallel ranks.

        Under sequence parallelism, this includes the gradients of replicated units, because each
        rank processes only part of the sequence.
        """
        by_tokens = self.replicated and sequence_parallel and not self.whole_gradient
        return self.partial_over_tensor or by_tokens

    def counts_on(self, tensor_rank: int) -> bool:
        """Return whether `tensor_rank` saves and measures its part of the unit. If several ranks
        have a copy of the unit, only one of them saves and measures it."""
        return not self.is_copy and (not self.replicated or tensor_rank == 0)

    def view(self, parameter: Tensor) -> Tensor:
        """Return this rank's piece of the unit, always as a strided view of `parameter`."""
        return parameter.view(self.view_shape)[self.index]

    def piece(self, whole: Tensor, tensor_rank: int, tensor_size: int) -> Tensor:
        """Return rank `tensor_rank`'s piece `[..., *local_axes]` of whole units `[..., *shape]`."""
        batch = whole.shape[: whole.dim() - len(self.shape)]
        whole = whole.reshape(*batch, *self.axes)
        if self.shard_axis is None:
            return whole
        axis = self.shard_axis - len(self.axes)
        size = self.axes[self.shard_axis] // tensor_size
        return whole.narrow(axis, tensor_rank * size, size)


def flat_shape(axes: Sequence[int]) -> tuple[int, ...]:
    """Return `axes` with all but the last flattened: `(rows, cols)`, or `(n,)` for a vector."""
    return (prod(axes[:-1]), axes[-1]) if len(axes) > 1 else tuple(axes)


def units_of_domain(stage_units: Sequence[Sequence[Unit]], name: str) -> list[list[Unit]]:
    """Return each tensor-parallel rank's units in domain `name`, "dense" or "expert"."""
    return [[unit for unit in units if unit.domain == name] for units in stage_units]


def matrix_unit(
    name: str, parameter: str, role: str, shape: tuple[int, int], tensor_size: int, axis: int | None
) -> Unit:
    """Return a unit `[rows, cols]` that spans an entire parameter.

    The unit is sharded over tensor-parallel ranks along `axis`, 0 (rows) or 1 (columns), or
    replicated if `axis` is None.
    """
    return Unit(
        name=name,
        parameter=parameter,
        role=role,
        view_shape=tuple(n // tensor_size if i == axis else n for i, n in enumerate(shape)),
        index=(ALL,),
        axes=shape,
        shard_axis=axis if tensor_size > 1 else None,
        replicated=axis is None,
        draws=((name, shape[0]),),
    )


def vector_unit(
    name: str, role: str, size: int, *, start: float, tensor_size: int | None = None
) -> Unit:
    """Return the gain of a norm or the bias of a linear layer, `[size]`, initialised to `start`.

    The unit is sharded over `tensor_size` ranks, or replicated if `tensor_size` is None.
    """
    shards = tensor_size or 1
    return Unit(
        name=name,
        parameter=name,
        role=role,
        view_shape=(size // shards,),
        index=(ALL,),
        axes=(size,),
        shard_axis=0 if shards > 1 else None,
        replicated=tensor_size is None,
        start=start,
    )


def check_coverage(units: Sequence[Unit], parameters: Mapping[str, Tensor]) -> None:
    """Check that every element of every parameter belongs to exactly one unit.

    Otherwise raises ValueError. The message names the unit or parameter that violates this rule.
    """
    claims: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.parameter not in parameters:
            raise ValueError(f"{unit.parameter} of unit {unit.name} is not a model parameter")
        parameter = parameters[unit.parameter]
        if prod(unit.view_shape) != parameter.numel():
            raise ValueError(
                f"unit {unit.name} views {unit.parameter} as {unit.view_shape}, "
                f"but the parameter has shape {tuple(parameter.shape)}"
            )
        claims.setdefault(unit.parameter, []).append(unit)
    for name, parameter in parameters.items():
        if name not in claims:
            raise ValueError(f"parameter {name} must belong to at least one unit, got none")
        # Count in host memory, one byte per element: GPU memory is scarce, and counting on the GPU
        # would force a host sync.
        count = torch.zeros(parameter.shape, dtype=torch.uint8)
        for unit in claims[name]:
            unit.view(count).add_(1)
        missing, repeated = int((count == 0).sum()), int((count > 1).sum())
        if missing or repeated:
            raise ValueError(
                f"every element of parameter {name} must be in exactly one unit, got {missing} "
                f"elements in no unit and {repeated} elements in several units"
            )
