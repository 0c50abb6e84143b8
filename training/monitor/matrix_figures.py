"""Pure functions that compute metrics of stacked matrices, and aggregates over many units.

Metrics are computed in float64 from float32 values, so they do not depend on which rank computes
them. `Moments` are computed in blocks of a few million entries, so that metrics of a large
embedding take little memory. The singular values of weights come from a decomposition, because all
singular values are needed. Stable and nuclear ranks require only matmuls and are accurate to three
significant digits.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from models.pc_config import BLOCKS
from models.units import Unit
from spectral import measures
from spectral.batching import grouped
from spectral.device_values import is_known

ROOT_SHIFT = 1e-10
"""Fraction of a Gram matrix's trace that is added to the diagonal to keep the matrix positive
definite despite rounding."""
QUANTILES = 11
"""Number of singular value quantiles: 0, 10, ..., 100%."""

ATTENTION_INPUTS = ("q", "k", "v", "qkv", "q_a", "kv_a")
"""Roles whose matrices multiply the normalised residual stream before attention."""

PC_ROLES = (*BLOCKS, "gate_up")
"""Roles of the matrices that are averaged in figures 5 and 14 of the PC paper. The figures show
models with and without PC layers."""

EXTREMES = ("spectral_norm", "radius_error", "pc_norm_error", "multiplier_residual", "applied_rms")
"""Metrics for which the maximum over units is reported."""

QUANTILE_NAMES = ("quantiles", "effective_quantiles", "momentum_quantiles", "update_quantiles")
Figures = dict[str, Tensor]
Record = dict[str, Any]
"""Maps "role", "layer" and metric names to a unit's values."""


BLOCK: Final = 2**22
"""Maximum number of entries of a stack that are converted to float64 at a time. At least one row or
column of each matrix is converted."""


@dataclass(frozen=True)
class Moments:
    """Sums over the entries of matrices `[units, rows, cols]`, in float64.

    gram           `[units, n, n]`, the smaller of W W^T and W^T W
    total          `[units]`, sum of the entries
    off_diagonal   `[units]`, ||W^T W - Diag(W^T W)||_F^2
    entries        number of entries per matrix
    """

    gram: Tensor
    total: Tensor
    off_diagonal: Tensor
    entries: int

    def singular_values(self) -> Tensor:
        """Compute the singular values `[units, n]` in descending order."""
        return measures.eigenvalue_roots(self.gram)

    def mean_square(self) -> Tensor:
        """Compute the mean squared entry `[units]`."""
        return self.gram.diagonal(dim1=-2, dim2=-1).sum(-1) / self.entries

    def rms(self) -> Tensor:
        """Compute the root mean square `[units]` of the entries."""
        return self.mean_square().sqrt()

    def correlation(self) -> Tensor:
        """Estimate the correlation `[units]` of the entries. See `measures.correlation`."""
        return measures.correlation_of(self.total / self.entries, self.mean_square(), self.entries)


def moments(blocks: Iterable[Tensor], shape: Sequence[int]) -> Moments:
    """Compute the moments of matrices by summing over their float64 `blocks`, as yielded by
    `split`. `shape` is `[units, rows, cols]`."""
    _, rows, cols = shape
    if rows >= cols:
        gram, total = summed([x.mT @ x, x.sum((1, 2))] for x in blocks)
        off_diagonal = 2 * gram.triu(1).square().sum((1, 2))
    else:
        gram, total, fourth = summed(
            [x @ x.mT, x.sum((1, 2)), x.square().sum(1).square().sum(1)] for x in blocks
        )
        # The difference inherits the rounding error of its first term; treat differences below this
        # error as 0.
        whole = gram.square().sum((1, 2))
        present = whole - fourth > 4 * torch.finfo(whole.dtype).eps * whole
        off_diagonal = torch.where(present | whole.isnan(), whole - fourth, 0)
    return Moments(gram, total, off_diagonal, rows * cols)


def of_matrices(stack: Tensor) -> Moments:
    """Compute the moments of matrices `[units, rows, cols]`."""
    return moments((block.double() for block in split(stack)), stack.shape)


