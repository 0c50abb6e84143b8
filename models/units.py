"""Units: the parts of parameters that are atomic modules.

A unit is the smallest matrix that must stay whole for a spectral operation: one attention head's q,
k or v, a gate, an up, one down projection. Megatron keeps several of them in one fused parameter
and cuts parameters over tensor-parallel ranks. A unit describes, as data, its view inside the local
parameter, and the composition of the logical matrix from the pieces of all ranks. Initialisation,
optimizers and monitors use nothing else, so no other file depends on how weights are fused.

Declarations are pure functions of the config: they need no model, no process group, no memory.
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
    """One atomic module of the model, from the view of this tensor-parallel rank.

    name         global and independent of any layout, e.g. `layers.3.q.5`
    parameter    global name of the parameter that holds it, e.g. `layers.3.attention.qkv`
    role         q, k, v, o, gate, up, down, embedding, head, gain, bias ...
    view_shape   shape in which the local parameter is viewed before `index` picks the unit's part
    index        the unit's part of that view
    axes         logical, n-dimensional shape of the whole unit; `[rows, cols]` after flattening all
                 but the last axis
    shard_axis   axis of `axes` that tensor parallelism cuts, None if this rank holds the whole unit
    replicated   whether every tensor-parallel rank holds the same copy (gains)
    partial_over_tensor  whether its gradient on one tensor-parallel rank is that rank's share of a
                 sum, as for query and key norms, whose gains act on heads cut over the ranks
    whole_gradient   for a replicated unit: whether every tensor-parallel rank has all of its
                 gradient, under sequence parallelism too (gamma of a cut PC layer)
    draws        (name, rows) of the random draws that initialise it, in the order of its rows
    start        first value of every element of a unit without draws
    tied_stage   for an embedding that is also the head and has copies on two pipeline stages: the
                 stage of this copy, first or last; else None
    domain       the ranks that hold copies: dense for the data-parallel group, expert (a routed
                 expert's matrix) for the expert-data-parallel group
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
        """Whether another pipeline stage counts, saves and reports the unit."""
        return self.tied_stage == "last"

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape: `(rows, cols)` of a matrix, `(n,)` of a gain."""
        return flat_shape(self.axes)

    @cached_property
    def layer(self) -> int | None:
        """Global index of the unit's layer, None outside the layers."""
        parts = self.name.split(".")
        return int(parts[1]) if parts[0] == "layers" else None

    @property
    def is_matrix(self) -> bool:
        """Whether the unit is a matrix, as spectral rules require; a gain is not."""
        return len(self.axes) > 1

    @property
    def numel(self) -> int:
        """Number of elements of the whole unit."""
        return prod(self.axes)

    def local_axes(self, tensor_size: int) -> tuple[int, ...]:
        """Return the shape of this rank's piece, before flattening."""
        if self.shard_axis is None:
            return self.axes
        return tuple(
            n // tensor_size if i == self.shard_axis else n for i, n in enumerate(self.axes)
        )

    def summed_over_tensor(self, sequence_parallel: bool) -> bool:
        """Return whether the gradient is the sum of the tensor-parallel ranks' gradients.

        Under sequence parallelism a rank sees only the tokens of its part of the sequence.
        """
        by_tokens = self.replicated and sequence_parallel and not self.whole_gradient
        return self.partial_over_tensor or by_tokens

    def view(self, parameter: Tensor) -> Tensor:
        """Return this rank's piece of the unit: a strided view of `parameter`, never a copy."""
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
    """Flatten all but the last axis: `(rows, cols)`, or `(n,)` of a vector."""
    return (prod(axes[:-1]), axes[-1]) if len(axes) > 1 else tuple(axes)


def gated_mlp_units(
    layer: int, hidden: int, ffn: int, split_gate_up: bool, tensor_size: int
) -> list[Unit]:
    """Return the gate, up and down units of layer `layer`; gate and up are one parameter."""
    prefix = f"layers.{layer}."
    split = split_gate_up
    indices: dict[str, Index] = {"gate": (0,), "up": (1,)} if split else {"gate_up": (ALL,)}
    units = [
        Unit(
            name=prefix + role,
            parameter=prefix + "mlp.gate_up",
            role=role,
            view_shape=(2, ffn // tensor_size, hidden),
            index=index,
            axes=(ffn, hidden) if split else (2, ffn, hidden),
            shard_axis=(0 if split else 1) if tensor_size > 1 else None,
            draws=tuple((prefix + part, ffn) for part in ([role] if split else ("gate", "up"))),
        )
        for role, index in indices.items()
    ]
    down = matrix_unit(prefix + "down", prefix + "mlp.down", "down", (hidden, ffn), tensor_size, 1)
    return [*units, down]


def mlp_units(layer: int, hidden: int, ffn: int, tensor_size: int) -> list[Unit]:
    """Return the up and down units of layer `layer`, a feed-forward block without a gate."""
    prefix = f"layers.{layer}."
    up = matrix_unit(prefix + "up", prefix + "mlp.up", "up", (ffn, hidden), tensor_size, 0)
    down = matrix_unit(prefix + "down", prefix + "mlp.down", "down", (hidden, ffn), tensor_size, 1)
    return [up, down]


def matrix_unit(
    name: str, parameter: str, role: str, shape: tuple[int, int], tensor_size: int, axis: int | None
) -> Unit:
    """Return the unit `[rows, cols]` that is a whole parameter.

    Tensor parallelism cuts it along `axis`: 0 (rows) or 1 (columns); None: every rank holds it
    whole.
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


def gain_unit(
    name: str, size: int, *, start: float = 1.0, partial_over_tensor: bool = False
) -> Unit:
    """Return the gain `[size]` of a norm, initially `start`, whole on every tensor rank."""
    return Unit(
        name=name,
        parameter=name,
        role="gain",
        view_shape=(size,),
        index=(ALL,),
        axes=(size,),
        replicated=True,
        partial_over_tensor=partial_over_tensor,
        start=start,
    )


def bias_unit(name: str, size: int, tensor_size: int | None) -> Unit:
    """Return the bias `[size]` of a linear, cut over tensor ranks; None: whole on every rank."""
    cut = tensor_size or 1
    return Unit(
        name=name,
        parameter=name,
        role="bias",
        view_shape=(size // cut,),
        index=(ALL,),
        axes=(size,),
        shard_axis=0 if cut > 1 else None,
        replicated=tensor_size is None,
        start=0.0,
    )


def check_coverage(units: Sequence[Unit], parameters: Mapping[str, Tensor]) -> None:
    """Check that the units claim every element of every parameter exactly once.

    Raises ValueError naming a parameter that is unknown, unclaimed, or claimed partly or twice.
    """
    claims: dict[str, list[Unit]] = {}
    for unit in units:
        if unit.parameter not in parameters:
            raise ValueError(f"unit {unit.name} belongs to {unit.parameter}, which the model lacks")
        parameter = parameters[unit.parameter]
        if prod(unit.view_shape) != parameter.numel():
            raise ValueError(
                f"unit {unit.name} sees {unit.parameter} as {unit.view_shape}, "
                f"but its shape is {tuple(parameter.shape)}"
            )
        claims.setdefault(unit.parameter, []).append(unit)
    for name, parameter in parameters.items():
        if name not in claims:
            raise ValueError(f"parameter {name} is claimed by no unit")
        # In host memory, one byte per element: GPU memory is scarce, and this would wait for the
        # GPU.
        count = torch.zeros(parameter.shape, dtype=torch.uint8)
        for unit in claims[name]:
            unit.view(count).add_(1)
        missing, repeated = int((count == 0).sum()), int((count > 1).sum())
        if missing or repeated:
            raise ValueError(
                f"the units of parameter {name} must cover it exactly once, got {missing} elements "
                f"without a unit and {repeated} with several"
            )
