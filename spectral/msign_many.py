"""msign of matrices of different shapes, joining the products that share a shorter side."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spectral import kernels
from spectral.kernels.library import product
from spectral.polar import (
    Polar,
    check_matrices,
    gram_factor,
    is_bounded,
    is_tall,
    normalized,
    polar_of_normalized,
    prefers_gram,
    segments_of,
    working_dtype,
)
from spectral.schedules import Coefficients, coefficients


def msign_many(
    matrices: Sequence[Tensor],
    *,
    schedule: str = "polar_express",
    steps: int = 8,
    dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Compute the polar factor of each matrix, equal to `msign` of it up to rounding.

    Where the Gram form pays, matrices with equal shorter sides share products, whatever their
    longer sides: attention heads, or the projections of a layer.

    Args:
        matrices: tensors `[rows, cols]` or `[batch, rows, cols]`; results have the same shapes and
            dtypes.
        schedule, steps, dtype: as for `msign`.

    Raises:
        ValueError: as `msign` does.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, x in enumerate(matrices):
        check_matrices(x)
        if x.numel():
            groups.setdefault((working_dtype(x, dtype), x.device), []).append(i)
    results = [x if x.numel() else x.clone() for x in matrices]
    for (work, _), indices in groups.items():
        stacks = [_normalized_copy(matrices[i], work) for i in indices]
        polars = polar_of_stacks(stacks, coefficients(schedule, steps, work), work)
        for i, (y, _) in zip(indices, polars, strict=True):
            results[i] = y.to(matrices[i].dtype).reshape(matrices[i].shape)
    return results


def _normalized_copy(x: Tensor, dtype: torch.dtype) -> Tensor:
    return normalized(x.reshape(-1, *x.shape[-2:])).to(dtype)


def polar_of_stacks(
    stacks: Sequence[Tensor], steps: tuple[Coefficients, ...], dtype: torch.dtype
) -> list[Polar]:
    """Compute `polar_of_normalized` of each stack `[batch, rows, cols]`.

    Stacks with equal shorter sides share the products of the Gram form: work on `X X^T` does not
    depend on the longer side.
    """
    results: dict[int, Polar] = {}
    together: dict[int, list[int]] = {}
    for i, y in enumerate(stacks):
        small, large = sorted(y.shape[-2:])
        if prefers_gram(small, large, steps, dtype):
            together.setdefault(small, []).append(i)
        else:
            results[i] = polar_of_normalized(y, steps, dtype)
    for indices in together.values():
        wide = [stacks[i].mT if is_tall(stacks[i]) else stacks[i] for i in indices]
        for i, found in zip(indices, _gram_of_stacks(wide, steps, dtype), strict=True):
            y, bounded = found
            results[i] = Polar(y.mT if is_tall(stacks[i]) else y, bounded)
    return [results[i] for i in range(len(stacks))]


def _gram_of_stacks(
    stacks: Sequence[Tensor], steps: tuple[Coefficients, ...], dtype: torch.dtype
) -> list[Polar]:
    """Compute polar factors of stacks `[batch, rows, cols]`, `rows <= cols`, in the Gram form.

    All stacks have the same `rows`.
    """
    ys = [y.to(dtype) for y in stacks]
    sizes = [y.shape[0] for y in ys]
    *early, last = segments_of(steps, dtype)
    for segment in early:
        ys = _products(gram_factor(kernels.grams(ys), segment).factor, ys)
    factor, gram, step = gram_factor(kernels.grams(ys), last)
    bounded = is_bounded(gram, step, steps, steps[-1][0])
    ys = _products(factor, ys)
    return [Polar(y, b) for y, b in zip(ys, torch.split(bounded, sizes), strict=True)]


def _products(factor: Tensor, ys: Sequence[Tensor]) -> list[Tensor]:
    """`Q Y` of each stack, whose factors `[sum of batches, rows, rows]` follow each other."""
    factors = torch.split(factor, [y.shape[0] for y in ys])
    return [product(each, y) for each, y in zip(factors, ys, strict=True)]
