"""Off-diagonal Gram penalty, which is zero if the columns (or rows) of a weight are orthogonal.

Source: "Learning in Transformers under Spectral Constraints", section 6, eq. 2 and appendix D. With
C the off-diagonal part of W^T W, E = ||C||_F^2 has gradient 4 W C. The paper uses both E and its
square root (lemma D.6) as penalties; `power` selects between them. `normalize` makes penalty
coefficients comparable across widths. Add either the penalty to the loss, or the penalty's gradient
to the loss's gradient.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from .effective_weight import differentiable_once, wide_matrices

Side = Literal["in", "out"]
Normalize = Literal["frobenius", "size"]


def gram_penalty_and_grad(
    w: Tensor, *, power: int = 2, side: Side = "in", normalize: Normalize | None = None
) -> tuple[Tensor, Tensor]:
    """Compute each matrix's penalty `[...]`, and the gradient of this penalty, without a graph.

    If the Gram matrix of the other side is smaller, E is computed from that matrix as ||W W^T||_F^2
    - sum_j |w_j|^4. Differences below the rounding error of the first term are set to zero. The
    penalty and gradient of a zero matrix are zero. Half-precision inputs are upcast to float32.

    Args:
        w: `[..., rows, cols]`; the gradient has the same shape and dtype.
        power: 2 for E / N, 1 for sqrt(E / N). Where E = 0, the gradient of the square root is set
            to zero (a subgradient).
        side: "in" for the Gram matrix W^T W of the columns (`cols` inputs), "out" for W W^T.
        normalize: N is 1 (None), ||W||_F^4 ("frobenius") or n (n - 1) for an n x n Gram matrix
            ("size").

    Raises:
        ValueError: if an option or the shape or dtype of `w` is not supported.
    """
    with torch.no_grad():
        wide = wide_matrices(w)
        if power not in (1, 2):
            raise ValueError(f"power must be 1 or 2, got {power}")
        if side not in ("in", "out"):
            raise ValueError(f"side must be 'in' or 'out', got {side!r}")
        if normalize not in (None, "frobenius", "size"):
            raise ValueError(f"normalize must be None, 'frobenius' or 'size', got {normalize!r}")
        oriented = wide if side == "in" else wide.mT  # E uses the columns' Gram matrix
        value, grad = _energy(oriented)
        grad = 4 * grad
        if normalize == "size":
            n = oriented.shape[-1]
            # A single column has no off-diagonal entries: value and gradient are already zero.
            value, grad = value / max(1, n * (n - 1)), grad / max(1, n * (n - 1))
        elif normalize == "frobenius":
            norm = oriented.square().sum((-2, -1))
            safe = torch.where(norm > 0, norm, 1)
            value = value / safe.square()
            # d (E / N) = dE / N - (E / N) dN / N with N = norm^2 and dN / N = 4 W / norm
            grad = grad / safe.square()[..., None, None]
            grad = grad - (4 * value / safe)[..., None, None] * oriented
        if power == 1:
            value = value.sqrt()
            divisor = torch.where(value > 0, 2 * value, torch.inf)
            grad = grad / divisor[..., None, None]
        return value.to(w.dtype), (grad if side == "in" else grad.mT).to(w.dtype)


def _energy(w: Tensor) -> tuple[Tensor, Tensor]:
    """Compute E = ||C||_F^2 `[...]` and W C `[..., rows, cols]` from the smaller Gram matrix."""
    if w.shape[-2] >= w.shape[-1]:
        c = w.mT @ w
        c.diagonal(dim1=-2, dim2=-1).zero_()
        return c.square().sum((-2, -1)), w @ c
    gram = w @ w.mT
    lengths = w.square().sum(-2)  # [..., cols], |w_j|^2
    total = gram.square().sum((-2, -1))
    energy = total - lengths.square().sum(-1)
    present = energy > 4 * torch.finfo(w.dtype).eps * total
    product = gram @ w - w * lengths[..., None, :]
    return (torch.where(present, energy, 0), torch.where(present[..., None, None], product, 0))


class _GramPenalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, power: int, side: Side, normalize: Normalize | None) -> Tensor:
        value, grad = gram_penalty_and_grad(w, power=power, side=side, normalize=normalize)
        ctx.save_for_backward(w, grad)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        w, closed_form = ctx.saved_tensors
        out = grad[..., None, None] * closed_form
        return differentiable_once(out, "gram_penalty", w, grad), None, None, None


def gram_penalty(
    w: Tensor, *, power: int = 2, side: Side = "in", normalize: Normalize | None = None
) -> Tensor:
    """Compute the once-differentiable penalty `[...]` of each matrix in `w` `[..., rows, cols]`.

    See `gram_penalty_and_grad` for the arguments, errors and gradient. Differentiating twice raises
    RuntimeError.
    """
    out: Tensor = _GramPenalty.apply(w, power, side, normalize)  # type: ignore[no-untyped-call]
    return out
