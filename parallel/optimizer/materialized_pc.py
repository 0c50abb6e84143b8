"""PC layers with no per-micro-batch overhead: the parameter is PC(W), and its owner stores W.

PC(W) is independent of the data, so each unit's owner computes it once per optimizer step. The
gradient of PC(W) is accumulated over micro-batches and reduced across ranks like any other
gradient. The reduced gradient is then sent to the owner, which multiplies it by the transposed
Jacobian of the map, and updates W and gamma. The new PC(W) is sent back to the shards, and the
usual all-gather distributes it to all ranks. The model code is unchanged. Source of the map: "PC
Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training", algorithms 1 and 3.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from parallel.optimizer.owned_stacks import (
    OwnedStack,
    StepOptions,
    cut_all_,
    gathered_weights,
    owned_stacks,
)
from parallel.optimizer.routing import Assign
from parallel.optimizer.unit_transfer import UnitTransfer, stage_exchange
from parallel.storage.domain_model import DomainModel
from spectral.batching import copy_all_
from spectral.division import narrowed
from spectral.rules.base import Rate, Report, Stack, State, Step
from spectral.sharded.exchange import unpacked
from spectral.stepping import Units, accumulate_, step_units

CHUNK_NUMEL = 2**24
"""Maximum number of elements of PC(W) to compute at a time, to bound scratch memory."""


class MaterializedStack(OwnedStack):
    """Preconditioned units with the same shape and rule, together with their W and rule state.

    Attributes:
        pc: the map from W to PC(W), and the rule for gamma.
        weight: W, `[batch, rows, cols]`, float32 or wider.
        u, v: the top singular vectors of W, `[batch, rows]` and `[batch, cols]`.
        gamma: `[batch, 1]`.
        gamma_state: state of gamma's rule; empty if gamma is fixed.
        gamma_gradient: dL/dgamma in the current step, `[batch, 1]`.
    """

    def __init__(
        self, stack: OwnedStack, weight: Tensor, momentum_dtype: torch.dtype | None
    ) -> None:
        """Create the state for the units of `stack`, whose W is `weight`."""
        super().__init__(stack.transfers, stack.assigned, stack.rule.init_state(weight))
        if momentum_dtype is not None:
            for name in self.rule.elementwise_state:
                self.state[name] = self.state[name].to(momentum_dtype)
        assert stack.assigned.pc is not None
        self.pc, self.weight = stack.assigned.pc, weight
        self.u, self.v = self.pc.preconditioner.cold_pair(weight)
        gamma = self.pc.preconditioner.initial_gamma(weight, self.u, self.v)
        self.gamma, rule = gamma[:, None], self.pc.gamma_rule
        self.gamma_state: State = {} if rule is None else rule.init_state(self.gamma)
        self.gamma_gradient = torch.zeros_like(self.gamma)

    def tensors(self) -> list[Tensor]:
        """Return all tensors that persist between steps."""
        tensors = [self.weight, self.u, self.v, self.gamma, self.gamma_gradient]
        return [*tensors, *self.state.values(), *self.gamma_state.values()]

    def saved(self) -> Iterator[tuple[str, UnitTransfer, Tensor]]:
        """Yield (key, transfer, value) for every tensor saved in a checkpoint.

        Keys are named as if W and gamma were both model parameters, so that checkpoints do not
        depend on how PC(W) is evaluated.
        """
        elementwise = not self.rule.whole_matrix
        for i, transfer in enumerate(self.transfers):
            name, axes = transfer.unit.name, transfer.unit.axes
            yield f"weight/{name}", transfer, self.weight[i].view(axes)
            yield f"weight/{name}.gamma", transfer, self.gamma[i]
            yield f"pc/{name}/u", transfer, self.u[i]
            yield f"pc/{name}/v", transfer, self.v[i]
            for key, value in self.state.items():
                one = value[i].view(axes) if value.shape == self.weight.shape else value[i]
                counter = elementwise and value.dim() == 1
                yield f"optimizer/{name}/{key}", transfer, value[i : i + 1] if counter else one
            for key, value in self.gamma_state.items():
                entry = value[i : i + 1] if value.dim() == 1 else value[i]
                yield f"optimizer/{name}.gamma/{key}", transfer, entry

    def pull_back_(self, gradients: Mapping[str, Tensor]) -> None:
        """Replace dL/dPC(W) with dL/dW in place, and store dL/dgamma.

        `gradients[name]` `[elements]` holds the flattened pieces of the gradient of unit `name`.
        """
        for part in self._chunks():
            result = self.pc.preconditioner.vjp(
                self.stacked(part, gradients),
                self.weight[part],
                self.u[part],
                self.v[part],
                self.gamma[part, 0],
            )
            self.gamma_gradient[part, 0] = result.gamma
            cut_all_(self.transfers[part], result.weight, gradients)

    def step(
        self, gradients: Mapping[str, Tensor], rate: Callable[[float], Rate], active: Tensor
    ) -> None:
        """Update W and gamma with their gradients, and then update u and v for the new W."""
        step, pc = self.assigned.step(rate, active), self.pc
        (self.report,) = step_units(self.rule, [_SteppedWeights(self, gradients, step)])
        if pc.gamma_rule is not None:
            step = Step(rate(pc.gamma_lr), pc.gamma_weight_decay, active)
            stack = Stack(self.gamma, self.gamma_gradient, self.gamma_state, step)
            accumulate_(pc.gamma_rule, [stack.grad], [stack.state], active)
            (gamma,) = pc.gamma_rule.update([stack])
            if "refused" in gamma:
                self.report["gamma_refused"] = gamma["refused"]
        for part in self._chunks():
            pc.preconditioner.refresh_(self.weight[part], self.u[part], self.v[part], active)
        self.report["gamma"] = self.gamma[:, 0]

    def guard_(self) -> Tensor:
        """Return the largest normalised singular value of each unit, `[batch]`.

        Any tracked u and v that do not belong to the largest singular value are replaced
        (`Preconditioner.guard_`).
        """
        guard = self.pc.preconditioner.guard_
        parts = [guard(self.weight[p], self.u[p], self.v[p]) for p in self._chunks()]
        return torch.cat(parts)

    def effective(self) -> Iterator[tuple[UnitTransfer, Tensor]]:
        """Yield (transfer, PC(W) `[rows, cols]`) for each unit."""
        for part in self._chunks():
            stack = self.pc.preconditioner.effective(
                self.weight[part], self.u[part], self.v[part], self.gamma[part, 0]
            )
            yield from zip(self.transfers[part], stack, strict=True)

    def stacked(self, part: slice, pieces: Mapping[str, Tensor]) -> Tensor:
        """Return the whole matrices `[units, rows, cols]` for a part of the stack, in the dtype of
        W."""
        matrices = [t.whole(pieces[t.unit.name]) for t in self.transfers[part]]
        return torch.stack(matrices).to(self.weight.dtype)

    def _chunks(self) -> Iterator[slice]:
        """Yield slices of the stack with about `CHUNK_NUMEL` elements each."""
        size = max(1, CHUNK_NUMEL // self.weight[0].numel())
        for start in range(0, len(self.transfers), size):
            yield slice(start, start + size)


class _SteppedWeights(Units):
    """The weights W of a stack, updated in place. `gradients` maps unit names to gradients of W."""

    def __init__(
        self, owned: MaterializedStack, gradients: Mapping[str, Tensor], step: Step
    ) -> None:
        weight = owned.weight
        super().__init__(owned.units[0].shape, weight.dtype, weight.device, len(weight))
        self.owned, self.gradients, self.step = owned, gradients, step

    def take(self, part: slice) -> Stack:
        """Return the momentum, W and state of a part of the stack. W and state are views."""
        owned, gradient = self.owned, self.owned.stacked(part, self.gradients)
        state = {name: value[part] for name, value in owned.state.items()}
        accumulate_(owned.rule, [gradient], [state], self.step.active)
        return Stack(owned.weight[part], gradient, state, self.step)

    def put(self, part: slice, stack: Stack, report: Report) -> None:
        """No-op, because weights and state were updated in place."""


class MaterializedUnits:
    """The PC layers of one step group that are owned by this rank."""

    def __init__(
        self,
        transfers: Sequence[UnitTransfer],
        assign: Assign,
        model: DomainModel,
        options: StepOptions,
    ) -> None:
        """Plan the exchange of the units, and copy W from the master weights to the owners.

        Gradients are sent to owners in `options.exchange_dtype`; None means no conversion. PC(W) is
        sent in the parameter dtype, so that it is the same on all ranks.
        """
        self.exists = bool(transfers)  # the same on all ranks of the stage
        self.model = model
        self.dtype = options.exchange_dtype
        self.exchange = stage_exchange(transfers, model.domain, model.comm_volume)
        self.owned = [t for t in transfers if t.owner == model.domain.stage.rank]
        stacks = owned_stacks(self.owned, assign)
        weights = gathered_weights(stacks, self.exchange, model)
        self.stacks = [
            MaterializedStack(stack, weights.assembled(stack.transfers), options.momentum_dtype)
            for stack in stacks
        ]
        self._gradients: dict[str, Tensor] | None = None

    def _taken(self) -> dict[str, Tensor]:
        """Return the gradients of W. The first call in a step sends the gradients of PC(W) to their
        owners and computes the gradients of W and gamma."""
        if self._gradients is not None:
            return self._gradients
        shards = self.model.gradient_shards()
        # If a unit is one contiguous part of this rank's shard, its gradient is used without a
        # copy.
        gradients = {
            t.unit.name: t.sources[0].of(shards)
            for t in self.owned
            if t.is_local and len(t.sources) == 1
        }
        pieces = {
            t.unit.name: shards[0].new_empty(t.unit.numel)
            for t in self.owned
            if t.unit.name not in gradients
        }
        self.exchange.gather(shards, pieces, shards[0], self.dtype)
        gradients |= pieces
        for stack in self.stacks:
            stack.pull_back_(gradients)
        self._gradients = gradients
        return gradients

    def gradients(self) -> Iterator[tuple[MaterializedStack, list[Tensor]]]:
        """Yield each stack with the gradients of W for its units. The caller may scale the
        gradients in place."""
        gradients = self._taken()
        for stack in self.stacks:
            yield stack, [gradients[unit.name] for unit in stack.units]

    def step(self, rate: Callable[[float], Rate], active: Tensor) -> None:
        """Update W and gamma, and write the new PC(W) to the masters."""
        gradients = self._taken()
        for stack in self.stacks:
            stack.step(gradients, rate, active)
        self._gradients = None
        self.publish()

    def publish(self) -> None:
        """Compute PC(W) for every unit owned by this rank, and write it to the master shards.

        Nonfinite elements are not written, and their units are reported as refused.
        """
        masters, some = self.model.masters, self.model.parameters[0]
        moved: dict[str, Tensor] = {}
        for stack in self.stacks:
            finite = []
            for transfer, effective in stack.effective():
                finite.append(effective.isfinite().all())
                if transfer.is_local:
                    # Values are sent in the parameter dtype. Round local values to it too, so that
                    # results do not depend on the placement.
                    piece = effective.to(some.dtype).reshape(-1)
                    for part in transfer.targets:
                        target, new = part.of(masters), narrowed(piece, part.whole)
                        target.copy_(torch.where(new.isfinite(), new, target))
                    continue
                pieces = effective.new_empty(transfer.unit.numel)
                transfer.cut_(effective, pieces)
                moved[transfer.unit.name] = pieces
            refused = (~torch.stack(finite)).float()
            before = stack.report.get("refused", torch.zeros_like(refused))
            stack.report["refused"] = torch.maximum(before, refused)
        targets, received = self.exchange.receive(moved, masters, some)
        if targets:
            before = torch.cat(targets)
            new = torch.where(received.isfinite(), received.to(before.dtype), before)
            copy_all_(zip(targets, unpacked(new, targets), strict=True))
