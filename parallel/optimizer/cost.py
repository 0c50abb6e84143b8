"""What a unit's rule costs: FLOPs of one step, the currency of placement.

Counted in products of matrices as the code runs them (a multiply-add is two FLOPs); the small dense
algebra of the Krylov spaces is left out, which matters only below some 100 rows. How long a product
takes depends on more than its FLOPs, so each is priced by a function that a measured table can
replace.
"""

from collections.abc import Callable, Sequence
from math import prod

import torch

from parallel.optimizer.routing import Assignment
from spectral.odd_polynomial import stages
from spectral.pc_state import Preconditioner
from spectral.polar import prefers_gram
from spectral.rules.base import Rule
from spectral.rules.muon import MuonRule
from spectral.rules.muon_plus_plus import MuonPlusPlusRule
from spectral.rules.muon_sphere import MuonSphereRule
from spectral.rules.spectral_descent import SpectralDescentRule
from spectral.rules.spectral_sphere import FIXED_EVALUATIONS, SpectralSphereRule
from spectral.rules.switched import SwitchedRule
from spectral.schedules import coefficients, restart_steps
from spectral.tangent import krylov_steps

Product = Callable[[int, int, int], float]
"""(rows, inner, cols) to the price of `[rows, inner] @ [inner, cols]`, in FLOPs."""

ELEMENTWISE_FLOPS = 16
"""Per element: momentum, decay, update and the norms of them; AdamW is within a factor of 1.5."""
EARLY_EXIT_EVALUATIONS = 2.2
"""msign evaluations of a tangent solve to 2e-4 that stops early, in the mean (docs/solver.md)."""


def product_flops(rows: int, inner: int, cols: int) -> float:
    """FLOPs of `[rows, inner] @ [inner, cols]`: every product as efficient as every other."""
    return 2.0 * rows * inner * cols


def unit_cost(shape: Sequence[int], rule: Rule, *, product: Product = product_flops) -> float:
    """FLOPs of one step of `rule` on a unit of logical `shape`.

    Raises ValueError for a whole-matrix rule that has no entry in `MATRIX_COSTS`.
    """
    elementwise = float(ELEMENTWISE_FLOPS * prod(shape))
    if not rule.whole_matrix or len(shape) < 2:
        return elementwise
    short, long = sorted(shape)
    for kind in type(rule).__mro__:
        if kind in MATRIX_COSTS:
            return elementwise + MATRIX_COSTS[kind](short, long, rule, product)
    raise ValueError(f"rule must have a cost in MATRIX_COSTS, got {type(rule).__name__}")


def precondition_cost(
    shape: Sequence[int], preconditioner: Preconditioner, *, product: Product = product_flops
) -> float:
    """FLOPs per step of a preconditioned unit on top of its rule: PC(W), its transposed Jacobian
    and the refreshed singular pair.

    With m <= n the sides and k the powers after the first, PC(W) takes 2 products m n m and k - 1
    of m^3; the Jacobian computes the Gram matrix and iterates again, and adds 3 products m n m and
    2 k - 1 of m^3.
    """
    short, long = sorted(shape)
    found = triplet_cost(short, long, steps=preconditioner.steps, product=product)
    wide, square = product(short, long, short), product(short, short, short)
    composed = stages(preconditioner.level)
    for i, stage in enumerate(composed):
        powers = len(stage) - 1
        if powers:
            found += 6 * wide + (4 * powers - 3) * square
        if powers and i + 1 < len(composed):  # the next one's argument, again for the Jacobian
            found += 2 * wide + (powers - 1) * square
    return found


def assigned_cost(shape: Sequence[int], assigned: Assignment) -> float:
    """FLOPs of one step of a unit of logical `shape`."""
    found = unit_cost(shape, assigned.rule)
    if assigned.precondition is not None:
        found += precondition_cost(shape, assigned.precondition.preconditioner)
    if assigned.penalty is not None:
        found += penalty_cost(shape)
    return found


def penalty_cost(shape: Sequence[int]) -> float:
    """FLOPs of the Gram penalty's gradient: the smaller Gram matrix, and W times it."""
    short, long = sorted(shape)
    return 2 * product_flops(short, long, short)


