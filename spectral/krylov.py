"""Bases of block Krylov spaces, batched, in few launches and without a host sync.

Vectors are stored as rows: on every device a product of a few rows with a matrix is a plain GEMM
that reads the matrix once, while a product with a few columns is several times slower on CPU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .batching import apart, images, preimages, together
from .kernels.dispatch import VECTORS, device_name, small_problem

CYCLE = 5
"""Most steps between two orthogonalisations. Five powers keep apart what float32 can tell: with
one, two or five the top singular pairs come out equal to five digits."""
DEPENDENT = {torch.float32: 1e-10, torch.float64: 1e-13}
"""Squared length of what rounding leaves of a unit vector that depends on others."""


def krylov_basis(stacks: Sequence[Tensor], start: Tensor, steps: int) -> Tensor:
    """Compute a basis `[matrices, count steps, rows]` of the Krylov space of `W W^T`, for each `W`.

    Its rows are orthonormal up to rounding, or zero where the space is exhausted: dependent start
    vectors, low rank, `count steps > rows`.

    Args:
        stacks: matrices `[batch, rows, cols]` each, of the same rows.
        start: vectors `[matrices, count, rows]` of the matrices of all stacks.
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
                # About 1 / ||W||, which keeps the powers of a cycle representable. That of a zero
                # matrix makes NaN here, and `extended` zeros of it again.
                scale = together([length(image, (-2, -1)) for image in products]).reciprocal_()
                square = scale.square()
                for image, factor in zip(products, apart(scale, stacks), strict=True):
                    image.mul_(factor)
            last = preimages(products, stacks).mul_(square)
            vectors.append(last)
    assert basis is not None
    return basis


def cycle(count: int) -> int:
    """Return the steps of `count` vectors between orthogonalisations, each by one program."""
    return max(1, min(CYCLE, VECTORS // count))


def extended(basis: Tensor | None, vectors: Tensor) -> Tensor:
    """Append what is new in `vectors` `[batch, count, rows]` to `basis`."""
    new = vectors.div_(length(vectors)).nan_to_num_(0, 0, 0)
    if basis is not None:
        for _ in range(2):
            new = torch.baddbmm(new, torch.bmm(new, basis.mT), basis, alpha=-1)
    new = orthonormal(new, DEPENDENT[vectors.dtype])
    return new if basis is None else torch.cat((basis, new), dim=1)


def orthonormal(x: Tensor, dependent: float) -> Tensor:
    """Orthonormalise the rows of `x` `[batch, count, n]`, at most of unit length, in float64.

    A row becomes zero where less than about the square root of `dependent` is left of it without
    those before it. By a Cholesky factor of the Gram matrix, which `dependent` keeps positive.
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
    """Normalise `x` `[..., n]` to unit length; zero stays zero."""
    return x / length(x).clamp_(min=torch.finfo(x.dtype).tiny).to(x.dtype)


def length(x: Tensor, dim: int | tuple[int, int] = -1) -> Tensor:
    """Compute norms along axes that remain, `[..., 1]` or `[..., 1, 1]`, float64."""
    # Summed in float64: squares of float32 overflow from 1.8e19 on and vanish below 1e-23.
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=torch.float64)
    return norm
