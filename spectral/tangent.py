"""Lagrange multiplier of the tangent step: `<Theta, msign(M + lambda Theta)> = 0`, batched.

"Controlled LLM Training on Spectral Sphere", eqs. 10-12, with `Theta = u v^T`. In outline (see
docs/numerics.md for measurements):

1. A small model of `f(lambda) = <Theta, msign(M + lambda Theta)>` is built from a few resolvents of
   `N N^T`, where `N = M (I - v v^T)` (spectral/tangent_model.py). The model is valid for every
   lambda. The model's root is the initial guess.
2. Evaluations of the true `f` refine the guess, first with the model's slope, then with secants,
   always within a rigorous bracket.
3. In 16 bits, an evaluation is less accurate than the model's root, because msign's rounding errors
   have a component along Theta. This component equals `f` and is subtracted from the direction.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import tangent_model
from .batching import concat, split_figures, split_like
from .polar import (
    Coefficients,
    Polar,
    cache_slices,
    coefficients,
    divide_,
    is_tall,
    newton_schulz,
    polars_of,
)
from .tangent_model import Model, is_wide

# Norm, in units of rounding error, below which M + lambda Theta is considered pure rounding error;
# see `shifted`.
DEGENERATE_EPS = 32


# Default and finest tolerance for each dtype of the matmuls in msign. Values of f below the finest
# tolerance are rounding errors, which no multiplier can reduce (docs/numerics.md).
TOLERANCES = {torch.float64: 2e-4, torch.float32: 2e-4, torch.float16: 1e-3, torch.bfloat16: 5e-3}
FINEST_TOLERANCES = {torch.float16: 5e-4, torch.bfloat16: 5e-3}

# Number of msign evaluations that suffices on recorded momenta (docs/numerics.md). If the model on
# a GPU is not wide (`tangent_model.is_wide`), a second evaluation in float32 recovers the accuracy
# lost by squaring.
EVALUATIONS, NARROW_EVALUATIONS = 1, 2
# Largest component along Theta that is attributed to msign's rounding errors, for each dtype of its
# matmuls. On recorded momenta at the exact multiplier, the largest components were 0.031 (float16)
# and 0.067 (bfloat16).
ROUNDING = {torch.float16: 0.05, torch.bfloat16: 0.1}


def tolerance_for(dtype: torch.dtype, tolerance: float | None = None) -> float:
    """Return `tolerance` or, if None, the default for msign matmuls in `dtype`.

    Raises:
        ValueError: if `tolerance` is not positive, or is finer than `dtype` can resolve.
    """
    name = str(dtype).removeprefix("torch.")
    if tolerance is None:
        return TOLERANCES[dtype]
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    finest = FINEST_TOLERANCES.get(dtype, 0.0)
    if tolerance < finest:
        raise ValueError(
            f"tolerance must be at least {finest:g} for msign in {name}, got {tolerance}"
        )
    return tolerance


class TangentSolution(NamedTuple):
    """Multiplier and direction of each matrix in a batch."""

    multiplier: Tensor  # [batch]
    direction: Tensor  # [batch, rows, cols], msign(M + multiplier Theta), the accepted evaluation;
    # in 16 bits without its component along Theta, unless the component exceeds rounding error
    residual: Tensor  # [batch], <Theta, direction>
    evaluations: Tensor  # [batch], int32, msign evaluations until this matrix converged
    converged: Tensor  # [batch], bool, |residual| <= tolerance, and the direction is not degenerate
    bounded: Tensor  # [batch], bool, see `spectral.polar.Polar`; if False, the residual is 1
    removed: Tensor | None = None  # [batch], the subtracted component along Theta, in 16 bits

    def report(self) -> dict[str, Tensor]:
        """Return the solver's metrics: `multiplier`, `residual`, `evaluations`, `converged` and, in
        16 bits, `removed`.
        """
        dtype = self.multiplier.dtype
        figures = {
            "multiplier": self.multiplier,
            "residual": self.residual,
            "evaluations": self.evaluations.to(dtype),
            "converged": self.converged.to(dtype),
        }
        return figures if self.removed is None else figures | {"removed": self.removed}


class TangentProblem(NamedTuple):
    """Matrices of one shape, and the vectors that define `Theta`; see `solve_multiplier`.

    The vectors' dtype may differ from the matrices' dtype.
    """

    m: Tensor  # [batch, rows, cols]
    u: Tensor  # [batch, rows]
    v: Tensor  # [batch, cols]


@dataclass(frozen=True, kw_only=True)
class Solver:
    """Solves tangent problems.

    Attributes:
        tolerance: largest accepted `|f|`, where `f` is in [-1, 1]; must be positive.
        max_evaluations: maximum number of msign evaluations, at least 1; None means 2 in float32 on
            a GPU if the model is not wide (`spectral.tangent_model.is_wide`), and 1 otherwise.
        early_exit: whether to stop once every matrix has converged, which requires a host sync.
            Otherwise, exactly `max_evaluations` evaluations run, without a host sync.
        schedule, steps, dtype: options passed to msign.

    Raises ValueError for `max_evaluations < 1` or `tolerance <= 0`.
    """

    tolerance: float = 2e-4
    max_evaluations: int | None = None
    early_exit: bool = False
    schedule: str = "polar_express"
    steps: int = 8
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.max_evaluations is not None and self.max_evaluations < 1:
            raise ValueError(f"max_evaluations must be at least 1, got {self.max_evaluations}")
        if not self.tolerance > 0:
            raise ValueError(f"tolerance must be positive, got {self.tolerance}")

    def solve(self, problems: Sequence[TangentProblem]) -> list[TangentSolution]:
        """Solve tangent problems. The shorter sides of all matrices must have the same length.

        Directions are returned in the buffers of `m`, to save memory.

        Work that only depends on the shorter side is launched once for all stacks. Up to rounding,
        each matrix's solution is independent of the others. `problems` must not be empty, and all
        problems must have the same dtype and device.

        Raises:
            ValueError: if a shape or dtype is wrong, `steps < 1`, the schedule is unknown, or
                shorter sides differ in length.
        """
        work = _Refinement(problems, self)
        work.begin(tangent_model.build(work.stacks, work.u, work.v, *work.msign))
        directions, f = work.measured(polars_of(work.shifted(), *work.msign))
        best, residual, kept = work.trial, f, work.kept
        for _ in range(1, work.limit):
            # Narrow the bracket with the last evaluation, and mark converged matrices.
            work.low = torch.where(f <= 0, work.trial, work.low)
            work.high = torch.where(f > 0, work.trial, work.high)
            work.open = work.open & ~(f.abs() <= max(self.tolerance, work.rounding))
            if self.early_exit and not bool(work.open.any()):
                break
            previous, f_previous = work.trial, f
            # Take a Newton step if it stays in the bracket, else continue from the midpoint.
            step = work.trial - f / work.slope
            safe = (work.slope > 0) & (step > work.low) & (step < work.high)
            step = torch.where(safe, step, torch.lerp(work.low, work.high, 0.5))
            work.trial = torch.where(work.open, step, work.trial)
            latest, f = work.measured(polars_of(work.shifted(), *work.msign))
            work.evaluations += work.open
            secant = (f - f_previous) / (work.trial - previous)
            rises = work.open & (secant > 0) & (secant < float("inf"))
            work.slope = torch.where(rises, secant, work.slope)
            better = work.open & ((f.abs() < residual.abs()) | residual.isnan())
            best, residual = torch.where(better, work.trial, best), torch.where(better, f, residual)
            kept = torch.where(better, work.kept, kept)
            replaced = split_like(better[:, None, None], work.stacks)
            for mask, phi, direction in zip(replaced, latest, directions, strict=True):
                torch.where(mask, phi, direction, out=direction)
            del latest, phi  # free memory for the next evaluation
        return work.solutions(best, directions, residual, kept)


def solve_multiplier(m: Tensor, u: Tensor, v: Tensor, **options: Any) -> TangentSolution:
    """Find the multiplier with `|<u v^T, msign(M + multiplier u v^T)>| <= tolerance`.

    A converged matrix keeps its result while the search continues for other matrices. The direction
    and `residual` are from the best evaluation; `converged` is False where the residual exceeds the
    tolerance. In 16 bits, msign has rounding errors along Theta that no multiplier can reduce. If
    these errors are at most `ROUNDING`, the search stops and subtracts them from the direction. If
    no tangent direction exists (`M = c Theta`), the direction is zero and `converged` is False.

    Args:
        m: matrices `[batch, rows, cols]`, float32 or float64, whose squares must be representable
            (rules pass matrices with Frobenius norm 1).
        u, v: unit vectors `[batch, rows]`, `[batch, cols]`. For zero vectors (from a zero weight),
            `multiplier` is 0 and the result is the plain polar factor.
        options: options of `Solver`.

    Raises:
        ValueError: if a shape or dtype is wrong, `max_evaluations < 1`, `tolerance <= 0`,
            `steps < 1`, or the schedule is unknown.
    """
    (solution,) = Solver(**options).solve([TangentProblem(m.clone(), u, v)])
    return solution


def default_evaluations(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the default number of msign evaluations in `dtype` for matrices with `rows` rows."""
    rounds = torch.finfo(dtype).bits < 32
    suffices = rounds or device.type == "cpu" or is_wide(rows, dtype, device)
    return EVALUATIONS if suffices else NARROW_EVALUATIONS


