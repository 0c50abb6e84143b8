"""The Lagrange multiplier of the tangent step: `<Theta, msign(M + lambda Theta)> = 0`, batched.

"Controlled LLM Training on Spectral Sphere", eqs. 10-12, `Theta = u v^T`. See docs/solver.md for
what was tried and measured. In outline:

1. One short block Krylov run on `M M^T` from `[u, M v]` gives a small model of
   `f(lambda) = <Theta, msign(M + lambda Theta)>` that serves every `lambda` at once, because the
   Krylov space does not depend on `lambda`. The model uses the same polynomial as msign.
2. The root of the model inside a rigorous bracket (two matrix-vector products) is the first guess.
3. True evaluations correct it, first along the model's slope, then by secants, inside the bracket.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from spectral.krylov import block_krylov
from spectral.polar import Coefficients, chunk_size, coefficients, gram_factor, polar_chunk

ROOT_ITERATIONS = 24


class TangentSolution(NamedTuple):
    """The multiplier and the direction it gives, per matrix of the batch."""

    multiplier: Tensor  # [batch]
    direction: Tensor  # [batch, rows, cols], msign(M + multiplier Theta) of the accepted evaluation
    residual: Tensor  # [batch], <Theta, direction>
    evaluations: Tensor  # [batch], int32, executed msign evaluations until this matrix stood still
    slope: Tensor  # [batch], d f / d lambda at the multiplier
    converged: Tensor  # [batch], bool, |residual| <= tolerance and direction not degenerate


class _Model(NamedTuple):
    """A small projection of one batch of problems, float64."""

    gram: Tensor  # [batch, 2k, 2k], Q^T M M^T Q
    u: Tensor  # [batch, 2k], Q^T u
    w: Tensor  # [batch, 2k], Q^T M v
    square: Tensor  # [batch], ||M||_F^2
    overlap: Tensor  # [batch], u^T M v
    reach: Tensor  # [batch], half the width of the bracket around -overlap


def krylov_steps(rows: int) -> int:
    """Block Krylov steps for matrices whose shorter side is `rows`."""
    return max(1, min(32 if rows > 256 else 16, (rows + 1) // 2))


def solve_multiplier(
    m: Tensor,
    u: Tensor,
    v: Tensor,
    *,
    tolerance: float = 2e-4,
    start: Tensor | None = None,
    slope: Tensor | None = None,
    max_evaluations: int = 3,
    early_exit: bool = False,
    schedule: str = "polar_express",
    steps: int = 8,
    dtype: torch.dtype | None = None,
    krylov: int | None = None,
) -> TangentSolution:
    """The multiplier with `|<u v^T, msign(M + multiplier u v^T)>| <= tolerance`, and that msign.

    Args:
        m: `[batch, rows, cols]`, float32 or float64, of any scale.
        u, v: unit vectors `[batch, rows]`, `[batch, cols]`; zero vectors (a zero weight) give
            `multiplier = 0` and the plain polar factor.
        tolerance: absolute, on `f` in [-1, 1].
        start, slope: `[batch]`, a guess of the multiplier (in units of `m`) and of `df/dlambda`.
        Read
            only when the Krylov model is switched off.
        max_evaluations: msign evaluations, at least 1.
        early_exit: stop when every matrix has converged; this waits for the device. Without it
            exactly `max_evaluations` are executed and nothing syncs.
        schedule, steps, dtype: of msign.
        krylov: block Krylov steps; None chooses by shape, 0 switches the model off.

    A matrix that has converged stands still while others go on. The direction is that of the best
    evaluation, `residual` is measured on it, and a miss is reported by `converged`.

    Raises:
        ValueError: wrong shapes, `max_evaluations < 1`, `tolerance <= 0`.
    """
    _check(m, u, v, tolerance, max_evaluations)
    if m.shape[1] > m.shape[2]:
        options = (tolerance, start, slope, max_evaluations, early_exit)
        names = ("tolerance", "start", "slope", "max_evaluations", "early_exit")
        flipped = solve_multiplier(
            m.mT,
            v,
            u,
            **dict(zip(names, options, strict=True)),  # type: ignore[arg-type]
            schedule=schedule,
            steps=steps,
            dtype=dtype,
            krylov=krylov,
        )
        return flipped._replace(direction=flipped.direction.mT)
    polynomials = coefficients(schedule, steps)
    count = krylov_steps(m.shape[1]) if krylov is None else krylov
    model = _project(m, u, v, max(count, 1))
    guess, guess_slope = _model_root(model, polynomials)
    if count == 0:
        guess = torch.zeros_like(guess) if start is None else start.double()
        guess_slope = 1 / model.square.sqrt() if slope is None else slope.double()
    chunk = chunk_size(m.shape[1], m.shape[2], m.device)
    parts = [
        _refine(*part, tolerance, max_evaluations, early_exit, polynomials, dtype)
        for part in zip(
            *(t.split(chunk) for t in (m, u, v, guess, guess_slope, model.overlap, model.reach)),
            strict=True,
        )
    ]
    return TangentSolution(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def _check(m: Tensor, u: Tensor, v: Tensor, tolerance: float, max_evaluations: int) -> None:
    if m.ndim != 3 or u.shape != m.shape[:2] or v.shape != (m.shape[0], m.shape[2]):
        shapes = tuple(map(tuple, (m.shape, u.shape, v.shape)))
        raise ValueError(f"m, u, v must be [b, rows, cols], [b, rows], [b, cols], got {shapes}")
    if max_evaluations < 1:
        raise ValueError(f"max_evaluations must be at least 1, got {max_evaluations}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")


def _project(m: Tensor, u: Tensor, v: Tensor, count: int) -> _Model:
    parts = [
        _project_chunk(*part, count)
        for part in zip(
            *(t.split(max(1, m.shape[1] // (2 * count))) for t in (m, u, v)), strict=True
        )
    ]
    return _Model(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def _project_chunk(m: Tensor, u: Tensor, v: Tensor, count: int) -> _Model:
    w = (m @ v[:, :, None])[:, :, 0]
    z = (m.mT @ u[:, :, None])[:, :, 0]
    basis, image = block_krylov(m, u, w, count)
    wide = image.double()
    uq = (basis.mT @ u[:, :, None])[:, :, 0].double()
    overlap = (u * w).sum(-1, keepdim=True)
    reach = torch.linalg.vector_norm(w - overlap * u, dim=-1) + torch.linalg.vector_norm(
        z - overlap * v, dim=-1
    )
    return _Model(
        gram=wide.mT @ wide,
        u=uq,
        w=(wide.mT @ v.double()[:, :, None])[:, :, 0],
        square=torch.linalg.vector_norm(m, dim=(-2, -1)).double().square(),
        overlap=overlap[:, 0].double(),
        reach=torch.hypot(overlap[:, 0].double(), reach.double()),
    )


def _model_value(model: _Model, multiplier: Tensor, steps: tuple[Coefficients, ...]) -> Tensor:
    """`f_k(multiplier)` `[batch]` of the projected problem, with msign's own polynomial."""
    lam = multiplier[:, None]
    cross = model.u[:, :, None] * (lam * model.w + 0.5 * lam.square() * model.u)[:, None, :]
    square = model.square + 2 * multiplier * model.overlap + multiplier.square()
    square = torch.where(square > 0, square, 1)
    factor = gram_factor((model.gram + cross + cross.mT) / square[:, None, None], steps)
    right = model.w + lam * model.u
    return (model.u * (factor @ right[:, :, None])[:, :, 0]).sum(-1) / square.sqrt()


