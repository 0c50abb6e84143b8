"""PC layers without cost per micro-batch: the model's parameter is PC(W), its owner keeps W.

PC(W) does not depend on the data, so each unit's owner computes it once per optimizer step. The
gradient of PC(W), accumulated over micro-batches and reduced over ranks like any other, travels to
the owner, goes once through the transposed Jacobian of the map, and so becomes the gradient of W
and of gamma, which the owner steps; the new PC(W) travels back to the shards and on to all ranks
with the ordinary all-gather. The model knows of none of this. Source of the map: "PC Layer:
Polynomial Weight Preconditioning for Improving LLM Pre-Training", algorithms 1 and 3."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from parallel.comm.collectives import Traffic
from parallel.comm.groups import Domain
from parallel.optimizer.exchange import (
    Exchange,
    UnitTransfer,
    WeightExchange,
    assemble,
    disassemble_,
    local_numel,
)
from parallel.optimizer.owned_stacks import OwnedStack, UnitRates, accumulated
from parallel.storage.buffers import Buffers
from spectral.pc_state import Preconditioner
from spectral.rules.base import Report, Rule, State

CHUNK_NUMEL = 2**24
"""Elements of weights that go through the map at once, so that its scratch stays small."""


@dataclass
class MaterializedStack(OwnedStack):
    """Preconditioned units of one shape and rule: W and all that belongs to it.

    Attributes:
        weight: W, `[batch, rows, cols]`, float32 or wider.
        u, v: its top singular pair, `[batch, rows]` and `[batch, cols]`.
        gamma: `[batch, 1]`.
        gamma_rates: of the rule that trains gamma.
        gamma_state: of that rule, empty if gamma is fixed.
        gamma_gradient: dL/dgamma of this step, `[batch, 1]`.
    """

    weight: Tensor = field(kw_only=True)
    u: Tensor = field(kw_only=True)
    v: Tensor = field(kw_only=True)
    gamma: Tensor = field(kw_only=True)
    gamma_rates: UnitRates = field(kw_only=True)
    gamma_state: State = field(kw_only=True)
    gamma_gradient: Tensor = field(kw_only=True)

    @property
    def preconditioner(self) -> Preconditioner:
        """The map from W to the effective weight."""
        assert self.pc is not None
        return self.pc.preconditioner

    @property
    def gamma_rule(self) -> Rule | None:
        """The rule that trains gamma, None if gamma is fixed."""
        assert self.pc is not None
        return self.pc.gamma_rule

    def tensors(self) -> list[Tensor]:
        """All memory that outlives a step."""
        own = [self.weight, self.u, self.v, self.gamma, self.gamma_gradient]
        return [*own, *self.state.values(), *self.gamma_state.values()]

    def saved(self) -> Iterator[tuple[str, UnitTransfer, Tensor]]:
        """As if the model's parameter were W, and gamma one more parameter, so that checkpoints do
        not depend on where PC(W) is evaluated."""
        elementwise = not self.rule.whole_matrix
        for i, transfer in enumerate(self.transfers):
            name, axes = transfer.unit.name, transfer.unit.axes
            yield f"weight/{name}", transfer, self.weight[i].view(axes)
            yield f"weight/{name}.gamma", transfer, self.gamma[i]
            yield f"pc/{name}/u", transfer, self.u[i]
            yield f"pc/{name}/v", transfer, self.v[i]
            for key, value in self.state.items():
                one = value[i].view(axes) if value.dim() == 3 else value[i]
                counter = elementwise and value.dim() == 1
                yield f"optimizer/{name}/{key}", transfer, value[i : i + 1] if counter else one
            for key, value in self.gamma_state.items():
                entry = value[i : i + 1] if value.dim() == 1 else value[i]
                yield f"optimizer/{name}.gamma/{key}", transfer, entry

    def pull_back_(self, gradients: Mapping[str, Tensor]) -> None:
        """Turn the units' dL/dPC(W) `[pieces, local elements]` into dL/dW in place, and
        keeps dL/dgamma."""
        for part in self._chunks():
            result = self.preconditioner.vjp(
                self._stacked(part, gradients),
                self.weight[part],
                self.u[part],
                self.v[part],
                self.gamma[part, 0],
            )
            self.gamma_gradient[part, 0] = result.gamma
            for transfer, gradient in zip(self.transfers[part], result.weight, strict=True):
                disassemble_(transfer, gradient, gradients[transfer.unit.name])

    def step(self, gradients: Mapping[str, Tensor], factor: Tensor | float, active: Tensor) -> None:
        """Step W and gamma on their gradients and makes u and v fit the new W."""
        gradient = self._stacked(slice(None), gradients)
        self.report = step_whole(
            self.rule, self.rates, self.weight, gradient, self.state, factor, active
        )
        if self.gamma_rule is not None:
            lr, weight_decay = self.gamma_rates.at(factor)
            self.gamma_rule.step(
                self.gamma,
                self.gamma_gradient,
                self.gamma_state,
                lr=lr,
                weight_decay=weight_decay,
                active=active,
            )
        for part in self._chunks():
            self.preconditioner.refresh_(self.weight[part], self.u[part], self.v[part], active)
        self.report["gamma"] = self.gamma[:, 0]

    def guard_(self) -> Tensor:
        """`[batch]`, the largest normalised singular value of each unit; a pair that has lost track
        of it is replaced (`Preconditioner.guard_`)."""
        guard = self.preconditioner.guard_
        parts = [guard(self.weight[p], self.u[p], self.v[p]) for p in self._chunks()]
        return torch.cat(parts)

    def effective(self) -> Iterator[tuple[UnitTransfer, Tensor]]:
        """Each unit with PC(W) `[rows, cols]`."""
        for part in self._chunks():
            stack = self.preconditioner.effective(
                self.weight[part], self.u[part], self.v[part], self.gamma[part, 0]
            )
            yield from zip(self.transfers[part], stack, strict=True)

    def _stacked(self, part: slice, pieces: Mapping[str, Tensor]) -> Tensor:
        """The whole matrices of some units, in the dtype of W."""
        whole = [
            assemble(transfer, pieces[transfer.unit.name]) for transfer in self.transfers[part]
        ]
        return torch.stack(whole).to(self.weight.dtype)

    def _chunks(self) -> Iterator[slice]:
        """The batch in parts of about `CHUNK_NUMEL` elements."""
        size = max(1, CHUNK_NUMEL // self.weight[0].numel())
        for start in range(0, len(self.transfers), size):
            yield slice(start, start + size)


def step_whole(
    rule: Rule,
    rates: UnitRates,
    weight: Tensor,
    gradient: Tensor,
    state: State,
    factor: Tensor | float,
    active: Tensor,
) -> Report:
    """The report of a rule's whole step on a stack `[batch, rows, cols]`, all its state at hand."""
    momentum = accumulated(rule, gradient, state, active)
    lr, weight_decay = rates.at(factor)
    return rule.update(weight, momentum, state, lr=lr, weight_decay=weight_decay, active=active)


