"""From the optimizer section of a config to the assignment of each role."""

from collections.abc import Iterable

from parallel.routing import Assign, Assignment
from training.config import OptimizerConfig, group_of
from training.errors import ConfigError

GROUPS = ("matrix", "embedding", "head", "scalar")
"""The sections of `optimizer` that carry a learning rate, and the names it is logged under."""


def assignments(optimizer: OptimizerConfig, roles: Iterable[str]) -> Assign:
    """Role to assignment, for the roles the model has.

    Raises ConfigError if an override names a role that no parameter has.
    """
    known = {role: _assignment(optimizer, role) for role in sorted(set(roles))}
    for role in optimizer.roles:
        if role not in known:
            raise ConfigError(
                f"optimizer.roles.{role} matches no parameter; the model has {', '.join(known)}"
            )
    return known.__getitem__


def _assignment(optimizer: OptimizerConfig, role: str) -> Assignment:
    settings = optimizer.settings_for(role)
    return Assignment(
        group=group_of(role),
        rule_name=settings.rule,
        rule=optimizer.rule(settings.rule),
        lr=settings.lr,
        weight_decay=settings.weight_decay,
    )