def _model_root(model: _Model, steps: tuple[Coefficients, ...]) -> tuple[Tensor, Tensor]:
    """Root and slope `[batch]` of the model by a bracketed secant on `f / sqrt(1 - f^2)`.

    That transform is linear in lambda for a single row, and close to it near most roots.
    """
    low, high = -model.overlap - model.reach, -model.overlap + model.reach
    f_low, f_high = (_stretch(_model_value(model, x, steps)) for x in (low, high))
    root = 0.5 * (low + high)
    for iteration in range(ROOT_ITERATIONS):
        spread = f_high - f_low
        secant = low - f_low * (high - low) / torch.where(spread == 0, 1, spread)
        inside = (secant > low) & (secant < high) & (iteration % 3 != 2)
        root = torch.where(inside, secant, 0.5 * (low + high))
        value = _stretch(_model_value(model, root, steps))
        above = value > 0
        high, f_high = torch.where(above, root, high), torch.where(above, value, f_high)
        low, f_low = torch.where(above, low, root), torch.where(above, f_low, value)
    delta = 1e-4 * torch.maximum(root.abs(), 1e-3 * model.square.sqrt())
    ahead, behind = (_model_value(model, root + s * delta, steps) for s in (1, -1))
    return root, (ahead - behind) / (2 * torch.where(delta > 0, delta, 1))


