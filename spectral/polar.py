"""Polar factor of a stack of matrices by odd quintic polynomials, in plain or Gram form.

One step maps every singular value by `p(s) = a s + b s^3 + c s^5`: `X <- a X + (b A + c A^2) X`
with `A = X X^T`. The composition of all steps is close to the sign function, so `X` tends to `U
V^T` of its thin SVD ("Controlled LLM Training on Spectral Sphere", eq. 6). Null directions stay
null.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from spectral import kernels
from spectral.kernels.library import fused, product
from spectral.schedules import Coefficients, allows_gram, coefficients

Form = Literal["auto", "plain", "gram"]
Normalization = Literal["frobenius", "schatten4", "schatten8"]

# Elements that one product works on: one large matrix, or several small ones (bfloat16 products of
# small matrices are several times faster in batches, on CPU too). Whole steps work on larger
# slices. Both bound the scratch of a step to a few matrices instead of a few stacks.
CHUNK_ELEMENTS = {"cpu": 1 << 21}
DEFAULT_CHUNK_ELEMENTS = 1 << 26
STACK_FACTOR = 4
# Elementwise passes over small matrices go by slices that stay in a core's cache from one pass to
# the next; without a limit a slice is everything.
CACHE_ELEMENTS = {"cpu": 1 << 18}
# The Gram form restarts (forms the product and a new Gram matrix) after a first number of steps
# and then at a period. Without it half precision diverges and float32 loses two digits on decaying
# spectra; with these it is as accurate as the plain form. docs/numerics.md has the measurements.
RESTART_HALF, RESTART_SINGLE = (2, 3), (3, 5)


def chunk_size(rows: int, cols: int, device: torch.device) -> int:
    """How many `[rows, cols]` matrices one product works on: one large, or many small ones."""
    limit = CHUNK_ELEMENTS.get(device.type, DEFAULT_CHUNK_ELEMENTS)
    return max(1, limit // max(1, rows * cols))


def stack_size(rows: int, cols: int, device: torch.device) -> int:
    """How many `[rows, cols]` matrices one step works on."""
    limit = STACK_FACTOR * CHUNK_ELEMENTS.get(device.type, DEFAULT_CHUNK_ELEMENTS)
    return max(1, limit // max(1, rows * cols))


def cache_slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Matching slices along the first dimension of tensors of one shape, for elementwise passes."""
    limit = CACHE_ELEMENTS.get(tensors[0].device.type)
    each = max(1, tensors[0].shape[1:].numel())
    size = max(1, tensors[0].shape[0] if limit is None else limit // each)
    return zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def working_dtype(x: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of the matrix products: `dtype`, or that of `x` when None."""
    chosen = x.dtype if dtype is None else dtype
    if not chosen.is_floating_point:
        raise ValueError(f"dtype must be a floating point dtype, got {chosen}")
    return chosen


def msign(
    x: Tensor,
    *,
    schedule: str = "polar_express",
    steps: int = 8,
    dtype: torch.dtype | None = None,
    form: Form = "auto",
    normalization: Normalization = "frobenius",
) -> Tensor:
    """The polar factor of each matrix of `x` `[..., rows, cols]`, same shape and dtype as `x`.

    Args:
        schedule: a key of `SCHEDULES`. Fewer steps than the set has take its prefix; more repeat
        its
            last step (sets that converge) or start over (quintic, simple, aol).
        steps: number of quintic steps.
        dtype: dtype of the matrix products; None keeps that of `x`. Normalisation is never done in
            less than float32.
        form: "plain" iterates on X, "gram" on the small matrix `X X^T` with restarts, "auto" takes
            the one with fewer FLOPs, but never "gram" where 16 bits make it inaccurate.
        normalization: "frobenius", or the tighter bounds on the largest singular value
            "schatten4" and "schatten8", which come from products that are formed anyway.

    A zero matrix gives zero, a matrix with NaN or infinity gives NaN.

    Raises:
        ValueError: unknown schedule, form or normalization; steps < 1; fewer than two dimensions;
            "gram" where `allows_gram` denies it.
    """
    steps_coefficients = coefficients(schedule, steps)
    _check(x, form, normalization)
    work = working_dtype(x, dtype)
    if form == "gram" and not allows_gram(steps_coefficients, work):
        raise ValueError(
            f"form must be plain or auto for schedule {schedule!r} with {steps} steps in "
            f"{str(work).removeprefix('torch.')}, in which the Gram form is inaccurate, got 'gram'"
        )
    rows, cols = x.shape[-2:]
    if x.numel() == 0:
        return x.clone()
    flat = x.reshape(-1, rows, cols)
    chunk = chunk_size(rows, cols, x.device)
    parts = [
        polar_of_normalized(normalized(part), steps_coefficients, work, form, normalization).to(
            x.dtype
        )
        for part in torch.split(flat, chunk)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(x.shape)


def msign_(
    x: Tensor,
    *,
    schedule: str = "polar_express",
    steps: int = 8,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`x` `[batch, rows, cols]`, replaced by `msign(x)`, which it equals but for rounding.

    Takes one matrix of scratch less than `msign`. Raises ValueError as `msign` does.
    """
    steps_coefficients = coefficients(schedule, steps)
    work = working_dtype(x, dtype)
    for part in torch.split(x, chunk_size(x.shape[-2], x.shape[-1], x.device)):
        part.copy_(polar_of(part, steps_coefficients, work))
    return x


def polar_of(x: Tensor, steps: tuple[Coefficients, ...], dtype: torch.dtype) -> Tensor:
    """The polar factor of `x` `[batch, rows, cols]` in `dtype`; overwrites `x` with anything."""
    return polar_of_normalized(normalized_(x, dtype), steps, dtype)


def normalized_(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` `[batch, rows, cols]` over its Frobenius norms, rounded once to `dtype`; in place if that
    is its dtype."""
    if dtype == x.dtype and dtype in (torch.float32, torch.float64):
        for (part,) in cache_slices(x):
            normalize_(part)
        return x
    y = torch.empty_like(x, dtype=dtype)
    for source, target in cache_slices(x, y):
        target.copy_(normalized(source))  # the scratch stays in the cache, unlike x
    return y


def check_matrices(x: Tensor) -> None:
    """None, or a ValueError unless `x` is `[..., rows, cols]`."""
    if x.ndim < 2:
        raise ValueError(f"x must have at least 2 dimensions, got shape {tuple(x.shape)}")


def _check(x: Tensor, form: str, normalization: str) -> None:
    check_matrices(x)
    if form not in ("auto", "plain", "gram"):
        raise ValueError(f"form must be one of auto, plain, gram, got {form!r}")
    if normalization not in ("frobenius", "schatten4", "schatten8"):
        raise ValueError(
            f"normalization must be one of frobenius, schatten4, schatten8, got {normalization!r}"
        )


def polar_of_normalized(
    y: Tensor,
    steps: tuple[Coefficients, ...],
    dtype: torch.dtype,
    form: Form = "auto",
    normalization: Normalization = "frobenius",
) -> Tensor:
    """The polar factor `[batch, rows, cols]` in `dtype` of matrices of Frobenius norm at most 1."""
    tall, handed = is_tall(y), [y]
    del y  # so that it is freed as soon as the first iterate exists
    polar = unfinished(handed.pop(), steps, dtype, form, normalization).finished()
    return polar.mT if tall else polar


class Unfinished(NamedTuple):
    """A polar factor `a Y + P Y` before its last product; of the transpose, for a tall matrix."""

    p: Tensor  # [batch, rows, rows], rows <= cols
    a: float
    y: Tensor  # [batch, rows, cols]

    def finished(self) -> Tensor:
        """The polar factor `[batch, rows, cols]`."""
        p, a, y = self
        return fused(y, p, y, a, 1.0) if a else product(p, y)


def unfinished(
    y: Tensor,
    steps: tuple[Coefficients, ...],
    dtype: torch.dtype,
    form: Form = "auto",
    normalization: Normalization = "frobenius",
) -> Unfinished:
    """The polar factor in `dtype` of `y` `[batch, rows, cols]`, of Frobenius norm at most 1, but
    for its last product."""
    y = (y.mT if is_tall(y) else y).to(dtype)
    if normalization != "frobenius":
        y = _tighten(y, normalization)
    if form == "gram" or (form == "auto" and prefers_gram(y.shape[-2], y.shape[-1], steps, dtype)):
        *early, last = segments_of(steps, dtype)
        for segment in early:
            y = product(gram_factor(kernels.gram(y), segment), y)
        return Unfinished(gram_factor(kernels.gram(y), last), 0.0, y)
    # One name for the iterate, so that each is freed as soon as the next exists.
    for step in steps[:-1]:
        y = _plain_step(y, step).finished()
    return _plain_step(y, steps[-1])


def unfinished_polar_of(
    x: Tensor, steps: tuple[Coefficients, ...], dtype: torch.dtype
) -> Unfinished:
    """`unfinished` of `x` `[batch, rows, cols]`, of any norm; overwrites `x` with anything."""
    return unfinished(normalized_(x, dtype), steps, dtype)


def segments_of(
    steps: tuple[Coefficients, ...], dtype: torch.dtype
) -> list[tuple[Coefficients, ...]]:
    """The steps of the Gram form between one restart and the next."""
    bounds = [0, *restart_steps(len(steps), dtype), len(steps)]
    return [steps[first:last] for first, last in zip(bounds[:-1], bounds[1:], strict=True)]


def is_tall(x: Tensor) -> bool:
    """Whether matrices have more rows than columns."""
    return x.shape[-2] > x.shape[-1]


def polar_in_place_(y: Tensor, steps: tuple[Coefficients, ...]) -> Tensor:
    """The polar factor of `y` `[batch, rows, cols]`, `rows <= cols`, of Frobenius norm at most 1.

    In the buffer of `y` and with scratch of at most one more `y` and 1/24 of it: products with `y`
    go by blocks of columns. Up to 1.8 times the FLOPs of `polar_of_normalized`, but no more for
    squares.
    """
    rows, cols = y.shape[-2:]
    # The Gram form holds four small matrices at a time, the plain form two.
    if 4 * rows <= cols and prefers_gram(rows, cols, steps, y.dtype):
        for segment in segments_of(steps, y.dtype):
            factor = gram_factor(kernels.gram(y), segment)
            for block in _column_blocks(y):
                block.copy_(product(factor, block))
            del factor  # before the next Gram matrix
        return y
    roomy = 2 * rows <= cols
    for a, b, c in steps:
        matrix = kernels.gram(y)
        if roomy:
            matrix = kernels.polynomial(matrix, b, c)
        for block in _column_blocks(y):
            # Squares have no room for the polynomial of the Gram matrix: apply that one twice.
            inner = block.clone() if roomy else fused(block, matrix, block, b, c)
            block.baddbmm_(matrix, inner, beta=a)
            del inner
        del matrix  # before the next product
    return y


def _column_blocks(y: Tensor) -> tuple[Tensor, ...]:
    """Views of successive columns of `y`, 1/24 of them each."""
    return torch.split(y, -(-y.shape[-1] // 24), dim=-1)


def normalized(x: Tensor) -> Tensor:
    """`x / ||x||_F` per matrix in at least float32; zero for zero, whatever the scale.

    Dividing by the largest entry first keeps the squares from under- and overflowing.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    peak = _peak(x)
    y = x / torch.where(peak == 0, 1, peak)
    norm = torch.linalg.vector_norm(y, dim=(-2, -1), keepdim=True)
    return y.div_(torch.where(norm == 0, 1, norm))


def normalize_(x: Tensor) -> Tensor:
    """`x` `[..., rows, cols]`, float32 or float64, divided in place by its Frobenius norms."""
    peak = _peak(x)
    x.div_(torch.where(peak == 0, 1, peak))
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    return x.div_(torch.where(norm == 0, 1, norm))


def _peak(x: Tensor) -> Tensor:
    """The largest magnitude per matrix; on CPU much faster than a vector norm of infinite order."""
    dims = (-2, -1)
    return torch.maximum(x.amax(dims, keepdim=True), x.amin(dims, keepdim=True).neg())


def _tighten(y: Tensor, normalization: Normalization) -> Tensor:
    """`y` over its Schatten-4 or Schatten-8 norm, both at least its largest singular value."""
    gram = kernels.gram(y)
    if normalization == "schatten4":
        bound = torch.linalg.matrix_norm(gram.float(), keepdim=True).sqrt()
    else:
        square = kernels.commuting(gram, gram).float()
        bound = torch.linalg.matrix_norm(square, keepdim=True).sqrt().sqrt()
    # Half precision may round the bound down; stay on the safe side of 1.
    bound = bound * (1 + 2 * torch.finfo(y.dtype).eps)
    return y / torch.where(bound == 0, 1, bound).to(y.dtype)


def restart_steps(steps: int, dtype: torch.dtype) -> range:
    """After which of `steps` steps the Gram form restarts in `dtype`."""
    first, period = RESTART_HALF if torch.finfo(dtype).bits < 32 else RESTART_SINGLE
    return range(first, steps, period)


def prefers_gram(rows: int, cols: int, steps: tuple[Coefficients, ...], dtype: torch.dtype) -> bool:
    """Whether the Gram form is accurate and needs fewer FLOPs, for `rows <= cols` and general
    products.

    Below aspect ratio 2 it saves little and would hold more scratch than the plain form.
    """
    count = len(steps)
    restarts = len(restart_steps(count, dtype))
    ratio = cols / rows
    plain = count * (4 * ratio + 2)
    gram = (1 + restarts) * 4 * ratio + 2 * (4 * count - 3 - 3 * restarts)
    return 2 * rows <= cols and gram < plain and allows_gram(steps, dtype)


def _plain_step(x: Tensor, step: Coefficients) -> Unfinished:
    a, b, c = step
    return Unfinished(kernels.polynomial(kernels.gram(x), b, c), a, x)


def gram_factor(gram: Tensor, steps: tuple[Coefficients, ...]) -> Tensor:
    """`Q` `[batch, rows, rows]` with which the steps map `X` to `Q X`, from `gram = X X^T`."""
    factor: Tensor | None = None
    for index, (a, b, c) in enumerate(steps):
        step = kernels.polynomial(gram, b, c, a)
        factor = step if factor is None else kernels.commuting(step, factor)
        if index + 1 < len(steps):
            # Two statements, so that the old matrix is freed between them.
            gram = kernels.commuting(step, gram)
            gram = kernels.commuting(step, gram)
    assert factor is not None
    return factor