class MaterializedUnits:
    """The preconditioned units of one group of buckets, on one rank: gradients in, weights out."""

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        domain: Domain,
        buffers: Buffers,
        traffic: Traffic,
        wire: torch.dtype | None,
    ) -> None:
        """`wire` is the dtype in which gradients travel to their owners, None for their own; PC(W)
        travels in the parameters' dtype, so that every rank has the same."""
        self.exists = bool(transfers)  # on every rank of the stage or on none
        self.buffers = buffers
        self.traffic = traffic
        self.exchange = Exchange(transfers, domain.stage, wire)
        self.owned = [j for j in transfers if j.owner == domain.stage.rank]
        self.arrival = WeightExchange(transfers, domain.tensor, domain.replicas.rank)
        self.batches: list[MaterializedStack] = []
        self._gradients: dict[str, Tensor] | None = None

    def start(
        self,
        batches: Sequence[OwnedStack],
        weights: Mapping[str, Tensor],
        momentum_dtype: torch.dtype | None,
    ) -> None:
        """Take W of every unit owned here, `[pieces, local elements]`, the first time."""
        for batch in batches:
            whole = torch.stack([assemble(j, weights[j.unit.name]) for j in batch.transfers])
            self.batches.append(materialized_stack(batch, whole, momentum_dtype))

    def take_gradients(self) -> None:
        """Bring the gradients of PC(W) owner and makes them those of W and gamma."""
        shards = [self.buffers.shard(flat) for flat in self.buffers.gradients]
        gradients = {j.unit.name: self._gradient_room(j, shards) for j in self.owned}
        self.exchange.gather_to_owner(
            lambda span: self.buffers.shard_range(span, shards), gradients, shards[0], self.traffic
        )
        for batch in self.batches:
            batch.pull_back_(gradients)
        self._gradients = gradients

    def gradients(self) -> Iterator[tuple[MaterializedStack, list[Tensor]]]:
        """Each batch with the gradients of W of its units, to be measured and scaled in place."""
        if self._gradients is None:
            self.take_gradients()
        assert self._gradients is not None
        for batch in self.batches:
            yield batch, [self._gradients[unit.name] for unit in batch.units]

    def step(self, factor: Tensor | float, active: Tensor) -> None:
        """None; one update of W and gamma, the new PC(W) brought to the masters."""
        if self._gradients is None:
            self.take_gradients()
        assert self._gradients is not None
        for batch in self.batches:
            batch.step(self._gradients, factor, active)
        self._gradients = None
        self.publish()

    def publish(self) -> None:
        """Compute PC(W) of every unit owned here and brings it to the masters' shards."""
        leaving: dict[str, Tensor] = {}
        for batch in self.batches:
            for transfer, effective in batch.effective():
                if transfer.is_local:
                    self._write_runs(transfer, effective)
                    continue
                room = effective.new_empty(transfer.pieces, local_numel(transfer))
                disassemble_(transfer, effective, room)
                leaving[transfer.unit.name] = room
        masters = self.buffers.masters
        self.exchange.scatter_from_owner(
            leaving,
            lambda span: self.buffers.shard_range(span, masters),
            self.buffers.parameters[0],
            self.traffic,
            replace=True,
        )

    def _gradient_room(self, transfer: UnitTransfer, shards: Sequence[Tensor]) -> Tensor:
        """`[pieces, local elements]` for a unit's gradient: where it lies, if it lies in one span
        of this rank's shard, else new memory, filled if nothing of it travels."""
        spans = transfer.shard_parts[0].spans
        if transfer.is_local and len(spans) == 1:
            return self.buffers.shard_range(spans[0], shards)[None]
        room = shards[0].new_empty(transfer.pieces, local_numel(transfer))
        if transfer.is_local:
            self.buffers.collect(spans, shards, room[0])
        return room

    def _write_runs(self, transfer: UnitTransfer, effective: Tensor) -> None:
        # Rounded to the parameters' dtype, as what travels is: who owns what must not show.
        flat = effective.to(self.buffers.parameters[0].dtype).reshape(-1)
        for span in transfer.shard_parts[0].spans:
            self.buffers.shard_range(span, self.buffers.masters).copy_(
                flat.narrow(0, span.piece_start, span.length)
            )


def materialized_stack(
    stack: OwnedStack, weight: Tensor, momentum_dtype: torch.dtype | None
) -> MaterializedStack:
    """Make a stack that has taken no step, from W `[batch, rows, cols]` of its units."""
    assert stack.pc is not None
    preconditioner, rule = stack.pc.preconditioner, stack.pc.gamma_rule
    u, v = preconditioner.cold_pair(weight)
    gamma = preconditioner.initial_gamma(weight, u, v)[:, None]
    state = stack.rule.init_state(weight)
    if momentum_dtype is not None:
        for name in stack.rule.elementwise_state:
            state[name] = state[name].to(momentum_dtype)
    gamma_rates = [
        (each.pc.gamma_lr, each.pc.gamma_weight_decay) for each in stack.assigned if each.pc
    ]
    return MaterializedStack(
        list(stack.transfers),
        stack.assigned,
        stack.rates,
        state,
        weight=weight,
        u=u,
        v=v,
        gamma=gamma,
        gamma_rates=UnitRates.of(gamma_rates, weight.device),
        gamma_state={} if rule is None else rule.init_state(gamma),
        gamma_gradient=torch.zeros_like(gamma),
    )
