"""In-graph PC layers: every forward pass computes the effective weight PC(W).

This file is the readable reference implementation. By default, training uses the materialized
evaluator, which computes the same weights once per optimizer step
(parallel/optimizer/materialized_pc.py). As in the library (spectral/pc_layers.py), an in-graph PC
layer is a parametrization of a linear layer's weight, so Megatron's column-parallel, row-parallel
and expert layers work unmodified. Activation recomputation is safe, because forward passes do not
modify state.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.utils import parametrize

from models.pc_config import PCConfig
from models.units import Unit
from spectral.batching import grouped
from spectral.effective_weight import Preconditioner
from spectral.pc_layers import EffectiveWeight

GAMMA = ".gamma"
"""Suffix that turns the name of a unit or parameter into the name of its gamma."""


class UnitWeight(EffectiveWeight):
    """The preconditioned units of a linear layer's weight, with tracked singular vectors.

    gamma   `[units]`, one factor per preconditioned unit in the weight
    tensor  process group of the ranks that share the weight, or None if this rank holds whole units
    u, v    singular vectors of each unit, `[1, rows]` and `[1, cols]`, float32 or wider; constant
            during a forward pass
    """

    def __init__(
        self,
        units: Sequence[tuple[Unit, Preconditioner]],
        weight: Tensor,
        learnable_gamma: bool,
        tensor: ProcessGroup | None,
    ) -> None:
        super().__init__([preconditioner for _, preconditioner in units])
        self.tensor = tensor
        self.units = [unit for unit, _ in units]
        wide = torch.promote_types(weight.dtype, torch.float32)
        gamma = torch.ones(len(units), dtype=weight.dtype, device=weight.device)
        if learnable_gamma:
            self.gamma = torch.nn.Parameter(gamma)
        else:
            self.register_buffer("gamma", gamma.to(wide), persistent=False)
        for i, unit in enumerate(self.units):
            rows, cols = unit.shape
            for name, size in (("u", rows), ("v", cols)):
                zero = torch.zeros(1, size, dtype=wide, device=weight.device)
                self.register_buffer(f"{name}{i}", zero, persistent=False)

    def pair(self, i: int) -> tuple[Tensor, Tensor]:
        """Return u and v of unit i."""
        return self.get_buffer(f"u{i}"), self.get_buffer(f"v{i}")

    def pairs(self, members: Sequence[int], stack: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tracked u and v of the units at indices `members`, concatenated."""
        left, right = zip(*map(self.pair, members), strict=True)
        return torch.cat(left), torch.cat(right)

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """Return the whole units, gathered across the ranks that share them."""
        return [gathered(unit, unit.view(weight), self.tensor) for unit in self.units]

    def assembled(self, matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Return a copy of `weight` whose units are replaced by this rank's pieces of
        `matrices`."""
        effective = weight.clone()
        for unit, matrix in zip(self.units, matrices, strict=True):
            unit.view(effective).copy_(scattered(unit, matrix, self.tensor))
        return effective

    @torch.no_grad()
    def start_(self, weight: Tensor) -> None:
        """Initialise u, v and gamma for a new weight."""
        for i, (preconditioner, whole, pair) in enumerate(self._tracked(weight)):
            for tracked, cold in zip(pair, preconditioner.cold_pair(whole), strict=True):
                tracked.copy_(cold)
            self.gamma[i : i + 1] = preconditioner.initial_gamma(whole, *pair)

    @torch.no_grad()
    def refresh_(self, weight: Tensor, active: Tensor | None = None) -> None:
        """Update u and v for `weight`, the new weight after an optimizer step.

        No-op if `active`, a 0-d bool tensor, is False.
        """
        for preconditioner, whole, pair in self._tracked(weight):
            preconditioner.refresh_(whole, *pair, active)

    @torch.no_grad()
    def guard_(self, weight: Tensor) -> Tensor:
        """Return the largest normalised singular value of each unit, `[units]`, and replace wrong
        tracked vectors; see `Preconditioner.guard_`.
        """
        return torch.cat([pc.guard_(whole, *pair) for pc, whole, pair in self._tracked(weight)])

    @torch.no_grad()
    def tracked_norms(self, weight: Tensor) -> Tensor:
        """Return the tracked spectral norm of each unit, `[units]`."""
        return torch.cat(
            [pc.tracked_norm(whole, *pair) for pc, whole, pair in self._tracked(weight)]
        )

    def _tracked(
        self, weight: Tensor
    ) -> Iterator[tuple[Preconditioner, Tensor, tuple[Tensor, Tensor]]]:
        """Yield (preconditioner, whole matrix `[1, rows, cols]` in float32 or wider, (u, v)) for
        each unit."""
        for i, whole in enumerate(self.matrices(weight.detach())):
            pair = self.pair(i)
            yield self.preconditioners[i], whole[None].to(pair[0].dtype), pair


def gathered(unit: Unit, local: Tensor, tensor: ProcessGroup | None) -> Tensor:
    """Return the whole unit `[rows, cols]`, gathered from the pieces on tensor-parallel ranks.

    The gradient of the whole unit must be identical on all ranks of `tensor`; the backward pass
    returns this rank's piece of this gradient.
    """
    if unit.shard_axis is None:
        return local.reshape(unit.shape)
    last = local.movedim(unit.shard_axis, -1).contiguous()
    return (
        gather_from_tensor_model_parallel_region(last, tensor)
        .movedim(-1, unit.shard_axis)
        .reshape(unit.shape)
    )


def scattered(unit: Unit, whole: Tensor, tensor: ProcessGroup | None) -> Tensor:
    """Return this rank's piece `[*local axes]` of a whole unit. The backward pass gathers the
    gradient."""
    if unit.shard_axis is None:
        return whole.view(unit.axes)
    last = whole.view(unit.axes).movedim(unit.shard_axis, -1).contiguous()
    return scatter_to_tensor_model_parallel_region(last, tensor).movedim(-1, unit.shard_axis)


def precondition_(
    chunks: Iterable[torch.nn.Module],
    parameters: dict[str, torch.nn.Parameter],
    units: Sequence[Unit],
    pc: PCConfig,
    tensor: Mapping[str, ProcessGroup],
) -> list[UnitWeight]:
    """Parametrize the weights that contain preconditioned units, and return the parametrizations.

    `units` are this rank's units, and `parameters` maps names to parameters. Learnable gammas are
    added to `parameters`. `tensor` maps each domain with sharded units to the process group of the
    ranks that share the domain's weights.
    """
    units_of = grouped(units, lambda unit: id(parameters[unit.parameter]))
    layers = []
    for module in [module for chunk in chunks for module in chunk.modules()]:
        weight = getattr(module, "weight", None)
        members = [
            (unit, preconditioner)
            for unit in units_of.get(id(weight), ())
            if (preconditioner := pc.preconditioner(unit)) is not None
        ]
        if weight is not None and members:
            shared = tensor.get(members[0][0].domain)
            layer = UnitWeight(members, weight, pc.learnable_gamma, shared)
            # unsafe=True skips a validity check, which would run collectives.
            parametrize.register_parametrization(module, "weight", layer, unsafe=True)
            layers.append(layer)
            if isinstance(layer.gamma, torch.nn.Parameter):
                parameters[members[0][0].parameter + GAMMA] = layer.gamma
    return layers


def with_gammas(units: Sequence[Unit], pc: PCConfig) -> list[Unit]:
    """Return a list of `units` and the gammas of preconditioned units. The units of a parameter are
    consecutive, and their gammas follow them."""
    if pc.evaluator != "in_graph" or not pc.learnable_gamma:
        return list(units)
    with_their_gammas: list[Unit] = []
    for members in grouped(units, lambda unit: unit.parameter).values():
        with_their_gammas += members
        preconditioned = [unit for unit in members if pc.covers(unit)]
        with_their_gammas += [
            replace(
                unit,
                name=unit.name + GAMMA,
                parameter=unit.parameter + GAMMA,
                role="gamma",
                view_shape=(len(preconditioned),),  # all gammas of a parameter are in one vector
                index=(slice(i, i + 1),),
                axes=(1,),
                shard_axis=None,
                replicated=unit.replicated or unit.shard_axis is not None,
                partial_over_tensor=False,
                whole_gradient=unit.shard_axis is not None,
                draws=(),
            )
            for i, unit in enumerate(preconditioned)
        ]
    return with_their_gammas
