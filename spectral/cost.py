"""FLOPs of what rules are made of: the polar factor, singular triplets, elementwise work.

Products of matrices are counted as the code runs them (a multiply-add is two FLOPs). The small
dense algebra of the Krylov spaces is left out, which matters only below about 100 rows. How long a
product takes depends on more than its FLOPs, so every function takes the price of a product as an
argument, which a measured table can replace.
"""

from collections.abc import Callable

import torch

from .krylov import cycle
from .polar import prefers_gram
from .positive_definite import blocks_of
from .power_iteration import basis_size
from .schedules import coefficients, restart_steps
from .tangent import model_shifts

Product = Callable[[int, int, int], float]
"""Price in FLOPs of `[rows, inner] @ [inner, cols]`, from (rows, inner, cols)."""

ELEMENTWISE_FLOPS = 16
"""Per element: momentum, decay, update and their norms; AdamW is within a factor of 1.5."""


def product_flops(rows: int, inner: int, cols: int) -> float:
    """Count the FLOPs of `[rows, inner] @ [inner, cols]`, as if all products ran equally fast."""
    return 2.0 * rows * inner * cols


def msign_cost(
    short: int,
    long: int,
    *,
    steps: int,
    dtype: torch.dtype,
    schedule: str = "polar_express",
    product: Product = product_flops,
) -> float:
    """Count the FLOPs of the polar factor of a matrix with sides `short <= long`.

    In the form that `spectral.polar` chooses: K (4 m^2 n + 2 m^3) plain, and with r restarts
    (1 + r) 4 m^2 n + (4 K - 3 - 3 r) 2 m^3 in Gram space, for K steps and sides m, n.
    """
    square = product(short, short, short)
    to_gram, from_gram = product(short, long, short), product(short, short, long)
    polynomials = coefficients(schedule, steps, dtype)
    if not prefers_gram(short, long, polynomials, dtype):
        return steps * (to_gram + square + from_gram)
    segments = 1 + len(restart_steps(polynomials, dtype))
    return segments * (to_gram + from_gram) + (4 * steps - 3 * segments) * square


def triplet_cost(
    short: int, long: int, *, steps: int, vectors: int = 2, product: Product = product_flops
) -> float:
    """Count the FLOPs of `steps` block Krylov steps with a block of so many `vectors`.

    All but the first take two products with the matrix. After each cycle the new vectors are
    orthogonalised twice; in the end the basis and its image are multiplied by themselves.
    """
    size = basis_size(short, steps, vectors=vectors)
    passes = size // vectors - 1
    total = passes * (product(vectors, short, long) + product(vectors, long, short))
    for known in range(0, size, vectors * cycle(vectors)):
        new = min(vectors * cycle(vectors), size - known)
        total += product(new, short, new)
        total += 2 * (product(new, short, known) + product(new, known, short)) if known else 0.0
    return total + product(size, short, size) + product(size, long, size + short)


def tangent_cost(
    short: int,
    long: int,
    *,
    evaluations: float,
    msign: float,
    dtype: torch.dtype,
    product: Product = product_flops,
) -> float:
    """Count the FLOPs of a tangent solve: its model and `evaluations` of price `msign`.

    The model takes a Gram matrix, a factorisation per shift, and a projection on its basis. `dtype`
    is that of msign's products.
    """
    shifts = model_shifts(dtype)
    model = product(short, long, short) + shifts * factorization_cost(short, product=product)
    return model + product(2 + 2 * shifts, short, long) + evaluations * msign


def factorization_cost(rows: int, *, product: Product = product_flops) -> float:
    """Count the FLOPs of factorising a positive definite matrix in blocks, as the code does."""
    total = 0.0
    for part in blocks_of(rows):
        size, rest = part.stop - part.start, rows - part.stop
        # A Cholesky factor takes a sixth of a product, its inverse by a triangular solve half.
        total += product(size, size, size) * 2 / 3
        total += product(size, size, rest) + product(rest, size, rest) if rest else 0.0
    return total
