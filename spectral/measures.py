"""Statistics of weights, gradients and activations: ranks, condition numbers, noise.

All functions are batched: matrices are `[..., rows, cols]`, statistics `[...]`. Singular values are
computed by exact decomposition in at least float32. On a GPU this causes a host sync, so call these
functions only in logging steps; `correlation` may run in any step. Ranks, norms and correlations
are 0 for a zero matrix and NaN for a matrix that contains NaN. To compute several statistics of a
matrix, pass its singular values to the functions whose names end in `_of`. `stable_rank_of_gram`
and `nuclear_norm` use only matmuls and need no host sync.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .polar import msign
from .singular_triplets import cold_start

TOP_STEPS = 24
"""Number of block Krylov steps for finding the largest eigenvalue of a Gram matrix."""
POLAR_STEPS = 16
"""Number of msign steps needed to map singular values above 1e-6 of the Frobenius norm to 1."""


def singular_values(w: Tensor) -> Tensor:
    """Compute the descending singular values `[..., min(rows, cols)]`, in at least float32."""
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    finite = wide.isfinite().all(-1).all(-1)[..., None]
    values = torch.linalg.svdvals(torch.where(finite[..., None], wide, 0))
    return torch.where(finite, values, torch.nan)


def gram(w: Tensor) -> Tensor:
    """Compute the smaller of W W^T and W^T W in float64."""
    wide = w.double()
    return wide @ wide.mT if w.shape[-2] <= w.shape[-1] else wide.mT @ wide


def eigenvalue_roots(gram: Tensor) -> Tensor:
    """Compute the descending singular values `[..., n]` of W from `gram` = W W^T `[..., n, n]`."""
    finite = gram.isfinite().all(-1).all(-1)[..., None]
    values = torch.linalg.eigvalsh(torch.where(finite[..., None], gram, 0))
    return torch.where(finite, values.clamp_min(0).sqrt().flip(-1), torch.nan)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return numerator / denominator, or 0 where both are 0."""
    both = (numerator == 0) & (denominator == 0)
    return torch.where(both, 0, numerator / torch.where(both, 1, denominator))


def spectral_norm(w: Tensor) -> Tensor:
    """Compute the largest singular value `[...]` by a full decomposition."""
    return singular_values(w).amax(-1)


def stable_rank(w: Tensor) -> Tensor:
    """Compute ||W||_F^2 / ||W||_2^2 `[...]`, which lies between 1 and the rank."""
    return stable_rank_of(singular_values(w))


def stable_rank_of(values: Tensor) -> Tensor:
    """Compute the stable rank `[...]` from singular values `[..., n]`."""
    square = values.square()
    return ratio(square.sum(-1), square.amax(-1))


def stable_rank_of_gram(gram: Tensor) -> Tensor:
    """Compute the stable rank `[...]` of W from W W^T `[..., n, n]`, to a relative error of 1e-3.

    The stable rank is the trace divided by the largest eigenvalue. The eigenvalue is estimated from
    a Krylov space and never overestimated. The estimate's relative error is below 1e-6 if the two
    largest eigenvalues differ by at least 1%.
    """
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    top, _, _ = cold_start(gram.reshape(-1, *gram.shape[-2:]), steps=TOP_STEPS)
    return torch.where(trace.isfinite(), ratio(trace, top.reshape(trace.shape)), torch.nan)


def nuclear_norm(w: Tensor) -> Tensor:
    """Compute ||W||_* = <W, msign(W)> `[...]` in at least float32.

    The relative error is 1e-5. Singular values below 1e-6 of the Frobenius norm are ignored.
    """
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    direction = msign(wide, steps=POLAR_STEPS)
    norm: Tensor = torch.linalg.vecdot(wide.flatten(-2), direction.flatten(-2))
    return norm


def nuclear_rank(w: Tensor) -> Tensor:
    """Compute ||W||_*^2 / ||W||_F^2 `[...]`, which lies between the stable rank and the rank.

    Source: "When do spectral gradient updates help in deep learning?" (arXiv 2512.04299). The paper
    predicts that spectral steps help a block if the nuclear rank of its gradient exceeds the stable
    rank of its input activations.
    """
    return nuclear_rank_of(singular_values(w))


def nuclear_rank_of(values: Tensor) -> Tensor:
    """Compute the nuclear rank `[...]` from singular values `[..., n]`."""
    return ratio(values.sum(-1).square(), values.square().sum(-1))


def effective_rank(w: Tensor) -> Tensor:
    """Compute exp(entropy of the normalised singular values) `[...]` (Roy and Vetterli, 2007)."""
    return effective_rank_of(singular_values(w))


