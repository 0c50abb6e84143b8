"""Tracks top singular triplets from step to step, batched and without a host sync.

Each call runs a short block Krylov iteration from cached vectors and one fixed generic vector,
followed by Rayleigh-Ritz, which selects the best vector in the space. A step takes two passes over
the matrix, regardless of the number of vectors. The number of steps to convergence depends on the
square root of the spectral gap. The generic vector finds directions orthogonal to the cached
vectors. For small row counts on CPU, the eigenvectors of the Gram matrix are computed instead.

Callers of `top_singular` cache the top vector. Callers of `top_pairs` can also cache `NEARBY`
vectors for the next largest singular values. A direction that is about to overtake the top vector
has been among the cached vectors for a long time, so a few passes find it. From the top vector
alone, even many passes would not find this direction.

Vectors are stored as rows: on every device, multiplying a few rows by a matrix is a plain GEMM that
reads the matrix once, whereas multiplying by a few columns is several times slower on CPU.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .batching import concat, images, preimages, split_like
from .device_values import constant_result, is_known
from .kernels.dispatch import VECTORS, device_name, small_problem
from .kernels.library import product_flops
from .polar import cache_slices, normalized

COLD_STEPS = 48
NEARBY = 6
"""Number of cached vectors besides the top vector. Together with the top vector and the generic
vector, they form a block of eight vectors. Four steps extend the block to 32 vectors, the maximum
that a single program can orthonormalise."""
BLOCK = NEARBY + 2
"""Block size, in vectors."""
NEARBY_SQUARINGS = 4
NEARBY_ROUNDS = 3
"""The projected matrix, with its top vector removed, is squared NEARBY_SQUARINGS times. The vectors
from the last call are then multiplied by the result NEARBY_ROUNDS times, and orthonormalised after
each matmul. The 32nd powers of singular values separate all values that float64 can distinguish. A
single matmul with higher powers would leave rounding errors that differ between layouts."""
SQUARINGS = (7, 7, 7)
"""Number of squarings between normalisations of the projected matrix. The powers stay within
float64's range. Together, all squarings distinguish values 1e-6 apart."""
EXACT_ROWS = 64
"""Largest number of rows for which an eigensolver on `W W^T` beats the iteration on CPU."""
SQUARES = 1e-25, 1e30
"""Range of `||W||_F^2` in which float32 represents all relevant entries of `W W^T`."""
TINY = 1e-300
FAINT = 1e-20
"""Scale of the fixed vector added to a cached vector: negligible unless the cached vector is zero.
"""
RIDGE = 1e-7
"""Added to the diagonal of a basis's Gram matrix, to keep the matrix positive definite even if rows
are zero, and to keep dependent rows from amplifying rounding errors."""


