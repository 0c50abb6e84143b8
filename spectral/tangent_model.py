"""Small model of `f(lambda) = <u v^T, msign(M + lambda u v^T)>`, valid for every lambda.

With `w = M v` and `N = M - w v^T`, so that `N v = 0`,

    (M + lambda u v^T) (M + lambda u v^T)^T = N N^T + y y^T,    y = w + lambda u.

Only the rank-one term depends on lambda. Expanding msign's odd polynomial in partial fractions,
`p(s) ~ sum_j c_j s / (s^2 + t_j^2)`, and applying Sherman-Morrison gives

    f(lambda) = sum_j c_j u^T R_j y / (1 + y^T R_j y),    R_j = (N N^T + t_j^2)^-1,

which is explicit once the 2 x 2 matrices `[u, w]^T R_j [u, w]` are known. These matrices are
computed from a projection of `N N^T` onto the rational Krylov space of a few resolvents. The
projection approximates the resolvents at all other shifts to 1e-4 or better, for any number of
rows. See docs/numerics.md for measurements.

Resolvents are applied by solving stacks of positive definite systems with few right-hand sides,
without a host sync. The systems are factorised and solved with block matmuls, so the number of
launches grows with the number of rows but not with the number of systems.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import kernels
from .batching import concat, images, preimages, split_like
from .device_values import constant, constant_result, is_known
from .kernels.dispatch import device_name, small_problem
from .kernels.library import product_flops
from .polar import CACHE_ELEMENTS, Coefficients, workspace_units
from .singular_triplets import DEPENDENT, orthonormal, unit

NODES = 48
RIDGE = 1e-13
GRID = (2, 512)
"""Number of rounds in the root search, and number of grid intervals per round."""
CPU_GRID = (6, 8)
"""Reaches the same resolution as `GRID` with 54 instead of 1,026 evaluations of f."""

DIRECT_ROWS = 32
"""Largest number of rows for which the model uses `N N^T` itself instead of a projection."""
SQUARED_ROWS = 64
"""Largest number of rows for which the model for a 16-bit msign projects `N N^T` instead of N. This
saves a pass over M; in float16, it increases the errors of f on recorded momenta from 1e-5 to at
most 6e-5."""
WIDE_ROWS = 256
"""Largest number of rows for which the model for an msign in 32 bits or more computes `N N^T` and
its resolvents in float64, which preserves singular values below 3e-4 of the largest. On GPUs with
fast float64, the model uses float64 for any number of rows. In 16 bits, f is not accurate enough to
need float64."""
FAST_DOUBLES = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities of GPUs whose float64 matmuls take at most about twice as long as float32
matmuls: P100, V100, A100, H100 and H200, B200. On all other GPUs (consumer cards, L40S, B300),
float64 matmuls take 30 to 64 times as long."""


class Space(NamedTuple):
    """A rational Krylov space of `N N^T`, generated from `[u, w]`."""

    shifts: tuple[float, ...]  # t of each resolvent, as a fraction of the Frobenius norm
    resolvents: int = 1  # number of powers per resolvent
    products: int = 0  # number of powers of N N^T itself


EXACT = Space((10**-1.7, 10**-3.1), 5, 3)
"""Two shifts with five powers each are as accurate as ten shifts with one power each, and take two
factorisations instead of ten; see docs/numerics.md for measurements."""
SPACES = {
    torch.bfloat16: Space((10**-2.8,), 5, 3),
    torch.float16: Space((1e-2, 1e-3), 4, 4),
    torch.float32: EXACT,
    torch.float64: EXACT,
}
"""Krylov space for each dtype of the matmuls in msign. A resolvent requires a factorisation;
further powers of the resolvent are cheap."""
SYSTEM_ELEMENTS = 3 << 27
"""Number of shifted-system elements to solve at a time on devices not listed in `CACHE_ELEMENTS`:
3 GiB in float64, or both systems of 48 matrices with 2,048 rows."""


TRIANGLE, CPU_TRIANGLE = 512, 256
"""Number of rows per block when only half of a symmetric product is computed. Smaller blocks need
fewer FLOPs but more launches."""


