"""Memory and sent bytes per rank for one domain of a pipeline stage, given the owners."""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Final

import numpy as np
import torch

from models.units import Unit
from parallel.optimizer.routing import Assign, Assignment, unit_work
from parallel.plan.step_shape import PlanInputs
from parallel.storage.bucket_layout import BucketPlanner
from spectral.rules.base import Rule

STEP_COPIES: Final = 6
"""Number of float32 copies of a step group's matrices: momentum, weights, and four for SSO's
multiplier. Muon needs one or two instead of the four (tests/rehearsal/test_peak_memory.py).
"""

Owners = Mapping[str, int]
"""Rank within the stage that owns each unit, by name."""


@lru_cache(maxsize=1024)
def state_of_matrix(rule: Rule, shape: tuple[int, ...]) -> dict[str, int]:
    """Return the bytes of a rule's state for one matrix, by the name of the tensor."""
    state = rule.init_state(torch.empty(1, *shape, device="meta"))
    return {name: tensor.nbytes for name, tensor in state.items()}


def owned_state_bytes(rule: Rule, shape: tuple[int, ...]) -> int:
    """Return the bytes of a whole-matrix rule's state on a unit's owner, such as cached singular
    vectors.

    Momentum is not included, because it is stored in the shards.
    """
    state = state_of_matrix(rule, shape)
    return sum(size for name, size in state.items() if name not in rule.elementwise_state)


@lru_cache(maxsize=1024)
def pc_bytes(assigned: Assignment, shape: tuple[int, ...]) -> int:
    """Return the bytes that the owner of a PC layer stores.

    The owner stores W, the whole state of the rule, the tracked singular vectors, and gamma with
    its state and gradient.
    """
    assert assigned.pc is not None
    rows, cols = shape
    size = 4 * (rows * cols + rows + cols + 2) + sum(state_of_matrix(assigned.rule, shape).values())
    rule = assigned.pc.gamma_rule
    if rule is not None:
        gamma = rule.init_state(torch.empty(1, 1, device="meta"))
        size += sum(tensor.nbytes for tensor in gamma.values())
    return size


@lru_cache(maxsize=1024)
def element_state_bytes(rule: Rule) -> int:
    """Return the bytes of a rule's float32 state per element of a shard."""
    if rule.whole_matrix:
        return 4 * len(rule.elementwise_state)
    short, long = (rule.init_state(torch.empty(1, n, device="meta")) for n in (1, 2))
    return sum(long[name].nbytes - short[name].nbytes for name in short)


class DomainPlan:
    """The dense units or the experts of a stage, their buckets, and the work of their owners.

    units   units of each tensor-parallel rank of the domain, ranks ascending
    works   work of the units with an owner, names ascending

    Arrays have one entry per rank of the stage.
    """

    def __init__(self, units: Sequence[Sequence[Unit]], assign: Assign, inputs: PlanInputs) -> None:
        self.units = units
        self.inputs = inputs
        self.whole = {unit.name: unit for members in units for unit in members}
        self.assigned = {name: assign(unit) for name, unit in self.whole.items()}

        def of(unit: Unit) -> Assignment:
            return self.assigned[unit.name]

        self.bucket_layout = BucketPlanner(
            ranks=inputs.data,
            parameter_bytes=inputs.dtype.itemsize,
            preconditioned=lambda unit: of(unit).pc is not None,
        ).layout(units[0])
        self.works = unit_work(units, self.bucket_layout, of)
        self.stepped = [work for work in self.works if self.assigned[work.name].has_owner]

    def sent(self, owners: Owners) -> dict[str, np.ndarray]:
        """Return the bytes that each rank sends per step, by kind of communication.

        Bytes are counted as in `collectives.CommVolume`, for ring algorithms and without a rank's
        own elements. The Gram penalty is not included.
        """
        inputs = self.inputs
        ranks, data, tensor = inputs.stage_ranks, inputs.data, inputs.tensor
        others = self.bucket_layout.numel // data * (data - 1)
        leaving, returning = np.zeros((2, ranks), dtype=np.int64)
        for work in self.stepped:
            owner, pc = owners[work.name], self.assigned[work.name].pc
            # An owner sends back an update or, for a PC layer, the parameter itself.
            size = inputs.exchange_bytes if pc is None else inputs.dtype.itemsize
            for rank, numel in work.holders.items():
                if rank != owner:
                    leaving[rank] += numel
                    returning[owner] += numel * size
        sums = self.bucket_layout.shard_elements(
            (unit, 4) for unit in self.units[0] if unit.summed_over_tensor(inputs.sequence_parallel)
        )
        return {
            "reduce-scatter": np.full(ranks, others * 4),
            "all-gather": np.full(ranks, others * inputs.dtype.itemsize),
            "exchange in": leaving * inputs.exchange_bytes,
            "exchange out": returning,
            "tensor-parallel sum of gradients": np.repeat(
                2 * np.array(sums) * (tensor - 1) // tensor, tensor
            ),
        }

    def state(self, owners: Owners) -> np.ndarray:
        """Return the bytes of the rules' state."""
        shards = self.bucket_layout.shard_elements(
            (unit, element_state_bytes(self.assigned[unit.name].rule))
            for unit in self.units[0]
            if self.assigned[unit.name].pc is None
        )
        state = np.repeat(shards, self.inputs.tensor)
        for name, assigned in self.assigned.items():
            shape = self.whole[name].shape
            if assigned.pc is not None:
                state[owners[name]] += pc_bytes(assigned, shape)
            elif assigned.has_owner:
                state[owners[name]] += owned_state_bytes(assigned.rule, shape)
        return state

    def kept(self, owners: Owners) -> np.ndarray:
        """Return the bytes of weights that each rank stores as an owner (`StepGroup.kept`)."""
        kept = np.zeros(self.inputs.stage_ranks, dtype=np.int64)
        for work in self.stepped:
            unit = self.whole[work.name]
            if self.assigned[work.name].pc is None:
                copied = unit.replicated and self.inputs.tensor > 1
                moved = copied or work.holders.keys() != {owners[work.name]}
                kept[owners[work.name]] += 4 * unit.numel * moved
        return kept

    def transient(self, owners: Owners) -> int:
        """Return the transient bytes of a step group, the largest for any group and rank."""
        # Elements that each rank owns, and that it sends or receives, `[step groups, stage ranks]`.
        count = max(self._step_group.values()) + 1
        owned, moved = np.zeros((2, count, self.inputs.stage_ranks), dtype=np.int64)
        for work in self.stepped:
            owner, group = owners[work.name], self._step_group[work.name]
            owned[group, owner] += work.numel
            for rank, numel in work.holders.items():
                if rank != owner:
                    moved[group, rank] += numel
                    moved[group, owner] += numel
        return int((STEP_COPIES * 4 * owned + self.inputs.exchange_bytes * moved).max())

    @cached_property
    def _step_group(self) -> dict[str, int]:
        """Return the step group of each unit."""
        groups = self.bucket_layout.step_groups(self.inputs.step_groups)
        of_bucket = {bucket: i for i, buckets in enumerate(groups) for bucket in buckets}
        slots = self.bucket_layout.slots
        return {name: of_bucket[slots[u.parameter][0].index] for name, u in self.whole.items()}
