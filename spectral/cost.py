"""FLOPs of the parts of a rule's step: polar factor, singular triplets, elementwise passes.

Matrix products are counted as the code runs them (a multiply-add is two FLOPs). The small dense
algebra of the Krylov spaces, which matters only below about 100 rows, is not counted. Placement
balances FLOPs; parallel/plan/devices.py models the time.
"""

import torch

from .polar import coefficients, prefers_gram, restart_steps
from .singular_triplets import basis_size, cycle
from .tangent_model import BLOCK, JOINED, SPACES, TRIANGLE, blocks_of

ELEMENTWISE_FLOPS = 16
"""FLOPs per element of momentum, decay, update and their norms; for AdamW, correct to a factor of
1.5."""


def product_flops(rows: int, inner: int, cols: int) -> float:
    """Count the FLOPs of `[rows, inner] @ [inner, cols]`, regardless of the product's speed."""
    return 2.0 * rows * inner * cols


def msign_cost(
    short: int, long: int, *, steps: int, dtype: torch.dtype, schedule: str = "polar_express"
) -> float:
    """Count the FLOPs of the polar factor of a matrix with sides `short <= long`.

    K steps with sides m <= n take K (4 m^2 n + 2 m^3) FLOPs in the plain form and, with r restarts,
    (1 + r) 4 m^2 n + (4 K - 3 - 3 r) 2 m^3 in the Gram form; `spectral.polar` chooses the form.
    """
    square = product_flops(short, short, short)
    to_gram, from_gram = product_flops(short, long, short), product_flops(short, short, long)
    polynomials = coefficients(schedule, steps, dtype)
    if not prefers_gram(short, long, polynomials, dtype):
        return steps * (to_gram + square + from_gram)
    segments = 1 + len(restart_steps(polynomials, dtype))
    return segments * (to_gram + from_gram) + (4 * steps - 3 * segments) * square


def triplet_cost(short: int, long: int, *, steps: int, vectors: int = 2) -> float:
    """Count the FLOPs of `steps` block Krylov steps with a block of `vectors` vectors.

    Every step except the first takes two products with the matrix. After each cycle the new vectors
    are orthogonalised twice; at the end the Gram matrices of the basis and of its image are
    computed.
    """
    size = basis_size(short, steps, vectors=vectors)
    passes = size // vectors - 1
    total = passes * (product_flops(vectors, short, long) + product_flops(vectors, long, short))
    for earlier in range(0, size, vectors * cycle(vectors)):
        new = min(vectors * cycle(vectors), size - earlier)
        total += product_flops(new, short, new)
        total += 2 * (product_flops(new, short, earlier) + product_flops(new, earlier, short))
    return total + product_flops(size, short, size) + product_flops(size, long, size + short)


def tangent_cost(
    short: int, long: int, *, evaluations: float, msign: float, dtype: torch.dtype
) -> float:
    """Count the FLOPs of a tangent solve: the model's, plus `evaluations` times `msign`.

    Building the model requires a Gram matrix, a factorisation per shift, and a projection onto the
    model's basis. `dtype` is the dtype of msign's products.
    """
    shifts, resolvents, products = SPACES[dtype]
    model = gram_cost(short, long) + len(shifts) * factorization_cost(short)
    vectors = 2 * (len(shifts) * resolvents + products)
    model += product_flops(vectors, short, short) + product_flops(2 + vectors, short, long)
    return model + evaluations * msign


def factorization_cost(rows: int) -> float:
    """Count the FLOPs of factorising a positive definite matrix in blocks."""
    total = 0.0
    for part in blocks_of(rows):
        size, rest = part.stop - part.start, rows - part.stop
        # A Cholesky factor costs 1/6 of a product; its inverse by a triangular solve costs 1/2.
        total += product_flops(size, size, size) * 2 / 3
        total += product_flops(size, part.start, rows - part.start)
        total += product_flops(size, size, rest)
        joined = part.start % (JOINED * BLOCK)  # earlier rows of the same joined block
        total += product_flops(size, joined, joined) + product_flops(size, size, joined)
    return total


def gram_cost(rows: int, cols: int) -> float:
    """Count the FLOPs of a symmetric product of which only half is computed."""
    parts = blocks_of(rows, TRIANGLE)
    return sum(product_flops(part.stop - part.start, cols, rows - part.start) for part in parts)