def top_singular(
    w: Tensor, u: Tensor, v: Tensor, *, steps: int = 10
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the top singular triplet `(sigma, u, v)` of each matrix in `w`.

    The results are `[batch]`, `[batch, rows]` and `[batch, cols]`, in the dtype of `w`. `sigma`
    never exceeds the true norm by more than rounding error. For a zero matrix, `sigma` and the
    vectors are zero, so `u v^T` is zero too.

    Args:
        w: matrices `[batch, rows, cols]` of any shape; half precision is upcast to float32.
        u, v: vectors from the last call, `[batch, rows]` and `[batch, cols]`; zeros and vectors
            orthogonal to the result are equivalent to a cold start. Only the vector for the shorter
            side is read.
        steps: number of block Krylov steps; each takes two passes over `w`. Ten steps are enough if
            they start from the last optimizer step's vectors; a cold start takes `COLD_STEPS`.

    Raises:
        ValueError: if `steps < 1` or the shapes do not match.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if w.ndim != 3 or u.shape != w.shape[:2] or v.shape != (w.shape[0], w.shape[2]):
        shapes = tuple(map(tuple, (w.shape, u.shape, v.shape)))
        raise ValueError(
            f"w, u, v must have shapes [b, rows, cols], [b, rows], [b, cols], got {shapes}"
        )
    if w.shape[1] > w.shape[2]:
        sigma, v, u = top_singular(w.mT, v, u, steps=steps)
        return sigma, u, v
    sigma, left, (right,), _ = top_pairs([w], u, steps=steps)
    return sigma.to(w.dtype), left.to(w.dtype), right.to(w.dtype)


class TopPairs(NamedTuple):
    """Top singular values and vectors of several stacks of matrices, in at least float32.

    The shorter side has the same length in all stacks.
    """

    sigma: Tensor  # [matrices], all stacks
    short: Tensor  # [matrices, rows]
    long: list[Tensor]  # [batch, cols], per stack
    nearby: Tensor | None  # [matrices, NEARBY, rows], for the next call


def top_pairs(
    stacks: Sequence[Tensor], cached: Tensor, *, steps: int, nearby: Tensor | None = None
) -> TopPairs:
    """Compute `top_singular` for several stacks.

    Operations on columns are launched for each stack. All other operations are launched once.

    Args:
        stacks: stacks of matrices, `[batch, rows, cols]`, `rows <= cols`, with equal row counts.
        cached: `short` from the last call, `[matrices, rows]`, or zeros.
        steps: number of block Krylov steps, at least 1.
        nearby: `nearby` from the last call, `[matrices, NEARBY, rows]`, or zeros; None disables
            nearby vectors.
    """
    work = [w.to(torch.promote_types(w.dtype, torch.float32)) for w in stacks]
    dtype = work[0].dtype
    if work[0].shape[1] <= EXACT_ROWS and is_known(work[0]):
        vectors = _eigenvectors(work, 1 if nearby is None else 1 + NEARBY)
        long = [x[:, 0] for x in images(vectors[:, :1], work)]
    else:
        vectors, long = _iterated(work, cached, steps, nearby)
    short = vectors[:, 0]
    size, image = length(short), concat([length(x) for x in long])
    # For zero matrices, both vectors are already zero.
    sigma = (image / size.clamp_(min=TINY))[:, 0]
    short.div_(size)
    for x, norm in zip(long, split_like(image.clamp_(min=TINY), work), strict=True):
        x.div_(norm)
    return TopPairs(sigma.to(dtype), short, long, None if nearby is None else vectors[:, 1:])


def _eigenvectors(stacks: Sequence[Tensor], count: int) -> Tensor:
    """Compute the top `count` left singular vectors `[matrices, count, rows]`.

    Missing vectors, and all vectors of zero or nonfinite matrices, are zero.
    """
    gram = concat([*map(_gram, stacks)])
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    rough = ~((trace > SQUARES[0]) & (trace < SQUARES[1]))
    for i in rough.nonzero()[:, 0].tolist():
        w = normalized([m for w in stacks for m in w][i][None].double())
        gram[i] = _gram(w)[0].nan_to_num(0)
    vectors = torch.linalg.eigh(gram).eigenvectors[:, :, -count:].flip(-1).mT
    vectors = vectors * gram.diagonal(dim1=-2, dim2=-1).any(-1)[:, None, None]
    return pad(vectors, (0, 0, 0, count - vectors.shape[1])).to(gram.dtype)


def _iterated(
    work: Sequence[Tensor], cached: Tensor, steps: int, nearby: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Compute each matrix's unnormalised top left vectors, and the image of the first vector."""
    dtype = work[0].dtype
    known = cached[:, None] if nearby is None else torch.cat((cached[:, None], nearby), dim=1)
    fixed = _generic(known.shape[1] + 1, known.shape[2], dtype, known.device)
    # Replace zero vectors by fixed vectors. Without a cache, all cached vectors are zero.
    known = known.to(dtype).nan_to_num(0, 0, 0).add_(fixed[:-1], alpha=FAINT)
    start = torch.cat((known, fixed[-1:].expand_as(known[:, :1])), dim=1)
    block = start.shape[1]
    basis = krylov_basis(work, start, basis_size(start.shape[2], steps, vectors=block) // block)
    products = images(basis, work)  # [batch, k, cols] each
    square = concat([_gram(x.double()) for image in products for (x,) in cache_slices(image)])
    # Add fixed vectors, because the vectors from the last call may be zero or outside the new
    # space.
    near = None if nearby is None else start[:, 1:-1].add_(fixed[1:-1])
    # Compute the coordinates of the vector with the longest image. The rows of the basis are nearly
    # orthonormal or zero.
    wide = basis.double()
    gram = _gram(wide)
    gram.diagonal(dim1=-2, dim2=-1).add_(RIDGE)
    factor = torch.linalg.cholesky_ex(gram).L
    half = torch.linalg.solve_triangular(factor, square, upper=False)
    projected = torch.linalg.solve_triangular(factor, half.mT, upper=False)
    best = _top_eigenvector(projected)[:, None]
    if near is not None:  # vectors with the next longest images
        # Use coordinates in which the basis's rounding errors cancel.
        inside = torch.bmm(wide, near.mT.double())
        inside = torch.linalg.solve_triangular(factor, inside, upper=False)
        best = torch.cat((best, _nearby(projected, best, inside.mT)), dim=1)
    coordinates = torch.linalg.solve_triangular(factor.mT, best.mT, upper=True).mT.to(dtype)
    short = torch.bmm(coordinates, basis)
    return short, [x[:, 0] for x in images(coordinates[:, :1], products)]


def _gram(x: Tensor) -> Tensor:
    return torch.bmm(x, x.mT)


def basis_size(rows: int, steps: int, *, vectors: int = 2) -> int:
    """Return the number of basis vectors after `steps` block steps for a shorter side of `rows`.

    `vectors` is the block size: the number of cached vectors, plus the generic vector.
    """
    return vectors * min(steps, -(-rows // vectors) + 1)


def cold_start(w: Tensor, *, steps: int = COLD_STEPS) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the top triplets `(sigma, u, v)` of `w` `[batch, rows, cols]` without a cache."""
    return top_singular(
        w, w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[0], w.shape[2]), steps=steps
    )


def _nearby(t: Tensor, best: Tensor, start: Tensor) -> Tensor:
    """Approximate the eigenvectors of `t` that follow `best`, `[batch, NEARBY, k]`.

    The approximations are powers of `t` `[batch, k, k]` applied to `start` `[batch, NEARBY, k]`;
    `best` is `[batch, 1, k]`. All tensors are float64. The result is orthonormal, or zero where
    only rounding errors remain: beyond the rank, and for eigenvalues far below the second largest.
    """
    image = torch.bmm(best, t)
    t = torch.baddbmm(t, image.mT, best, alpha=-1)  # removes the component along `best`
    # At rank 1, only rounding errors of either sign are left of the matrix and the vectors.
    largest = torch.linalg.vector_norm(t, float("inf"), dim=(-2, -1), keepdim=True)
    t = t / largest.clamp_(min=TINY)
    for _ in range(NEARBY_SQUARINGS):
        t = torch.bmm(t, t)
    vectors = start
    for _ in range(NEARBY_ROUNDS):
        vectors = orthonormal(unit(torch.bmm(vectors, t)), DEPENDENT[torch.float64])
    return vectors


@constant_result
def _generic(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return fixed, unstructured unit vectors `[count, size]`.

    The vectors are not random, so that steps do not depend on generator state. The vectors are not
    constant either, because rows that sum to zero (centred weights) are orthogonal to a constant
    vector.
    """
    # Compute on the host, so that the copy is complete on return. A kernel on the first caller's
    # stream might still be running when callers on other streams read the result.
    index = torch.arange(1, size + 1, dtype=torch.float64, device="cpu")
    rates = [43.7581 + 34.4749 * i for i in range(count)]
    waves = torch.stack([index * rate for rate in rates])
    return unit(torch.frac(torch.sin(waves) * 43758.5453)).to(dtype).to(device)


def _top_eigenvector(t: Tensor) -> Tensor:
    """Compute the top eigenvectors `[batch, k]` of semidefinite float64 `t` `[batch, k, k]`.

    The squarings amount to 2^21 power iterations, without an eigensolver or host sync.
    """
    if small_problem(t.shape[-1], device_name(t.device)):
        from .kernels import small

        return small.top_eigenvector(t, SQUARINGS, TINY)
    for count in SQUARINGS:
        # The top eigenvalue is between 1 and `size` times the largest entry, so its powers neither
        # overflow nor underflow.
        t = t / t.amax((-2, -1), keepdim=True).mul_(t.shape[1] ** 0.5).clamp_(min=TINY)
        for _ in range(count):
            t = torch.bmm(t, t)
    # All columns are parallel: use the longest, whose largest entry is on the diagonal. Divide by
    # that entry first, because squares may overflow.
    largest, column = t.diagonal(dim1=-2, dim2=-1).max(-1)
    best = t.gather(2, column[:, None, None].expand(-1, t.shape[1], 1))[:, :, 0]
    best = best / largest[:, None].clamp_(min=TINY)
    return unit(best)


CYCLE = 5
"""Maximum number of steps between orthogonalisations. Five powers separate all values that float32
can distinguish: with one, two or five steps, the top singular pairs agree to five digits."""
DEPENDENT = {torch.float32: 1e-10, torch.float64: 1e-13}
"""Squared length up to which an orthogonalised unit vector is considered rounding error."""


def krylov_basis(stacks: Sequence[Tensor], start: Tensor, steps: int) -> Tensor:
    """Compute a basis `[matrices, count steps, rows]` of each matrix's Krylov space of `W W^T`.

    The basis is orthonormal up to rounding, with zero rows if the space is exhausted (by dependent
    start vectors, low rank or `count steps > rows`).

    Args:
        stacks: stacks of matrices, `[batch, rows, cols]`, with equal row counts.
        start: start vectors `[matrices, count, rows]` for the matrices in all stacks.
        steps: number of block steps, at least 1.
    """
    basis, vectors, scale, square = None, [unit(start)], None, None
    last = vectors[0]
    for step in range(1, steps + 1):
        if len(vectors) == cycle(start.shape[1]) or step == steps:
            basis = extended(basis, torch.cat(vectors, dim=1))
            vectors, last = [], basis[:, -start.shape[1] :]
            if scale is not None and step < steps:
                last = (last * scale).to(last.dtype)
        if step < steps:
            products = images(last, stacks)
            if scale is None or square is None:
                # About 1 / ||W||, which keeps a cycle's powers representable. For a zero matrix,
                # this leads to NaN, which `extended` replaces with zeros.
                scale = concat([length(image, (-2, -1)) for image in products]).reciprocal_()
                square = scale.square()
                for image, factor in zip(products, split_like(scale, stacks), strict=True):
                    image.mul_(factor)
            last = preimages(products, stacks).mul_(square)
            vectors.append(last)
    assert basis is not None
    return basis


def cycle(count: int) -> int:
    """Return the number of steps between orthogonalisations for blocks of `count` vectors.

    At most `VECTORS` vectors are orthogonalised at a time, so that a single program suffices.
    """
    return max(1, min(CYCLE, VECTORS // count))


def triplet_cost(short: int, long: int, *, steps: int, vectors: int = 2) -> float:
    """Return the FLOPs of `steps` block Krylov steps with a block of `vectors` vectors.

    Every step but the first takes two matmuls with the matrix. After each cycle, the new vectors
    are orthogonalised twice. Finally, the Gram matrices of the basis and its image are computed.
    """
    size = basis_size(short, steps, vectors=vectors)
    passes = size // vectors - 1
    total = passes * (product_flops(vectors, short, long) + product_flops(vectors, long, short))
    for earlier in range(0, size, vectors * cycle(vectors)):
        new = min(vectors * cycle(vectors), size - earlier)
        total += product_flops(new, short, new)
        total += 2 * (product_flops(new, short, earlier) + product_flops(new, earlier, short))
    return total + product_flops(size, short, size) + product_flops(size, long, size + short)


def extended(basis: Tensor | None, vectors: Tensor) -> Tensor:
    """Append the new directions in `vectors` `[batch, count, rows]` to `basis`."""
    new = vectors.div_(length(vectors)).nan_to_num_(0, 0, 0)
    if basis is not None:
        for _ in range(2):
            new = torch.baddbmm(new, torch.bmm(new, basis.mT), basis, alpha=-1)
    new = orthonormal(new, DEPENDENT[vectors.dtype])
    return new if basis is None else torch.cat((basis, new), dim=1)


def orthonormal(x: Tensor, dependent: float) -> Tensor:
    """Orthonormalise the rows of `x` `[batch, count, n]` in float64.

    Rows must have length at most 1. A row is set to zero if its component orthogonal to earlier
    rows is shorter than about the square root of `dependent`. The rows are multiplied by the
    inverse Cholesky factor of their Gram matrix, which `dependent` keeps positive definite.
    """
    count, device = x.shape[1], device_name(x.device)
    if count <= VECTORS and small_problem(count, device):
        from .kernels import small

        return small.orthonormal(x, dependent)
    wide = x.double()
    gram = torch.bmm(wide, wide.mT)
    gram.diagonal(dim1=-2, dim2=-1).add_(dependent)
    factor = torch.linalg.cholesky_ex(gram).L
    basis: Tensor = torch.linalg.solve_triangular(factor, wide, upper=False)
    basis.masked_fill_(length(basis) < 0.5, 0)
    return basis.to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """Normalise `x` `[..., n]` to unit length. Zero vectors stay zero."""
    return x / length(x).clamp_(min=torch.finfo(x.dtype).tiny).to(x.dtype)


def length(x: Tensor, dim: int | tuple[int, int] = -1) -> Tensor:
    """Compute norms in float64, keeping the reduced axes: `[..., 1]` or `[..., 1, 1]`."""
    # Accumulate in float64: float32 squares overflow above 1.8e19 and underflow below 1e-23.
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float64)
    return norm
