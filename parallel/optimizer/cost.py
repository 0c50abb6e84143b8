"""FLOPs of one step of a unit with all that is assigned to it, the currency of placement.

What a rule costs the rule itself says (`Rule.cost`), and a preconditioner likewise.
"""

from collections.abc import Sequence

from parallel.optimizer.routing import Assignment
from spectral.cost import product_flops


def assigned_cost(shape: Sequence[int], assigned: Assignment) -> float:
    """Count the FLOPs of one step of a unit of logical `shape`."""
    found = assigned.rule.cost(shape)
    if assigned.pc is not None:
        found += assigned.pc.preconditioner.cost(shape)
    if assigned.penalty is not None:
        found += penalty_cost(shape)
    return found


def penalty_cost(shape: Sequence[int]) -> float:
    """Count the FLOPs of the Gram penalty's gradient: the smaller Gram matrix, and W times it."""
    short, long = sorted(shape)
    return 2 * product_flops(short, long, short)
