"""Routing: a table with each unit's rule and rates, and the work that each unit's owner must do."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from models.units import Unit
from parallel.storage.bucket_layout import BucketLayout
from spectral.effective_weight import Preconditioner
from spectral.gram_penalty import Normalize, Side
from spectral.kernels.library import product_flops
from spectral.rules.base import Rate, Rule, Step
from spectral.sharded.placement import Work


@dataclass(frozen=True)
class PCAssignment:
    """The map from W to the effective weight PC(W), evaluated by a unit's owner.

    Attributes:
        preconditioner: the map from W to PC(W).
        gamma_rule: elementwise rule for gamma; None if gamma is fixed.
        gamma_lr: peak learning rate of gamma.
        gamma_weight_decay: decoupled weight decay of gamma, towards 0.
    """

    preconditioner: Preconditioner
    gamma_rule: Rule | None
    gamma_lr: float
    gamma_weight_decay: float


@dataclass(frozen=True)
class Penalty:
    """A unit's penalty term in the loss: `coefficient` times its Gram penalty.

    For the other attributes, see `spectral.gram_penalty`.
    """

    coefficient: float
    power: int
    side: Side
    normalize: Normalize | None

    def cost(self, shape: Sequence[int]) -> float:
        """Return the FLOPs of the gradient, i.e. of the smaller Gram matrix and its product with
        W."""
        short, long = sorted(shape)
        return 2 * product_flops(short, long, short)


@dataclass(frozen=True)
class Assignment:
    """Rule, rates, PC map and penalty for a unit.

    Attributes:
        group: matrix, embedding, head or scalar; the learning rate is logged under this name.
        rule_name: the rule's key in `spectral.rules.RULES`.
        rule: the rule with its hyper-parameters.
        lr: peak learning rate of the unit.
        weight_decay: decoupled weight decay, multiplied by the learning rate.
        pc: the map from W to PC(W), for a PC layer; None for other units. The parameter of a PC
            layer is PC(W), and the layer's owner updates W.
        penalty: Gram penalty of the weight, added to the loss; None for no penalty.
    """

    group: str
    rule_name: str
    rule: Rule
    lr: float
    weight_decay: float
    pc: PCAssignment | None = None
    penalty: Penalty | None = None

    def cost(self, shape: Sequence[int]) -> float:
        """Return the FLOPs of one update of a unit, for placement. The whole unit has shape
        `shape`."""
        flops = self.rule.cost(shape)
        flops += 0.0 if self.pc is None else self.pc.preconditioner.cost(shape)
        return flops + (0.0 if self.penalty is None else self.penalty.cost(shape))

    def step(self, rate: Callable[[float], Rate], active: Tensor) -> Step:
        """Return the step arguments. `rate` maps a peak learning rate to the current one."""
        return Step(rate(self.lr), self.weight_decay, active)

    @property
    def has_owner(self) -> bool:
        """Whether the update requires the whole unit on one rank, its owner."""
        return self.rule.whole_matrix or self.pc is not None

    @property
    def whole_matrix(self) -> bool:
        """Whether the update or the penalty requires the whole unit on one rank."""
        return self.has_owner or self.penalty is not None


Assign = Callable[[Unit], Assignment]
"""Function that returns a unit's assignment."""


@dataclass(frozen=True)
class Route:
    """One row of the routing table.

    Attributes:
        lr: the unit's peak learning rate, including factors for its role and layer.
        radius, scale: the rule's radius and scale for the unit's shape; None if the rule does not
            use the value.
        pc: polynomial of a PC layer; None for other units.
        penalty: coefficient of the Gram penalty; None for no penalty.
    """

    unit: str
    parameter: str
    role: str
    shape: tuple[int, ...]
    group: str
    rule: str
    lr: float
    weight_decay: float
    radius: float | None
    scale: float | None
    owner: str
    pc: str | None = None
    penalty: float | None = None


def route(unit: Unit, assigned: Assignment, owners: Mapping[str, int]) -> Route:
    """Return a unit's row of the routing table. `owners` maps matrix names to owner ranks and may
    be incomplete."""
    rule = assigned.rule
    radius = scale = None
    if rule.whole_matrix:
        rows, cols = unit.shape
        radius, scale = rule.radius_of((rows, cols)), rule.scale_of((rows, cols))
    owner = "its shards' ranks"
    if assigned.has_owner:
        owner = f"rank {owners[unit.name]}" if unit.name in owners else "one rank"
    pc = None
    if assigned.pc is not None:
        level = assigned.pc.preconditioner.level
        if isinstance(level, int | str):
            pc = f"level {level}" if isinstance(level, int) else level
        else:
            pc = f"degree {2 * len(level) - 1}"
    return Route(
        unit=unit.name,
        parameter=unit.parameter,
        role=unit.role,
        shape=unit.shape,
        group=assigned.group,
        rule=assigned.rule_name,
        lr=assigned.lr,
        weight_decay=assigned.weight_decay,
        radius=radius,
        scale=scale,
        owner=owner,
        pc=pc,
        penalty=None if assigned.penalty is None else assigned.penalty.coefficient,
    )


def unit_work(
    units: Sequence[Sequence[Unit]], bucket_layout: BucketLayout, assign: Assign
) -> list[Work]:
    """For each owned unit in a stage, return its cost and the ranks that hold the unit. The result
    is sorted by unit name.

    Args:
        units: each tensor-parallel rank's list of units, in rank order.
        bucket_layout: the stage's layout, the same on every tensor-parallel rank.
        assign: rule and penalty of each unit; elementwise units without a penalty have no owner.
    """
    cost = cache(Assignment.cost)  # shared by units of the same shape
    holders_of: dict[str, dict[int, int]] = {}
    costs: dict[str, float] = {}
    local: dict[str, dict[int, int]] = {}
    for tensor_rank, members in enumerate(units):
        for unit in members:
            assigned = assign(unit)
            if not assigned.whole_matrix:
                continue
            if unit.name not in local:
                local[unit.name] = bucket_layout.holders(unit)
                costs[unit.name] = cost(assigned, unit.shape)
            holders = holders_of.setdefault(unit.name, {})
            for data_rank, numel in local[unit.name].items():
                holders[data_rank * len(units) + tensor_rank] = numel
    return [Work(name, costs[name], holders_of[name]) for name in sorted(holders_of)]
