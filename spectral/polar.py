"""Polar factors of stacks of matrices, computed by odd quintic polynomials in plain or Gram form.

Each step maps every singular value by `p(s) = a s + b s^3 + c s^5`: `X <- a X + (b A + c A^2) X`
with `A = X X^T`. The composition of all steps approximates the sign function, so `X` converges to
`U V^T` from its thin SVD ("Controlled LLM Training on Spectral Sphere", eq. 6). Null directions
stay null.

`SCHEDULES` lists the coefficients of consecutive steps with their sources, and the margins for
16-bit formats. Between steps, singular values reach almost 2, where the Polar Express polynomials
are steep. A value that rounding pushes beyond the end of its interval grows with every later step
until it overflows. `Schedule.half_margin` and `GRAM_GAIN` prevent this: in a search over 480,480
adversarial matrices, no singular value exceeded 1.007.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from . import kernels
from .batching import concat, split_like
from .device_values import constant_result, is_known
from .kernels.library import product, product_flops

Coefficients = tuple[float, float, float]


@dataclass(frozen=True)
class Schedule:
    """Coefficients of consecutive steps, and the rule for extending them to further steps.

    Attributes:
        coefficients: `(a, b, c)` of each step.
        continuation: whether further steps repeat the last step or start over.
        half_margin: in 16 bits, factor by which the input of each step except the last may exceed
            the step's interval. These steps are then `p(s / margin)` instead of `p(s)`. Without
            this margin, adversarial 2 x 4 matrices diverge in bfloat16 (plain form) and float16
            (Gram form); with the margin, singular values stay bounded even if all rounding errors
            are doubled.
    """

    coefficients: tuple[Coefficients, ...]
    continuation: Literal["repeat_last", "cycle"]
    half_margin: float = 1.0


_SIMPLE: Coefficients = (3.4445, -4.7750, 2.0315)

SCHEDULES: dict[str, Schedule] = {
    # K. Jordan, "Muon", 2024: a single polynomial with a large slope at zero; does not converge to
    # 1.
    "simple": Schedule((_SIMPLE,), "cycle"),
    # L. Cesista's optimised coefficients, as used in modded-nanogpt.
    "quintic": Schedule(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "cycle",
    ),
    # "The Polar Express" (arXiv 2505.16932): the eight steps in the SSO paper, with that paper's
    # safety margin.
    "polar_express": Schedule(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "repeat_last",
        half_margin=1.02,
    ),
    # The public SSO code uses this schedule for Muon under the name polar_express. Its slope at
    # zero is 20775; the slope of the eight steps above is 6363.
    "polar_express_upstream": Schedule(
        (
            (7.2086, -15.5131, 9.0178),
            (3.9623, -2.5813, 0.4542),
            (3.9466, -2.5765, 0.4544),
            (3.8991, -2.5671, 0.4566),
            (3.7186, -2.5308, 0.4653),
            (3.1390, -2.3073, 0.4733),
            (2.1715, -1.5246, 0.3885),
            (1.8648, -1.2224, 0.3577),
        ),
        "repeat_last",
        half_margin=1.02,
    ),
    # DeepSeek-V4 report, "hybrid Newton-Schulz": eight steep steps, then two that converge to 1.
    "deepseek": Schedule((_SIMPLE,) * 8 + ((2.0, -1.5, 0.5),) * 2, "repeat_last"),
}


GRAM_GAIN = {torch.float16: 33.0, torch.float32: 400.0, torch.float64: 400.0}
"""Per-dtype bound on `M g` between two restarts of the Gram form. M is the largest singular value
before the first restart, and g is the product of the slopes at zero of the steps in between.

A rounding error e in the Gram matrix becomes `(M g)^2 e` in the null directions (at most 0.5 in
float16). A rounding error e in the factor becomes `M g e` in all directions (at most 0.02). Dtypes
not listed do not use the Gram form: bfloat16 would have to restart at every step.
"""


def coefficients(
    schedule: str, steps: int, dtype: torch.dtype = torch.float32
) -> tuple[Coefficients, ...]:
    """Return `(a, b, c)` for each step of a schedule, with `half_margin` applied in 16 bits.

    Raises:
        ValueError: if the schedule is unknown or `steps < 1`.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    chosen = SCHEDULES[schedule]
    count = len(chosen.coefficients)
    cycles = chosen.continuation == "cycle"
    indices = [i % count if cycles else min(i, count - 1) for i in range(steps)]
    polynomials = tuple(chosen.coefficients[i] for i in indices)
    if torch.finfo(dtype).bits >= 32:
        return polynomials
    m = chosen.half_margin
    return (*((a / m, b / m**3, c / m**5) for a, b, c in polynomials[:-1]), polynomials[-1])