def _stretch(f: Tensor) -> Tensor:
    return f / (1 - f.square()).clamp_min(1e-12).sqrt()


def _refine(
    m: Tensor,
    u: Tensor,
    v: Tensor,
    guess: Tensor,
    slope: Tensor,
    overlap: Tensor,
    reach: Tensor,
    tolerance: float,
    max_evaluations: int,
    early_exit: bool,
    steps: tuple[Coefficients, ...],
    dtype: torch.dtype | None,
) -> TangentSolution:
    """True evaluations of a chunk: from `guess` along `slope`, then secants, bracketed."""
    low, high = -overlap - reach, -overlap + reach
    trial = guess.clamp(low, high)
    best, residual, direction = trial, torch.full_like(trial, float("inf")), torch.zeros_like(m)
    last, f_last = trial, torch.zeros_like(trial)
    open_ = torch.ones_like(trial, dtype=torch.bool)
    evaluations = torch.zeros_like(trial, dtype=torch.int32)
    for index in range(max_evaluations):
        phi = polar_chunk(
            torch.baddbmm(m, (trial.to(m.dtype)[:, None] * u)[:, :, None], v[:, None, :]),
            steps,
            m.dtype if dtype is None else dtype,
        ).to(m.dtype)
        f = ((phi @ v[:, :, None])[:, :, 0] * u).sum(-1).double()
        evaluations += open_
        better = open_ & ((f.abs() < residual.abs()) | f.isnan())
        best, residual = torch.where(better, trial, best), torch.where(better, f, residual)
        direction = torch.where(better[:, None, None], phi, direction) if index else phi
        if index:
            secant = (f - f_last) / torch.where(trial == last, 1, trial - last)
            slope = torch.where(open_ & (secant > 0), secant, slope)
        low = torch.where(open_ & (f <= 0), torch.maximum(low, trial), low)
        high = torch.where(open_ & (f > 0), torch.minimum(high, trial), high)
        open_ = open_ & (f.abs() > tolerance)
        if index + 1 == max_evaluations or (early_exit and not bool(open_.any())):
            break
        last, f_last = torch.where(open_, trial, last), torch.where(open_, f, f_last)
        step = trial - f / torch.where(slope > 0, slope, 1)
        safe = (slope > 0) & (step > low) & (step < high)
        trial = torch.where(open_, torch.where(safe, step, 0.5 * (low + high)), trial)
    # M = -lambda Theta leaves nothing to orthogonalise: no direction, and not a solution.
    degenerate = (torch.linalg.vector_norm(direction, dim=(-2, -1)) == 0) & (reach > 0)
    converged = (residual.abs() <= tolerance) & ~degenerate
    out = (
        best.to(m.dtype),
        direction,
        residual.to(m.dtype),
        evaluations,
        slope.to(m.dtype),
        converged,
    )
    return TangentSolution(*out)