class _Refinement:
    """Evaluates the true `f` for the matrices in all stacks.

    Quantities are float64 `[matrices]`, across all stacks; `stacks`, `v` and directions are lists
    with one tensor per stack.
    """

    def __init__(self, problems: Sequence[TangentProblem], solver: Solver) -> None:
        """Transpose problems with tall matrices; raise the ValueErrors of `Solver.solve`."""
        self.solver, self.dtype = solver, problems[0].m.dtype
        dtype = self.dtype if solver.dtype is None else solver.dtype
        for m, u, v in problems:
            if m.ndim != 3 or u.shape != m.shape[:2] or v.shape != (m.shape[0], m.shape[2]):
                shapes = tuple(map(tuple, (m.shape, u.shape, v.shape)))
                raise ValueError(
                    f"m, u, v must have shapes [b, rows, cols], [b, rows], [b, cols], got {shapes}"
                )
            if m.dtype not in (torch.float32, torch.float64):
                raise ValueError(f"m must be float32 or float64, got {m.dtype}")
        short = [min(problem.m.shape[1:]) for problem in problems]
        if len(set(short)) > 1:
            raise ValueError(f"min(rows, cols) must be equal for all problems, got {short}")
        self.tall = [is_tall(problem.m) for problem in problems]
        wide = [
            TangentProblem(m.mT, v, u) if flip else TangentProblem(m, u, v)
            for (m, u, v), flip in zip(problems, self.tall, strict=True)
        ]
        self.stacks = [problem.m for problem in wide]
        self.u = concat([problem.u for problem in wide]).to(self.dtype)
        self.v = [problem.v.to(self.dtype) for problem in wide]
        self.msign = coefficients(solver.schedule, solver.steps, dtype), dtype
        self.rounding = ROUNDING.get(dtype, 0.0)
        self.limit = solver.max_evaluations or default_evaluations(short[0], dtype, self.u.device)
        self.last = self.limit == 1  # the first evaluation is also the last and may overwrite M

    def begin(self, model: Model) -> None:
        """Take the model's root as the initial guess."""
        offset, self.slope = tangent_model.root(model)
        self.trial = model.centre + offset
        self.floor = model.norm * (DEGENERATE_EPS * torch.finfo(self.dtype).eps)
        self.evaluations = torch.ones_like(model.centre, dtype=torch.int32)
        if not self.last:
            self.low, self.high = model.centre - model.half, model.centre + model.half
            self.open = torch.ones_like(model.centre, dtype=torch.bool)

    def measured(self, polars: list[Polar]) -> tuple[list[Tensor], Tensor]:
        """Return the directions `msign(M + trial Theta)` and their inner products with Theta.

        If a matrix's iteration diverged, its inner product is NaN. Such an evaluation is never the
        best, and does not narrow the bracket. Empties the list `polars`.
        """
        bounded = concat([polar.bounded for polar in polars])
        directions, values = [], []
        for m, u, v in zip(self.stacks, split_like(self.u, self.stacks), self.v, strict=True):
            phi = polars.pop(0).direction  # freed once it has been converted to the dtype of M
            phi = m.copy_(phi) if self.last else phi
            for part, left, right in cache_slices(phi, u, v):
                values.append((left[:, None] @ part.to(self.dtype) @ right[:, :, None])[:, 0, 0])
            directions.append(phi)
        return directions, concat(values).double().masked_fill(~bounded, torch.nan)

    def shifted(self) -> list[Tensor]:
        """Compute `M + trial Theta`, normalised to Frobenius norm 1.

        Where lambda cancels M entirely (`M = c Theta`), only rounding errors remain; the sum is
        then set to zero, and `kept` is set to False.
        """
        scaled = self.trial.to(self.dtype)[:, None] * self.u
        left, floor = (split_like(x, self.stacks) for x in (scaled, self.floor))
        sums = [self._sum(*parts) for parts in zip(self.stacks, left, self.v, floor, strict=True)]
        self.kept = concat([kept for _, kept in sums])
        return [z for z, _ in sums]

    def _sum(self, m: Tensor, left: Tensor, right: Tensor, floor: Tensor) -> tuple[Tensor, Tensor]:
        """Compute `M + left right^T` for one stack in `shifted`, in memory order, slice by slice.

        Overwrites M if M is no longer needed, to save memory.
        """
        if m.mT.is_contiguous() and not m.is_contiguous():
            z, kept = self._sum(m.mT, right, left, floor)
            return z.mT, kept
        _, dtype = self.msign
        same = dtype == self.dtype
        out = m if self.last and same else torch.empty_like(m, dtype=dtype)
        norms = []
        for part, x, y, least, target in cache_slices(m, left, right, floor, out):
            buffer = target if same else part if self.last else None
            z = torch.baddbmm(part, x[:, :, None], y[:, None], out=buffer)
            norms.append(torch.linalg.vector_norm(z, dim=(-2, -1)))
            norm = norms[-1].masked_fill(norms[-1] <= least, float("inf"))
            divide_(z, norm[:, None, None], target)
        return out, concat(norms) > floor

    def solutions(
        self, best: Tensor, directions: Sequence[Tensor], residual: Tensor, kept: Tensor
    ) -> list[TangentSolution]:
        """Return the solution of each stack, in the stack's original orientation."""
        if not self.last:
            both = zip(self.stacks, directions, strict=True)
            directions = [m.copy_(direction) for m, direction in both]
        removed = None
        if self.rounding:  # subtract rounding errors along Theta from the directions
            removed = residual.masked_fill(~(residual.abs() <= self.rounding), 0)
            scaled = removed.to(self.dtype)[:, None] * self.u
            left = split_like(scaled[:, :, None], self.stacks)
            for direction, column, v in zip(directions, left, self.v, strict=True):
                direction.baddbmm_(column, v[:, None], alpha=-1)
            residual = residual - removed
        converged = (residual.abs() <= self.solver.tolerance) & (kept | (self.floor == 0))
        unbounded = residual.isnan()
        figures = {
            "multiplier": best.to(self.dtype),
            "residual": residual.masked_fill(unbounded, 1).to(self.dtype),
            "evaluations": self.evaluations,
            "converged": converged,
            "bounded": ~unbounded,
        }
        if removed is not None:
            figures["removed"] = removed
        directions = [x.mT if flip else x for x, flip in zip(directions, self.tall, strict=True)]
        figures_of_stacks = split_figures(figures, self.stacks)
        return [
            TangentSolution(direction=direction, **row)
            for direction, row in zip(directions, figures_of_stacks, strict=True)
        ]


def bisected(matrix: Tensor, theta: Tensor, steps: tuple[Coefficients, ...]) -> Tensor:
    """Return `D = msign(M + lambda Theta)` with `<Theta, D> = 0` for one matrix `[rows, cols]`.

    Finds lambda by bisection, as in the paper. Serves as a reference for `Solver.solve`.
    """
    M = matrix / matrix.norm()

    def f(multiplier: Tensor) -> Tensor:  # increases with the multiplier
        return (theta * newton_schulz(M + multiplier * theta, steps)).sum()

    high = 2 * torch.linalg.matrix_norm(M, ord="nuc")
    low = -high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return newton_schulz(M + low * theta, steps)