@constant_result
def restart_steps(steps: tuple[Coefficients, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """Return the step indices at which the Gram form restarts in `dtype`.

    The Gram form restarts before every step that would exceed `GRAM_GAIN`.
    """
    restarts: list[int] = []
    gain = largest = 1.0
    for index, (slope, _, _) in enumerate(steps):
        gain, largest = gain * slope, max(largest, largest_value(steps[:index]))
        if index and gain > GRAM_GAIN[dtype]:
            restarts.append(index)
            gain = slope * largest
    return tuple(restarts)


@constant_result
def largest_value(steps: tuple[Coefficients, ...]) -> float:
    """Return the largest value to which `steps` map a singular value in [0, 1]; 1 without steps."""
    s = torch.linspace(0, 1, 20_001, dtype=torch.float64, device="cpu")
    for a, b, c in steps:
        s = s * (a + s.square() * (b + c * s.square()))
    return float(s.max())


# Number of matrix elements to process at a time: one large matrix or several small ones, whose
# bfloat16 matmuls are several times faster in batches, even on CPU. This limits a step's scratch
# memory to a few matrices instead of a few stacks.
WORKSPACE_ELEMENTS = {"cpu": 1 << 21}
DEFAULT_WORKSPACE_ELEMENTS = 1 << 28
# Slice size, in elements, of elementwise passes over small matrices: a slice stays in a core's
# cache from one pass to the next. Devices not listed use a single slice.
CACHE_ELEMENTS = {"cpu": 1 << 18}
# An iteration counts as unbounded if the estimate of a singular value exceeds EXCESS times the
# largest value to which the polynomials map [0, 1]. ROUNDING is the factor by which rounding may
# increase all singular values.
EXCESS, ROUNDING = 1.5, 1.05
# Norms in this range are safe: float32 represents the squares of the norms and of all relevant
# entries.
SAFE = 1e-12, 1e15


def workspace(device: torch.device) -> int:
    """Return the number of matrix elements to process at a time."""
    return WORKSPACE_ELEMENTS.get(device.type, DEFAULT_WORKSPACE_ELEMENTS)


def workspace_units(numel: int, device: torch.device) -> int:
    """Return the number of units of `numel` elements to process at a time, at least 1."""
    return max(1, workspace(device) // numel)


def cache_slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split tensors along the batch into matching slices, such that each slice of the first tensor
    fits in the cache.
    """
    limit = CACHE_ELEMENTS.get(tensors[0].device.type)
    if limit is None or tensors[0].numel() <= limit:
        return iter([tensors])
    size = max(1, limit // tensors[0].shape[1:].numel())
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def msign(
    x: Tensor, *, schedule: str = "polar_express", steps: int = 8, dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the polar factor of each matrix in `x` `[..., rows, cols]`.

    The result has the shape and dtype of `x` and is differentiable. The result is zero for a zero
    matrix, and NaN for a matrix with NaN or infinity.

    Args:
        x: matrices `[..., rows, cols]` of any scale.
        schedule: key of `SCHEDULES`. If `steps` is smaller than the schedule's length, only the
            schedule's first steps are used; if larger, the last step repeats (convergent schedules)
            or the schedule starts over (quintic, simple).
        steps: number of quintic steps, at least 1.
        dtype: dtype of the matmuls; None means the dtype of `x`. Normalisation always uses at least
            float32.

    Raises:
        ValueError: if the schedule is unknown, `steps < 1`, `dtype` is not floating point, or `x`
            has fewer than two dimensions.
    """
    work = x.dtype if dtype is None else dtype
    if not isinstance(work, torch.dtype) or not work.is_floating_point:
        raise ValueError(f"dtype must be a floating-point dtype, got {work!r}")
    steps_coefficients = coefficients(schedule, steps, work)
    if x.ndim < 2:
        raise ValueError(f"x must have at least 2 dimensions, got shape {tuple(x.shape)}")
    rows, cols = x.shape[-2:]
    if x.numel() == 0:
        return x.clone()
    flat = x.reshape(-1, rows, cols)
    parts = [
        polars_of([normalized(part)], steps_coefficients, work)[0].direction.to(x.dtype)
        for part in torch.split(flat, workspace_units(rows * cols, x.device))
    ]
    return concat(parts).reshape(x.shape)


class Polar(NamedTuple):
    """Polar factors, and whether the iteration stayed bounded.

    `bounded` is False if a value is not finite, or if a singular value grows too large before the
    last step. The limit is `EXCESS` times the largest value to which the steps map [0, 1]. Singular
    values are estimated via the Schatten-8 norm: a single diverging value is detected once it
    exceeds a threshold between 1.5 (1 row) and 2.4 (8,192 rows), and several diverging values are
    detected earlier.
    """

    direction: Tensor  # [batch, rows, cols]
    bounded: Tensor  # [batch], bool


def normalized_(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Divide each matrix in `x` `[batch, rows, cols]` by its Frobenius norm, rounding once to
    `dtype`.

    The result overwrites `x` if `x` is float32 or float64 and already has dtype `dtype`; otherwise
    the contents of `x` are undefined afterwards. A matrix with NaN or infinity becomes NaN.
    """
    wide = x.dtype in (torch.float32, torch.float64)
    y = x if wide and dtype == x.dtype else torch.empty_like(x, dtype=dtype)
    for source, target in cache_slices(x, y):
        if is_known(x):
            least = torch.promote_types(x.dtype, torch.float32)
            norm = torch.linalg.vector_norm(source, dim=(-2, -1), keepdim=True, dtype=least)
            rough = ~((norm > SAFE[0]) & (norm < SAFE[1]))
            divide_(source, norm.masked_fill(rough, 1), target)
            for i in rough.flatten().nonzero()[:, 0].tolist():
                normalized(source[i : i + 1], out=target[i : i + 1])
        elif wide:
            source.div_(_divisor(source))  # in place, to avoid a scratch tensor
            torch.div(source, _norm(source), out=target)
        else:
            normalized(source, out=target)
    return y


def divide_(x: Tensor, divisor: Tensor, out: Tensor) -> None:
    """Write `x / divisor` to `out`, rounding once to its dtype. `x` may be overwritten."""
    if x.is_cpu and x.dtype.itemsize > out.dtype.itemsize:
        out.copy_(x.div_(divisor))  # a single pass would be slower
    else:
        torch.div(x, divisor, out=out)


def polars_of(
    stacks: list[Tensor], steps: tuple[Coefficients, ...], dtype: torch.dtype
) -> list[Polar]:
    """Compute the polar factors, in `dtype`, of stacks `[batch, rows, cols]` with Frobenius norms
    of at most 1.

    Stacks whose shorter sides have the same length share the matmuls of the Gram form, since work
    on `X X^T` does not depend on the longer side. The tensors in `stacks` are replaced, so that
    each iterate is freed as soon as the next one exists.
    """
    tall = [is_tall(y) for y in stacks]
    members_by_rows: dict[int, list[int]] = {}
    bounded: dict[int, Tensor] = {}
    for i, flip in enumerate(tall):
        stacks[i] = (stacks[i].mT if flip else stacks[i]).to(dtype)
        rows, cols = stacks[i].shape[1:]
        if prefers_gram(rows, cols, steps, dtype):
            members_by_rows.setdefault(rows, []).append(i)
        else:
            bounded[i] = _plain_form_(stacks, i, steps)
    for members in members_by_rows.values():
        ys = [stacks[i] for i in members]
        for i in members:
            stacks[i] = stacks[i].new_empty(0)
        bounded |= dict(zip(members, _gram_form_(ys, steps, dtype), strict=True))
        for i in members:
            stacks[i] = ys.pop(0)
    factors = (y.mT if flip else y for y, flip in zip(stacks, tall, strict=True))
    return [Polar(y, bounded[i]) for i, y in enumerate(factors)]


def _plain_form_(ys: list[Tensor], i: int, steps: tuple[Coefficients, ...]) -> Tensor:
    """Replace `ys[i]` with its polar factor, and return whether the iteration stayed bounded."""
    for a, b, c in steps[:-1]:
        ys[i] = product(kernels.polynomial(kernels.gram(ys[i]), b, c), ys[i], ys[i], beta=a)
    gram, (a, b, c) = kernels.gram(ys[i]), steps[-1]
    p = kernels.polynomial(gram, b, c)
    bounded = is_bounded(gram, p, steps)
    del gram  # free it before the last matmul
    ys[i] = product(p, ys[i], ys[i], beta=a)
    return bounded


def _gram_form_(
    ys: list[Tensor], steps: tuple[Coefficients, ...], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Replace stacks of equal row counts by polar factors; return `bounded` for each matrix."""
    for first, last in pairwise([0, *restart_steps(steps, dtype), len(steps)]):
        gram = kernels.gram(*ys)
        factor: Tensor | None = None  # Q: these steps map X to Q X
        for index in range(first, last):
            a, b, c = steps[index]
            step = kernels.polynomial(gram, b, c, a)
            factor = step if factor is None else kernels.commuting(step, factor)
            if index + 1 < last:
                # Two statements, so that the previous matrix is freed in between.
                gram = kernels.commuting(step, gram)
                gram = kernels.commuting(step, gram)
        if last == len(steps):
            bounded = is_bounded(gram, step, steps, steps[-1][0])
        del gram, step  # free them before the matmul
        assert factor is not None
        for i, part in enumerate(split_like(factor, ys)):
            ys[i] = product(part, ys[i])
        del factor, part  # free them before the next Gram matrix
    return split_like(bounded, ys)


def is_tall(x: Tensor) -> bool:
    """Return whether the matrices have more rows than columns."""
    return x.shape[-2] > x.shape[-1]


def normalized(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute `x / ||x||_F` per matrix in at least float32. Zero matrices stay zero.

    If `out` (of any dtype) is given, the result is rounded and written to `out`. Dividing by the
    largest entry first keeps the squares from underflowing or overflowing.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    y = x / _divisor(x)
    if out is None and y.requires_grad:  # autograd needs y
        return y / _norm(y)
    return torch.div(y, _norm(y), out=y if out is None else out)


def _divisor(x: Tensor) -> Tensor:
    """Return the largest magnitude per matrix `[..., 1, 1]`, or 1 for a zero matrix."""
    dims = (-2, -1)
    if x.is_cuda:
        peak = torch.linalg.vector_norm(x, ord=math.inf, dim=dims, keepdim=True)
    else:  # much faster on CPU
        peak = torch.maximum(x.amax(dims, keepdim=True), x.amin(dims, keepdim=True).neg())
    divisor: Tensor = peak.masked_fill(peak == 0, 1)
    return divisor


def _norm(x: Tensor) -> Tensor:
    """Return the Frobenius norms `[..., 1, 1]` of matrices whose largest magnitude is 1, or 1 for
    zero matrices.
    """
    norm: Tensor = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return norm.clamp_min(1)


def prefers_gram(rows: int, cols: int, steps: tuple[Coefficients, ...], dtype: torch.dtype) -> bool:
    """Return whether the Gram form is stable and takes fewer FLOPs, for `rows <= cols`.

    FLOPs are counted for general matmuls, without the symmetric kernels. Below an aspect ratio of
    2, the Gram form saves little and uses more memory than the plain form.
    """
    if 2 * rows > cols or dtype not in GRAM_GAIN:
        return False
    count, ratio = len(steps), cols / rows
    segments = 1 + len(restart_steps(steps, dtype))
    plain = count * (4 * ratio + 2)
    gram = segments * 4 * ratio + 2 * (4 * count - 3 * segments)
    return gram < plain


def msign_cost(
    short: int, long: int, *, steps: int, dtype: torch.dtype, schedule: str = "polar_express"
) -> float:
    """Return the FLOPs of computing the polar factor of a matrix with sides `short <= long`.

    For an m x n matrix with m <= n, K steps take K (4 m^2 n + 2 m^3) FLOPs in the plain form, and
    (1 + r) 4 m^2 n + (4 K - 3 - 3 r) 2 m^3 in the Gram form with r restarts. `prefers_gram` selects
    the form.
    """
    square = product_flops(short, short, short)
    to_gram, from_gram = product_flops(short, long, short), product_flops(short, short, long)
    polynomials = coefficients(schedule, steps, dtype)
    if not prefers_gram(short, long, polynomials, dtype):
        return steps * (to_gram + square + from_gram)
    segments = 1 + len(restart_steps(polynomials, dtype))
    return segments * (to_gram + from_gram) + (4 * steps - 3 * segments) * square


@torch.no_grad()
def is_bounded(
    gram: Tensor, p: Tensor, steps: tuple[Coefficients, ...], shift: float = 0.0
) -> Tensor:
    """Return whether each matrix's iterates stayed bounded, bool `[batch]`; see `Polar`.

    `gram` `[batch, rows, rows]` is the Gram matrix R before the last step, and is overwritten. `p`
    is `shift I + b R + c R^2` with the last step's coefficients. The Schatten-8 norm is computed
    from `gram` and `p`.
    """
    most, rows = largest_value(steps[:-1]), gram.shape[-1]
    limit = math.sqrt(rows * (ROUNDING * most) ** 8 + (EXCESS * most) ** 8)
    _, b, c = steps[-1]
    # c R^2, computed without a matmul.
    square = torch.sub(p, gram, alpha=b, out=None if gram.requires_grad else gram)
    if shift:
        square.diagonal(dim1=-2, dim2=-1).sub_(shift)
    # This accumulates in float32 and rounds once at the end, which is several times faster on CPU.
    norm: Tensor = torch.linalg.vector_norm(square, dim=(-2, -1))
    return norm <= abs(c) * limit


def newton_schulz(matrix: Tensor, steps: tuple[Coefficients, ...]) -> Tensor:
    """Compute the polar factor of one matrix `[rows, cols]` in plain code, for reference.

    Source: K. Jordan et al., "Muon" (2024); "The Polar Express" (arXiv 2505.16932) for `steps`.
    """
    X: Tensor = matrix / matrix.norm()  # singular values in [0, 1]
    for a, b, c in steps:
        A = X @ X.mT  # [rows, rows]
        X = a * X + (b * A + c * A @ A) @ X  # each singular value s becomes a s + b s^3 + c s^5
    return X