class Model(NamedTuple):
    """Rational functions of `mu = lambda - centre` for a batch of problems, in float64.

    `centre` is `-u^T M v`. At `lambda = centre`, `y` is orthogonal to `u`, so no terms cancel near
    the centre.
    """

    block: Tensor  # [3, batch, nodes], entries uu, uq, qq of [u, q]^T R_j [u, q], q = y at centre
    weight: Tensor  # [batch, nodes], scaled residues c_j
    centre: Tensor  # [batch]
    half: Tensor  # [batch], the bracket: |mu| <= half at the root
    norm: Tensor  # [batch], Frobenius norm of M


@constant_result
def partial_fractions(
    steps: tuple[Coefficients, ...],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Fit residues and nodes `(c, t)` of `p(s) ~ sum_j c_j s / (s^2 + t_j^2)` on [0, 1].

    The fit is a float64 ridge regression on a logarithmic grid. With eight steps, the maximum error
    is 2.5e-5 for polar_express and 7e-4 for polar_express_upstream. Oscillating schedules are
    smoothed by the fit.
    """
    logspace = partial(torch.logspace, dtype=torch.float64, device="cpu")
    s = torch.cat((logspace(-7, -4.5, 200), logspace(-4.5, 0, 1500)))
    value = s
    for a, b, c in steps:
        value = value * (a + value.square() * (b + c * value.square()))
    t = logspace(-5.5, 0.5, NODES)
    basis = t * s[:, None] / (s[:, None].square() + t.square())
    gram = basis.mT @ basis / len(s) + RIDGE * torch.eye(NODES, device="cpu").to(t)
    residues = t * torch.linalg.solve(gram, basis.mT @ value / len(s))
    return tuple(residues.tolist()), tuple(t.tolist())


def build(
    stacks: Sequence[Tensor],
    u: Tensor,
    v: Sequence[Tensor],
    steps: tuple[Coefficients, ...],
    dtype: torch.dtype,
) -> Model:
    """Build a model for each matrix `M` in the stacks, projected onto the Krylov space of `M`.

    Args:
        stacks: tensors `[batch, rows, cols]`, `rows <= cols`, with equal row counts.
        u: `[matrices, rows]`, one vector of length 1 or 0 per matrix in all stacks.
        v: `[batch, cols]` for each stack, one vector of length 1 or 0 per matrix.
        steps, dtype: msign's coefficients and the dtype of its matmuls.
    """
    rows, device = stacks[0].shape[1], stacks[0].device
    u, v = unit(u.double()), [unit(vectors.double()) for vectors in v]
    wide = is_wide(rows, dtype, device)
    if wide:
        gram, w = _gram(stacks, v)
    else:  # in the dtype of M
        along = [vectors.to(m.dtype)[:, None] for m, vectors in zip(stacks, v, strict=True)]
        image = preimages(along, stacks)  # M v, [matrices, 1, rows]
        gram = _grams(stacks).baddbmm_(image.mT, image, alpha=-1)
        w = image[:, 0].double()
    centre = -(u * w).sum(-1)
    q = torch.addcmul(w, centre[:, None], u)
    norm = concat([torch.linalg.vector_norm(m, dim=(-2, -1)) for m in stacks]).double()
    square = norm.square()
    # msign divides by ||M + lambda Theta||_F; near the root, lambda is close to the centre.
    scale = torch.maximum(square - centre.square(), 1e-6 * square).sqrt()
    scale = scale.masked_fill(scale == 0, 1)
    pair = torch.stack((u, q), dim=1)  # [matrices, 2, rows]
    # In an orthonormal basis: N N^T as `small` `[matrices, size, size]`, and the columns u and q.
    if rows <= DIRECT_ROWS:
        small, columns = gram, pair.mT
    else:
        most = max(rows * m.shape[2] for m in stacks)
        basis = _basis(gram, unit(pair), scale, SPACES[dtype], most)
        if wide or rows <= SQUARED_ROWS:
            small = basis @ gram.double() @ basis.mT
        else:
            del gram  # free it before the matmuls with M
            small = _projected(stacks, v, w, basis)
        columns = basis @ pair.mT  # [matrices, size, 2]
    # |lambda* - centre| <= hypot(centre, p + |q|), by pinching, with p^2 = u^T N N^T u.
    first = columns[:, :, :1]
    p = (first.mT @ small @ first)[:, 0, 0].clamp(min=0).sqrt()
    reach = p + torch.linalg.vector_norm(q, dim=-1)
    residues, nodes = (constant(x, torch.float64, device) for x in partial_fractions(steps))
    return Model(
        block=_blocks(small, columns, (scale[:, None] * nodes).square()),
        weight=scale[:, None] * residues,
        centre=centre,
        half=torch.hypot(centre, reach),
        norm=norm,
    )


def is_wide(rows: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the model for an msign in `dtype` computes `N N^T` and resolvents in float64.

    Up to `DIRECT_ROWS` rows, there is no projection, and squaring in float32 would lose accuracy.
    """
    exact = torch.finfo(dtype).bits >= 32 and (rows <= WIDE_ROWS or has_fast_doubles(device))
    return exact or rows <= DIRECT_ROWS


@constant_result
def has_fast_doubles(device: torch.device) -> bool:
    """Return whether float64 matmuls take at most about twice as long as float32 matmuls."""
    if device.type == "cuda":
        return tuple(torch.cuda.get_device_capability(device)) in FAST_DOUBLES
    return device.type != "cpu"


def _gram(stacks: Sequence[Tensor], v: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Compute `N N^T` and `M v` in float64, for float64 unit vectors `v`, chunk by chunk.

    `N N^T` is only positive semidefinite if `N N^T` and `M v` are computed from the same float64 M
    and an exact unit vector.
    """
    rows = stacks[0].shape[1]
    gram = v[0].new_empty(sum(map(len, stacks)), rows, rows)
    products = []
    for m, along, result in zip(stacks, v, split_like(gram, stacks), strict=True):
        size = workspace_units(m.shape[1:].numel(), m.device)
        chunks = (torch.split(x, size) for x in (m, along, result))
        for part, vectors, out in zip(*chunks, strict=True):
            wide = part.double()
            products.append(torch.bmm(wide, vectors[:, :, None])[:, :, 0])
            _write_upper(wide, out)
    image = concat(products)
    return _mirrored(gram).baddbmm_(image[:, :, None], image[:, None], alpha=-1), image


def _grams(stacks: Sequence[Tensor]) -> Tensor:
    """Compute `M M^T` with `kernels.gram`, or by upper-triangle blocks if that is faster."""
    rows = stacks[0].shape[1]
    if len(_triangle(rows, stacks[0].device)) == 1 or kernels.mirrors(stacks):
        return kernels.gram(*stacks)
    gram = stacks[0].new_empty(sum(map(len, stacks)), rows, rows)
    for m, out in zip(stacks, split_like(gram, stacks), strict=True):
        _write_upper(m, out)
    return _mirrored(gram)


def _triangle(rows: int, device: torch.device) -> list[slice]:
    """Return the row ranges in which the upper triangle of a product is computed."""
    return blocks_of(rows, CPU_TRIANGLE if device.type == "cpu" else TRIANGLE)


def _write_upper(m: Tensor, out: Tensor) -> None:
    """Write the blocks of `M M^T` on and above the diagonal into `out`."""
    for part in _triangle(m.shape[1], m.device):
        out[:, part, part.start :].baddbmm_(m[:, part], m[:, part.start :].mT, beta=0)


def _mirrored(gram: Tensor) -> Tensor:
    """Mirror the blocks above the diagonal across the diagonal."""
    for part in _triangle(gram.shape[1], gram.device)[:-1]:
        gram[:, part.stop :, part] = gram[:, part, part.stop :].mT
    return gram


def _basis(gram: Tensor, pair: Tensor, scale: Tensor, space: Space, elements: int) -> Tensor:
    """Compute a float64 orthonormal basis `[batch, size, rows]` of the rational Krylov space.

    The space is spanned by `pair` `[batch, 2, rows]` and its products with powers of `gram` and of
    the resolvents. Linearly dependent rows are zero. Systems are solved in batches of at most
    `elements` elements, or the device's limit if this limit is larger.
    """
    rows, shifts = gram.shape[1], space.shifts
    squares = scale[:, None] * constant(shifts, torch.float64, gram.device)
    squares = squares.square_().to(gram.dtype)
    start = pair.to(gram.dtype)
    least = CACHE_ELEMENTS.get(gram.device.type, SYSTEM_ELEMENTS)
    limit = max(elements, least) // rows**2
    units, count = max(1, limit // len(shifts)), min(len(shifts), limit)
    solutions = []
    for part, vectors, square in zip(
        *(torch.split(x, units) for x in (gram, start, squares)), strict=True
    ):
        for some in torch.split(square, count, dim=1):
            k = part[:, None].repeat(1, some.shape[1], 1, 1)
            k.diagonal(dim1=-2, dim2=-1).add_(some[:, :, None])
            factor = factorized_(k.flatten(0, 1))
            first = vectors.repeat_interleave(some.shape[1], dim=0)
            powers = _powers(partial(solve, factor), first, space.resolvents)
            solutions.append(powers.reshape(len(part), -1, rows))
            del k, factor  # free them before the next systems
    split = -(-len(shifts) // count)
    parts = [concat(solutions[i : i + split], 1) for i in range(0, len(solutions), split)]
    products = _powers(partial(torch.bmm, mat2=gram), start, space.products)
    vectors = torch.cat((pair, concat(parts), products), dim=1)
    # Vectors from neighbouring shifts are nearly parallel: a second pass recovers lost digits.
    for _ in range(2):
        vectors = orthonormal(vectors, DEPENDENT[torch.float64])
    return vectors


def _powers(operator: Callable[[Tensor], Tensor], start: Tensor, count: int) -> Tensor:
    """Apply `operator` to `start` `[batch, 2, rows]` `count` times, and return all powers.

    The result `[batch, 2 count, rows]`, float64, consists of unit vectors. All powers but the last
    are orthogonalised against lower powers to keep the powers distinct.
    """
    vectors = unit(operator(start if count else start[:, :0]).double())
    for _ in range(1, count):
        vectors = orthonormal(vectors, DEPENDENT[torch.float64])
        new = operator(vectors[:, -2:].to(start.dtype)).double()
        vectors = torch.cat((vectors, unit(new)), dim=1)
    return vectors.nan_to_num_(0, 0, 0)  # indefinite systems yield NaN


def _projected(stacks: Sequence[Tensor], v: Sequence[Tensor], w: Tensor, basis: Tensor) -> Tensor:
    """Compute `Q N N^T Q^T` `[matrices, size, size]` in float64 from `Q N` in the dtype of M.

    Only the small matmuls square the singular values, so small singular values do not lose digits.
    """
    kind = stacks[0].dtype
    q = basis.to(kind)
    image = torch.bmm(q, w.to(kind)[:, :, None])
    products = []
    parts = zip(images(q, stacks), split_like(image, stacks), v, strict=True)
    for product, part, along in parts:
        wide = product.baddbmm_(part, along.to(kind)[:, None], alpha=-1).double()
        products.append(torch.bmm(wide, wide.mT))
    return concat(products)


def _blocks(gram: Tensor, pair: Tensor, shift: Tensor) -> Tensor:
    """Compute entries uu, uq, qq of `[u, q]^T (T + shift)^-1 [u, q]`, `[3, batch, nodes]`.

    T is `gram` `[batch, size, size]`, and `pair` `[batch, size, 2]` holds u and q; all float64.
    """
    if is_known(shift):  # on a GPU, an eigensolver would cause a host sync
        values, vectors = torch.linalg.eigh(gram.nan_to_num(0, 0, 0))
        u, q = (vectors.mT @ pair).unbind(-1)
        inverse = (values.clamp(min=0)[:, :, None] + shift[:, None]).reciprocal_()
        return torch.bmm(torch.stack((u * u, u * q, q * q), dim=1), inverse).transpose(0, 1)
    batch, nodes = shift.shape
    k = gram[:, None].repeat(1, nodes, 1, 1)
    k.diagonal(dim1=-2, dim2=-1).add_(shift[:, :, None])
    factor = torch.linalg.cholesky_ex(k).L
    pairs = pair[:, None].expand(-1, nodes, -1, -1)
    x = torch.linalg.solve_triangular(factor, pairs, upper=False)
    block = x.mT @ x  # [batch, nodes, 2, 2]
    return torch.stack((block[..., 0, 0], block[..., 0, 1], block[..., 1, 1]))


def value(model: Model, offset: Tensor) -> Tensor:
    """Evaluate f at `mu = offset`. f and `offset` are `[batch, points]`."""
    uu, uq, qq = model.block[:, :, None]  # each [batch, 1, nodes]
    mu = offset[:, :, None]
    numerator = torch.addcmul(uq, mu, uu)
    denominator = torch.addcmul(qq + 1, mu, numerator + uq)
    return torch.bmm(numerator.div_(denominator), model.weight[:, :, None])[:, :, 0]


def root(model: Model) -> tuple[Tensor, Tensor]:
    """Find the root `mu` `[batch]` of f in the bracket, and f's slope `[batch]` near it.

    f never decreases, so a few rounds on successively finer grids bracket the root. Within the last
    interval, f is interpolated linearly.
    """
    if small_problem(model.weight.shape[-1], device_name(model.weight.device)):
        from .kernels import small

        return small.root(model.block, model.weight, model.half, *GRID)
    rounds, points = CPU_GRID if model.half.device.type == "cpu" else GRID
    fractions = torch.linspace(0, 1, points + 1, dtype=torch.float64, device=model.half.device)
    low, width = -model.half[:, None], 2 * model.half[:, None]
    for _ in range(rounds):
        f = value(model, torch.addcmul(low, width, fractions))
        last = (f <= 0).sum(-1, keepdim=True).clamp(1, points)
        width = width / points
        low = torch.addcmul(low, width, last - 1)
    f_low, f_high = f.gather(1, last - 1), f.gather(1, last)
    rise = f_high - f_low
    fraction = (-f_low / rise.masked_fill(rise <= 0, 1)).clamp(0, 1)
    slope = rise / width.masked_fill(width == 0, 1)
    return torch.addcmul(low, fraction, width)[:, 0], slope[:, 0]


BLOCK = 256
"""Number of rows per block, except on CPU (see `block_rows`). Larger blocks need fewer launches;
smaller blocks leave fewer rows to the library's slow factorisation. With blocks of 128, 256, 512
and 1,024 rows, an H200 factorises and solves 48 float64 systems of 2,048 rows in 11.0, 9.9, 14.0
and 22.8 ms (library: 24.6 ms). With blocks of 128 and 256 rows, it factorises and solves 48 systems
of 512 rows in 1.4 and 1.5 ms (library: 1.6 ms). These times were measured with one matmul per pair
of blocks."""
JOINED = 4
"""Number of consecutive blocks to join for `solve`, except on CPU. Systems of up to 1,024 rows are
then solved in two launches. For 2,048 rows, the joined inverses take a quarter of the factor's
FLOPs and half its memory."""


class Block(NamedTuple):
    """A row block of the Cholesky factors L of a stack of systems `K = L L^T`."""

    rows: slice
    inverse: Tensor  # [batch, size, size], of the diagonal block
    left: Tensor  # [batch, size, rows above it], L left of the diagonal block
    below: Tensor  # [batch, rows below it, size], L below the diagonal block


def blocks_of(rows: int, size: int = BLOCK) -> list[slice]:
    """Return the row ranges in which systems with `rows` rows are factorised."""
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def block_rows(rows: int, device: torch.device) -> int:
    """Return the number of rows per block for systems with `rows` rows.

    With blocks of 64, 128 and 256 rows, a single thread on an Intel Xeon with AVX-512 factorises a
    float32 system of 256 rows in 0.29, 0.42 and 0.55 ms (library: 0.32 ms). With the same block
    sizes, a system of 1,024 rows with five solves takes 7.7, 6.6 and 7.2 ms (library: 20 ms).
    """
    if device.type != "cpu":
        return BLOCK
    return 64 if rows < 512 else 128


def joined_blocks(device: torch.device) -> int:
    """Return the number of consecutive blocks to join into one block for `solve`."""
    return 1 if device.type == "cpu" else JOINED


def factorized_(k: Tensor) -> list[Block]:
    """Factorise symmetric positive definite `k` `[batch, n, n]` in place, for `solve`.

    Only the upper triangle is read; the lower triangle is overwritten with L. If rounding makes a
    system indefinite, its solutions are meaningless and possibly nonfinite, but other systems are
    not affected.
    """
    rows = k.shape[-1]
    parts = blocks_of(rows, block_rows(rows, k.device))
    identity = torch.eye(parts[0].stop, dtype=k.dtype, device=k.device)
    blocks = []
    for part in parts:
        left, below = k[:, part, : part.start], k[:, part.stop :, part]
        if part.start:  # subtract the contribution of earlier columns in a single matmul
            before = k[:, part.start :, : part.start]
            k[:, part, part.start :].baddbmm_(left, before.mT, alpha=-1)
        inverse = _inverse_factor(k[:, part, part], identity)
        if part.stop < rows:
            torch.bmm(k[:, part, part.stop :].mT, inverse.mT, out=below)
        blocks.append(Block(part, inverse, left, below))
    count = joined_blocks(k.device)
    return [_joined(k, blocks[i : i + count]) for i in range(0, len(blocks), count)]


def solve(factor: Sequence[Block], x: Tensor) -> Tensor:
    """Return the solution Y of `Y K = X`, with `x` and Y `[batch, vectors, n]`."""
    y, z = torch.empty_like(x), torch.empty_like(x)
    for rows, inverse, left, _ in factor:
        right = x[:, :, rows]
        if rows.start:
            right = torch.baddbmm(right, z[:, :, : rows.start], left.mT, alpha=-1)
        torch.bmm(right, inverse.mT, out=z[:, :, rows])
    for rows, inverse, _, below in reversed(factor):
        right = z[:, :, rows]
        if below.shape[1]:
            right.baddbmm_(y[:, :, rows.stop :], below, alpha=-1)
        torch.bmm(right, inverse, out=y[:, :, rows])
    return y


def _joined(k: Tensor, blocks: Sequence[Block]) -> Block:
    """Join consecutive blocks of the factor in `k` into a single block."""
    if len(blocks) == 1:
        return blocks[0]
    rows = slice(blocks[0].rows.start, blocks[-1].rows.stop)
    size = rows.stop - rows.start
    joined = k.new_zeros(len(k), size, size)
    for part, inverse, left, _ in blocks:
        first = part.start - rows.start
        here = slice(first, part.stop - rows.start)
        joined[:, here, here] = inverse
        if first:
            across = torch.bmm(left[:, :, rows.start :], joined[:, :first, :first])
            joined[:, here, :first].baddbmm_(inverse, across, beta=0, alpha=-1)
    return Block(rows, joined, k[:, rows, : rows.start], k[:, rows.stop :, rows])


def _inverse_factor(k: Tensor, identity: Tensor) -> Tensor:
    """Compute `L^-1` of the Cholesky factors `L` of `k` `[batch, n, n]`.

    `identity` has at least n rows.
    """
    # cholesky_ex does no check that would require a host sync; it only reads the upper triangle.
    factor = torch.linalg.cholesky_ex(k, upper=True).L
    n = k.shape[-1]
    inverse: Tensor = torch.linalg.solve_triangular(
        factor.mT, identity[:n, :n].expand_as(factor), upper=False
    )
    return inverse


def tangent_cost(
    short: int, long: int, *, evaluations: float, msign: float, dtype: torch.dtype
) -> float:
    """Return the FLOPs of a tangent solve: the model's FLOPs plus `evaluations` times `msign`.

    Building the model requires a Gram matrix, one factorisation per shift, and a projection onto
    the model's basis. `dtype` is the dtype of the matmuls in msign.
    """
    shifts, resolvents, products = SPACES[dtype]
    model = gram_cost(short, long) + len(shifts) * factorization_cost(short)
    vectors = 2 * (len(shifts) * resolvents + products)
    model += product_flops(vectors, short, short) + product_flops(2 + vectors, short, long)
    return model + evaluations * msign


def factorization_cost(rows: int) -> float:
    """Return the FLOPs of factorising a positive definite matrix in blocks."""
    total = 0.0
    for part in blocks_of(rows):
        size, rest = part.stop - part.start, rows - part.stop
        # A Cholesky factor costs 1/6 of a matmul; its inverse by triangular solve costs 1/2.
        total += product_flops(size, size, size) * 2 / 3
        total += product_flops(size, part.start, rows - part.start)
        total += product_flops(size, size, rest)
        joined = part.start % (JOINED * BLOCK)  # earlier rows in the same joined block
        total += product_flops(size, joined, joined) + product_flops(size, size, joined)
    return total


def gram_cost(rows: int, cols: int) -> float:
    """Return the FLOPs of a symmetric product of which only half is computed."""
    parts = blocks_of(rows, TRIANGLE)
    return sum(product_flops(part.stop - part.start, cols, rows - part.start) for part in parts)