def msign_cost(
    short: int,
    long: int,
    *,
    steps: int,
    dtype: torch.dtype,
    schedule: str = "polar_express",
    product: Product = product_flops,
) -> float:
    """FLOPs of the polar factor of a matrix whose sides are `short <= long`, in the form that
    `spectral.polar` chooses: K (4 m^2 n + 2 m^3) plain, and with r restarts
    (1 + r) 4 m^2 n + (4 K - 3 - 3 r) 2 m^3 in Gram space."""
    square = product(short, short, short)
    to_gram, from_gram = product(short, long, short), product(short, short, long)
    polynomials = coefficients(schedule, steps, dtype)
    if not prefers_gram(short, long, polynomials, dtype):
        return steps * (to_gram + square + from_gram)
    segments = 1 + len(restart_steps(polynomials, dtype))
    return segments * (to_gram + from_gram) + (4 * steps - 3 * segments) * square


def triplet_cost(short: int, long: int, *, steps: int, product: Product = product_flops) -> float:
    """FLOPs of `steps` block Krylov steps with two vectors: two products with the matrix each, and
    two passes of orthogonalisation against all vectors so far."""
    steps = min(steps, (short + 1) // 2 + 1)
    passes = steps * (product(2, short, long) + product(2, long, short))
    return passes + 2 * steps * (product(2, short, steps) + product(2, steps, short))


def _muon(short: int, long: int, rule: MuonRule, product: Product) -> float:
    dtype = torch.float32 if rule.dtype is None else rule.dtype
    return msign_cost(
        short, long, steps=rule.steps, dtype=dtype, schedule=rule.schedule, product=product
    )


def _muon_sphere(short: int, long: int, rule: MuonSphereRule, product: Product) -> float:
    track = triplet_cost(short, long, steps=rule.power_iteration_steps, product=product)
    return _muon(short, long, rule, product) + track


def _spectral_sphere(short: int, long: int, rule: SpectralSphereRule, product: Product) -> float:
    """Without early exit, which is the default on a GPU, all evaluations are executed."""
    evaluations: float = FIXED_EVALUATIONS if rule.max_evaluations is None else rule.max_evaluations
    if rule.early_exit:
        evaluations = EARLY_EXIT_EVALUATIONS
    track = triplet_cost(short, long, steps=rule.power_iteration_steps, product=product)
    return track + _tangent(short, long, rule, evaluations, product)


def _muon_plus_plus(short: int, long: int, rule: MuonPlusPlusRule, product: Product) -> float:
    """Two singular triplets, a third for the rescaling; then msign, projected or tangent."""
    triplets = 3 if rule.algorithm == "project_rescale" else 2
    track = triplets * triplet_cost(short, long, steps=rule.power_iteration_steps, product=product)
    if rule.algorithm == "dual":
        return track + _tangent(short, long, rule, rule.max_evaluations, product)
    return track + _muon(short, long, rule, product) + 8.0 * 2 * short * long


def _tangent(short: int, long: int, rule: MuonRule, evaluations: float, product: Product) -> float:
    """The multiplier's Krylov model and `evaluations` msigns."""
    model = triplet_cost(short, long, steps=krylov_steps(short), product=product)
    return model + evaluations * _muon(short, long, rule, product)


def _spectral_descent(short: int, long: int, rule: SpectralDescentRule, product: Product) -> float:
    dtype = torch.float32 if rule.msign_dtype is None else getattr(torch, rule.msign_dtype)
    return msign_cost(
        short, long, steps=rule.steps, dtype=dtype, schedule=rule.schedule, product=product
    )


def _switched(short: int, long: int, rule: SwitchedRule, product: Product) -> float:
    """Both rules are computed."""
    return unit_cost((short, long), rule.spectral, product=product)


MATRIX_COSTS: dict[type[Rule], Callable[..., float]] = {
    MuonRule: _muon,
    MuonSphereRule: _muon_sphere,
    SpectralSphereRule: _spectral_sphere,
    MuonPlusPlusRule: _muon_plus_plus,
    SpectralDescentRule: _spectral_descent,
    SwitchedRule: _switched,
}
"""FLOPs of `(short side, long side, rule, product)`, by rule; a subclass inherits its parent's."""
