"""Routing: which rule updates which unit, with which step length. One row per unit."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from models.units import Unit
from spectral.gram_penalty import Normalize, Side
from spectral.pc_state import Preconditioner
from spectral.rules.base import Rule
from spectral.scaling import update_scale
from spectral.sphere import radius


@dataclass(frozen=True)
class Precondition:
    """What an owner does to turn W into the weight that the model multiplies by.

    preconditioner       the map
    gamma_rule           the elementwise rule that trains gamma, None if gamma stays what it is
    gamma_lr             its peak learning rate
    gamma_weight_decay   its decoupled decay, towards 0
    """

    preconditioner: Preconditioner
    gamma_rule: Rule | None
    gamma_lr: float
    gamma_weight_decay: float


@dataclass(frozen=True)
class Penalty:
    """What is added to the loss for a unit: `coefficient` times its Gram penalty, whose settings
    the others are (`spectral.gram_penalty`)."""

    coefficient: float
    power: int
    side: Side
    normalize: Normalize | None


@dataclass(frozen=True)
class Assignment:
    """What happens to a unit.

    group          matrix, embedding, head or scalar: the name its learning rate is logged under
    rule_name      key of the rule in spectral.rules.RULES
    rule           the rule with its hyper-parameters
    lr             peak learning rate
    weight_decay   decoupled decay, multiplied by the learning rate
    precondition   set if the parameter is the effective weight PC(W) of a W that its owner steps
    penalty        set if a Gram penalty of the weight is added to the loss
    """

    group: str
    rule_name: str
    rule: Rule
    lr: float
    weight_decay: float
    precondition: Precondition | None = None
    penalty: Penalty | None = None

    @property
    def has_owner(self) -> bool:
        """Whether one rank, its owner, has to have the unit whole to step it."""
        return self.rule.whole_matrix or self.precondition is not None

    @property
    def whole_matrix(self) -> bool:
        """Whether the unit has an owner, which steps it or penalises it."""
        return self.has_owner or self.penalty is not None


Assign = Callable[[Unit], Assignment]
"""Unit to assignment."""


@dataclass(frozen=True)
class Route:
    """One row of the routing table. radius and scale are None where the rule has none, pc where the
    weight is not preconditioned, msign (the way its products go) before an owner knows its batches,
    penalty, the coefficient, where it is not penalised."""

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
    msign: str | None = None
    penalty: float | None = None


def route(
    units: Iterable[Unit],
    assign: Assign,
    owners: Mapping[str, int] | None = None,
    msign: Mapping[str, str] | None = None,
) -> list[Route]:
    """The routing table of `units`; `owners` is the rank of each matrix and `msign` the way that
    its products go, if they are known.

    Raises ValueError if a rule for whole matrices is assigned to a unit that is none.
    """
    rows = [_row(unit, assign(unit), owners or {}) for unit in units]
    return [replace(row, msign=(msign or {}).get(row.unit)) for row in rows]


def _row(unit: Unit, assigned: Assignment, owners: Mapping[str, int]) -> Route:
    rule = assigned.rule
    if assigned.whole_matrix and not unit.is_matrix:
        raise ValueError(
            f"rule {assigned.rule_name} needs matrices, but role {unit.role} has {unit.name} "
            f"of shape {unit.shape}"
        )
    rule = getattr(rule, "spectral", rule)  # of a switched rule, the one it begins with
    scale = bound = None
    if rule.whole_matrix and hasattr(rule, "scale"):
        rows, cols = unit.shape
        scale = update_scale((rows, cols), rule.scale) * getattr(rule, "scale_factor", 1.0)
    if rule.whole_matrix and hasattr(rule, "radius"):
        rows, cols = unit.shape
        bound = radius((rows, cols), rule.radius, getattr(rule, "radius_scaler", 1.0))
    owner = "its shards' ranks"
    if assigned.has_owner:
        owner = f"rank {owners[unit.name]}" if unit.name in owners else "one rank"
    return Route(
        unit=unit.name,
        parameter=unit.parameter,
        role=unit.role,
        shape=unit.shape,
        group=assigned.group,
        rule=assigned.rule_name,
        lr=assigned.lr,
        weight_decay=assigned.weight_decay,
        radius=bound,
        scale=scale,
        owner=owner,
        pc=None if assigned.precondition is None else level_name(assigned.precondition),
        penalty=None if assigned.penalty is None else assigned.penalty.coefficient,
    )


def level_name(precondition: Precondition) -> str:
    """The polynomial of a preconditioner in a few words."""
    level = precondition.preconditioner.level
    if isinstance(level, int | str):
        return f"level {level}" if isinstance(level, int) else level
    return f"degree {2 * len(level) - 1}"