def effective_rank_of(values: Tensor) -> Tensor:
    """Compute the effective rank `[...]` from singular values `[..., n]`."""
    total = values.sum(-1, keepdim=True)
    share = ratio(values, total)
    rank = torch.special.entr(share).sum(-1).exp()
    return torch.where(total[..., 0] == 0, 0, rank)


def modified_condition_number(w: Tensor) -> Tensor:
    """Compute sigma_1 divided by the mean of the smallest tenth of the singular values, `[...]`.

    The result is at least 1, inf if all of the smallest values are 0, and NaN for a zero matrix.
    Source: "PC Layer", kappa tilde.
    """
    return modified_condition_number_of(singular_values(w))


def modified_condition_number_of(values: Tensor) -> Tensor:
    """Compute the modified condition number `[...]` from descending singular values `[..., n]`."""
    return values[..., 0] / values[..., -values.shape[-1] // 10 :].mean(-1)


def global_modified_condition_number(numbers: Tensor) -> Tensor:
    """Compute the geometric mean `[]` of the finite positive modified condition numbers.

    `numbers` may have any shape. The mean is NaN if no number is finite and positive. Source: "PC
    Layer", which defines GMCN as the mean over the q, k, v, o, gate, up and down matrices of all
    layers, using the effective weights of PC layers.
    """
    usable = numbers.isfinite() & (numbers > 0)
    logs = torch.where(usable, numbers, 1).log()
    return (logs.sum() / usable.sum()).exp()


class Noise(NamedTuple):
    """Signal and noise statistics of M gradients, each `[...]`; see `noise_of`."""

    snr: Tensor  # signal / noise
    signal_share: Tensor  # signal / (signal + noise) = snr / (1 + snr), the paper's A
    top_share: Tensor  # lambda_1(Sigma) / tr(Sigma); at least 1 / (M - 1) by construction


def noise_of(products: Tensor) -> Noise:
    """Estimate signal and noise of M gradients from their inner products `[..., M, M]`.

    Let m be the mean of the gradients. noise = sum |g_i - m|^2 / (M - 1) estimates tr(Sigma), and
    |m|^2 - noise / M estimates |mu|^2; both are unbiased. signal is the estimate of |mu|^2, clipped
    at 0. The top share is computed from the centred Gram matrix. The signal-to-noise ratio is
    proportional to the micro-batch size, and the top share is at least 1 / (M - 1), so report the
    micro-batch size and M along with these estimates. A ratio of 0 / 0 is set to 0.

    Source: "Learning in Transformers under Spectral Constraints", appendix B. The estimators are
    not from the paper. Raises ValueError for fewer than two gradients.
    """
    count = products.shape[-1]
    if count < 2:
        raise ValueError(
            f"products must have shape [..., M, M] with M >= 2, got {list(products.shape)}"
        )
    row, total = products.mean(-1), products.mean((-2, -1))  # <g_i, m> and |m|^2
    centred = products - row[..., :, None] - row[..., None, :] + total[..., None, None]
    centred = centred / (count - 1)
    noise = centred.diagonal(dim1=-2, dim2=-1).sum(-1)
    signal = (total - noise / count).clamp_min(0)
    finite = noise.isfinite()
    top = torch.linalg.eigvalsh(torch.where(finite[..., None, None], centred, 0))[..., -1]
    return Noise(
        snr=ratio(signal, noise),
        signal_share=ratio(signal, signal + noise),
        top_share=torch.where(finite, ratio(top.clamp_min(0), noise), torch.nan),
    )


def correlation(w: Tensor) -> Tensor:
    """Estimate the correlation rho <= 1 `[...]` between the entries of W.

    rho = (m n mean(W)^2 - mean(W^2)) / ((m n - 1) mean(W^2)). The estimator is unbiased under the
    model W_ij = sigma (sqrt(rho) Z + sqrt(1 - rho) Phi_ij). However, one matrix is a single draw of
    Z, so even for a large matrix the estimate scatters like the square of a Gaussian. The estimate
    only detects spikes with constant entries. It is 0 for a zero matrix and for a 1 x 1 matrix.
    Source: "Towards a Principled Muon under muP", eq. 4.13.
    """
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    size = w.shape[-2] * w.shape[-1]
    return correlation_of(wide.mean((-2, -1)), wide.square().mean((-2, -1)), size)


def correlation_of(mean: Tensor, square: Tensor, size: int) -> Tensor:
    """Estimate the correlation `[...]` from the mean and mean square `[...]` of `size` entries."""
    return ratio(size * mean.square() - square, max(1, size - 1) * square) * (size > 1)