def split(stack: Tensor) -> Iterator[Tensor]:
    """Split matrices `[units, rows, cols]` into blocks of rows, or of columns if they are wide."""
    units, rows, cols = stack.shape
    size = max(1, BLOCK // (units * min(rows, cols)))
    yield from stack.split(size, 1 if rows >= cols else 2)


def cosine(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute the cosine `[units]` between the matrices of two stacks, given pairs of float64
    blocks. The cosine is 0 if either matrix is zero."""
    dot, one, other = summed(
        [(x * y).sum((1, 2)) for x, y in ((a, b), (a, a), (b, b))] for a, b in pairs
    )
    norms = one.sqrt() * other.sqrt()
    return torch.where(norms == 0, 0, dot / torch.where(norms == 0, 1, norms)).clamp(-1, 1)


def summed(terms: Iterable[list[Tensor]]) -> list[Tensor]:
    """Sum lists of tensors elementwise. The tensors of the first list are overwritten with the
    sums."""
    totals: list[Tensor] = []
    for sums in terms:
        if not totals:
            totals = sums
            continue
        for total, more in zip(totals, sums, strict=True):
            total += more
    return totals


def weight_figures(weight: Tensor) -> Figures:
    """Compute metrics `[units]` of weights `[units, rows, cols]`.

    `quantiles` `[units, 11]` are the singular value quantiles.
    """
    matrices = of_matrices(weight)
    values = matrices.singular_values()
    second = values[:, 1] if values.shape[1] > 1 else torch.zeros_like(values[:, 0])
    return {
        "spectral_norm": values[:, 0],
        "weight_rms": matrices.rms(),
        "stable_rank": measures.stable_rank_of(values),
        "effective_rank": measures.effective_rank_of(values),
        "condition_number": measures.modified_condition_number_of(values),
        "spectral_gap": (values[:, 0] - second) / values[:, 0],
        "off_diagonal_gram": matrices.off_diagonal,
        "correlation": matrices.correlation(),
        "quantiles": quantiles(values),
    }


def quantiles(values: Tensor) -> Tensor:
    """Compute the quantiles `[units, 11]` of singular values `[units, n]`."""
    steps = torch.linspace(0, 1, QUANTILES, dtype=values.dtype, device=values.device)
    return torch.quantile(values, steps, dim=1).T


def gradient_figures(gradient: Tensor, previous: Tensor | None) -> Figures:
    """Compute metrics `[units]` of mean gradients `[units, rows, cols]`.

    `previous` contains the gradients of the previous step; if None, the alignment is omitted.
    """
    sums = of_matrices(gradient)
    if is_known(gradient):
        nuclear_rank = measures.nuclear_rank_of(sums.singular_values())
    else:  # a decomposition would cause a host sync, so use only matmuls
        square = sums.mean_square() * sums.entries
        nuclear_rank = measures.ratio(measures.nuclear_norm(gradient).double().square(), square)
    figures = {
        "gradient_rms": sums.rms(),
        "gradient_nuclear_rank": nuclear_rank,
        "gradient_stable_rank": measures.stable_rank_of_gram(sums.gram),
    }
    if previous is not None:
        blocks = zip(split(gradient), split(previous), strict=True)
        figures["gradient_alignment"] = cosine((a.double(), b.double()) for a, b in blocks)
    return figures


def noise_figures(products: Tensor, what: str) -> Figures:
    """Compute noise metrics `[units]` from the inner products between samples, `[units, samples,
    samples]`.

    `what` is the kind of the samples, "gradient" or "update", and the prefix of the metric names.
    """
    noise = measures.noise_of(products)
    return {f"{what}_{name}": value for name, value in noise._asdict().items()}


def updates(weights: Sequence[Tensor], kept: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the float64 updates of consecutive steps, excluding weight decay, block by block. Each
    list contains one tensor per step: the same block of that step's update.

    weights  `[units, rows, cols]` before, between and after the steps
    kept     `[units, 1, 1]` per step, the factor 1 - lr * weight_decay
    """
    for parts in zip(*map(split, weights), strict=True):
        wide = [part.double() for part in parts]
        yield [new - old * k for old, new, k in zip(wide[:-1], wide[1:], kept, strict=True)]


def update_products(weights: Sequence[Tensor], kept: Sequence[Tensor]) -> Tensor:
    """Compute the inner products of the steps' updates, float64 `[units, steps, steps]`. For the
    arguments, see `updates`."""
    units, steps = len(weights[0]), len(kept)
    products = weights[0].new_zeros(units, steps, steps, dtype=torch.float64)
    for each in updates(weights, kept):
        flat = torch.stack(each, 1).flatten(2)
        products += flat @ flat.mT
    return products


def update_figures(weights: Sequence[Tensor], kept: Sequence[Tensor]) -> Figures:
    """Compute metrics `[units]` of the last update. For the arguments, see `updates`.

    If there is more than one update, the metrics include the alignment of the last two updates.
    """
    sums = moments((each[-1] for each in updates(weights[-2:], kept[-1:])), weights[0].shape)
    figures = {
        "applied_rms": sums.rms(),
        "update_stable_rank": measures.stable_rank_of_gram(sums.gram),
    }
    if len(kept) > 1:
        pairs = ((each[-1], each[-2]) for each in updates(weights[-3:], kept[-2:]))
        figures["update_alignment"] = cosine(pairs)
    return figures


def update_spectrum(weights: Sequence[Tensor], kept: Sequence[Tensor]) -> Figures:
    """Compute the singular value quantiles of the last update. For the arguments, see `updates`."""
    sums = moments((each[-1] for each in updates(weights[-2:], kept[-1:])), weights[0].shape)
    return {"update_quantiles": quantiles(sums.singular_values())}


def momentum_spectrum(momentum: Tensor) -> Figures:
    """Compute the singular value quantiles of momenta `[units, rows, cols]`."""
    return {"momentum_quantiles": quantiles(of_matrices(momentum).singular_values())}


def input_figures(gram: Tensor, tokens: Tensor) -> Figures:
    """Compute the stable rank `[]` and the root mean square `[]` of a weight's inputs.

    `gram` is the Gram matrix of the inputs, `[inputs, inputs]`. The inputs of the embedding are
    one-hot vectors, and `gram` is the diagonal `[rows]` of their Gram matrix. In this case, the
    only metric is the stable rank, 1 / (share of the most frequent token).
    """
    gram = gram.double()
    if gram.ndim == 1:
        return {"input_stable_rank": measures.stable_rank_of(gram.sqrt())}
    return {
        "input_stable_rank": measures.stable_rank_of_gram(gram),
        "input_rms": (gram.trace() / (tokens * len(gram))).sqrt(),
    }


def gram_root(gram: Tensor) -> Tensor:
    """Compute a float64 R `[inputs, inputs]` with R R^T = `gram` + 1e-10 tr(`gram`) I."""
    wide = gram.double()
    shift = ROOT_SHIFT * wide.trace()
    shifted = wide + torch.diag(torch.where(shift > 0, shift, 1).expand(len(wide)))
    factor: Tensor = torch.linalg.cholesky_ex(shifted).L
    return factor * (shift > 0)  # zero if all inputs are zero


def output_figures(weight: Tensor, root: Tensor) -> Figures:
    """Compute the stable rank `[]` of the outputs W A for the inputs A. `weight` is W `[rows,
    cols]`, and `root` is a root R of A A^T.

    W R has the same singular values as W A, but R is only `[cols, cols]`.
    """
    rows, cols = weight.shape
    if rows >= cols:
        gram = root.mT @ of_matrices(weight[None]).gram[0] @ root
    else:
        gram = measures.gram(weight.double() @ root)
    return {"output_stable_rank": measures.stable_rank_of_gram(gram)}


def pair(units: dict[str, Record]) -> None:
    """Compute the metrics that combine several units or measurements from several ranks, and add
    them to the records.

    The criterion compares the gradient of each weight with the input of the weight. The attention
    output projection is compared with the input of q, k and v, as in table 2 of "When do spectral
    gradient updates help in deep learning?".
    """
    attention = {
        record["layer"]: record["input_stable_rank"]
        for record in units.values()
        if record["role"] in ATTENTION_INPUTS and "input_stable_rank" in record
    }
    for record in units.values():
        if "radius" in record and "spectral_norm" in record:
            record["radius_error"] = record["spectral_norm"] / record["radius"] - 1
        if "pc_tracked_norm" in record and record.get("spectral_norm"):
            record["pc_norm_error"] = abs(record["pc_tracked_norm"] / record["spectral_norm"] - 1)
        if record["role"] == "o" and "input_stable_rank" in record:
            record["own_input_stable_rank"] = record["input_stable_rank"]
            record["input_stable_rank"] = attention[record["layer"]]
        if "gradient_nuclear_rank" in record and record.get("input_stable_rank"):
            ratio = record["gradient_nuclear_rank"] / record["input_stable_rank"]
            record["criterion_ratio"] = ratio


def is_figure(name: str, value: Any) -> bool:
    """Return whether a record entry is a number that can be averaged."""
    return name not in ("role", "layer", *QUANTILE_NAMES) and _finite(value)


def means(records: Iterable[Record], key: str) -> Iterable[tuple[tuple[Any, str], float]]:
    """Return a ((value of `key`, metric), mean) pair for every metric and every value of `key`."""
    values: dict[tuple[Any, str], list[float]] = {}
    for record in records:
        for name, value in record.items():
            if is_figure(name, value):
                values.setdefault((record[key], name), []).append(value)
    return ((group, sum(each) / len(each)) for group, each in values.items())


def global_figures(records: Iterable[Record], roles: Collection[str]) -> dict[str, float]:
    """Compute aggregate metrics over all units with a role in `roles`.

    condition_number/geometric_mean  GMCN of the PC paper: mean over whole matrices, with roles and
                                     layers weighted equally; for PC layers, PC(W) is used. Suffix
                                     /pc: only the paper's PC layers; /qkv: only q, k and v
    criterion_ratio/geometric_mean   mean of nr(G) / st(A)
    criterion_ratio/share            share of units with a ratio of at least 1
    spectral_norm/max, radius_error/max, pc_norm_error/max, multiplier_residual/max,
    applied_rms/max
    """
    inside = [record for record in records if record["role"] in roles]
    summary: dict[str, float] = {}
    for group, members in (("", roles), ("/pc", PC_ROLES), ("/qkv", ATTENTION_INPUTS)):
        chosen = [record for record in inside if record["role"] in members]
        places = grouped(chosen, lambda record: (record["layer"], record["role"]))
        means = [geometric_mean(map(condition_number, part)) for part in places.values()]
        summary[f"condition_number/geometric_mean{group}"] = geometric_mean(means)
    ratios = [record["criterion_ratio"] for record in inside if "criterion_ratio" in record]
    summary["criterion_ratio/geometric_mean"] = geometric_mean(ratios)
    if ratios:
        summary["criterion_ratio/share"] = sum(ratio >= 1 for ratio in ratios) / len(ratios)
    for name in EXTREMES:
        values = [abs(r[name]) for r in inside if _finite(r.get(name))]
        if values:
            summary[f"{name}/max"] = max(values)
    return {f"monitor/{name}": value for name, value in summary.items() if math.isfinite(value)}


def condition_number(record: Record) -> float:
    """Return the condition number of the whole matrix that a unit belongs to, or NaN if the
    condition number was not computed."""
    names = (
        f"{prefix}{of}condition_number" for prefix in ("effective_", "") for of in ("matrix_", "")
    )
    return next((record[name] for name in names if name in record), math.nan)


def geometric_mean(values: Iterable[float]) -> float:
    """Compute the geometric mean of all finite positive values, or NaN if there are none."""
    numbers = torch.tensor(list(values), dtype=torch.float64)
    return float(measures.global_modified_condition_number(numbers))


def block_extremes(blocks: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics `monitor/<metric>/max`: the maximum of each metric over all blocks."""
    largest: dict[str, float] = {}
    for figures in blocks.values():
        for name, value in figures.items():
            if _finite(value):
                key = f"monitor/{name}/max"
                largest[key] = max(value, largest.get(key, -math.inf))
    return largest


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


class WholeMatrices:
    """Collects units and yields each whole matrix once all of its rows have been added.

    A whole matrix stacks the rows of all units with the same parameter and role. Row order does not
    affect singular values.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        """`units` contains all units on the pipeline stage."""
        whole = {unit.name: unit for unit in units if unit.is_matrix}
        self.sizes = Counter((unit.parameter, unit.role) for unit in whole.values())
        self._rows: dict[tuple[str, str], dict[str, Tensor]] = {}

    def begin(self) -> None:
        """Drop rows collected in earlier steps."""
        self._rows.clear()

    def add(self, units: Iterable[Unit], weights: Tensor) -> Iterator[tuple[list[str], Tensor]]:
        """Add units with their `weights` `[units, rows, cols]`. For each whole matrix that is now
        complete, yield the names of its units, and the matrix `[rows, cols]`."""
        for unit, weight in zip(units, weights, strict=True):
            key = unit.parameter, unit.role
            if self.sizes[key] == 1:
                continue
            rows = self._rows.setdefault(key, {})
            rows[unit.name] = weight.clone()
            if len(rows) == self.sizes[key]:
                yield list(rows), torch.cat([*rows.values()])
                del self._rows[key]
