"""Polynomial weight preconditioning: the effective weight of a PC layer, and its gradient.

Source: "PC Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training". A weight W of
a PC layer is used in the forward pass as

    PC(W) = gamma * sg[s] * g(W / s),    s = u^T W v + epsilon,    g(x) = a_0 x + a_1 x^3 + ... ,

where u, v is the top singular pair (held fixed), sg stops the gradient and g acts on the singular
values. g is close to min(x / cutoff, 1) on [0, 1.1]: it lifts the small singular values. Because
the recovered s carries no gradient, dL/dW is orthogonal to W, so only gamma trains the magnitude.

PC(W) does not depend on the data. `precondition` is differentiable, for use in a forward pass. A
trainer that computes PC(W) once per optimizer step calls `precondition_vjp` once with the
accumulated gradient of the effective weight instead. Both use the same closed form.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .differentiation import differentiable_once
from .odd_polynomial import (
    COMPOSITES,
    PRESETS,
    Level,
    Stage,
    apply_stage,
    evaluate,
    fit_polynomial,
    inner,
    stage_vjp,
    stages,
)

__all__ = [
    "COMPOSITES",
    "PRESETS",
    "EffectiveWeightGradient",
    "evaluate",
    "fit_polynomial",
    "precondition",
    "precondition_vjp",
    "stages",
]

SpectralNorm = Literal["stream", "none"]


class EffectiveWeightGradient(NamedTuple):
    """Gradients of a loss by W and gamma."""

    weight: Tensor  # [..., rows, cols]
    gamma: Tensor  # [...], one per matrix


class _Normalized(NamedTuple):
    x: Tensor  # [..., rows, cols], W / s
    s: Tensor  # [..., 1, 1], 1 where the input is not normalised
    u: Tensor  # [..., rows]
    v: Tensor  # [..., cols]


def _normalize(
    w: Tensor, u: Tensor, v: Tensor, spectral_norm: SpectralNorm, epsilon: float
) -> _Normalized:
    u, v = u.to(w.dtype), v.to(w.dtype)
    if spectral_norm == "none":
        return _Normalized(w, w.new_ones(*w.shape[:-2], 1, 1), u, v)
    s = (u[..., None, :] @ w @ v[..., None]) + epsilon
    return _Normalized(w / s, s, u, v)


def _forward(x: _Normalized, gamma: Tensor, polynomial: tuple[Stage, ...], recover: bool) -> Tensor:
    y = x.x
    for coefficients in polynomial:
        y = apply_stage(y, coefficients)
    return y * (gamma * x.s if recover else gamma)


def _backward(
    grad: Tensor,
    x: _Normalized,
    gamma: Tensor,
    polynomial: tuple[Stage, ...],
    recover: bool,
    normalized: bool,
) -> tuple[Tensor, Tensor]:
    """Compute dL/dW and dL/dgamma `[..., 1, 1]` from dL/dPC(W)."""
    inputs = [x.x]
    for coefficients in polynomial[:-1]:
        inputs.append(apply_stage(inputs[-1], coefficients))
    scale = x.s if recover else torch.ones_like(x.s)
    value, dx = stage_vjp(inputs.pop(), grad, polynomial[-1])
    grad_gamma = scale * value
    for stage_input, coefficients in zip(reversed(inputs), reversed(polynomial[:-1]), strict=True):
        _, dx = stage_vjp(stage_input, dx, coefficients)
    if normalized:  # through X = W / s, with ds/dW = u v^T
        dx = dx - inner(dx, x.x) * x.u[..., :, None] * x.v[..., None, :]
    return gamma * (scale / x.s) * dx, grad_gamma


class _EffectiveWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        w: Tensor,
        u: Tensor,
        v: Tensor,
        gamma: Tensor,
        polynomial: tuple[Stage, ...],
        recover: bool,
        spectral_norm: SpectralNorm,
        epsilon: float,
    ) -> Tensor:
        ctx.save_for_backward(w, u, v, gamma)
        ctx.options = (polynomial, recover, spectral_norm, epsilon)
        x = _normalize(w, u, v, spectral_norm, epsilon)
        return _forward(x, gamma, polynomial, recover)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, u, v, gamma = ctx.saved_tensors
        polynomial, recover, spectral_norm, epsilon = ctx.options
        with torch.no_grad():
            x = _normalize(w, u, v, spectral_norm, epsilon)
            normalized = spectral_norm == "stream"
            dw, dgamma = _backward(grad, x, gamma, polynomial, recover, normalized)
            dgamma = dgamma.sum_to_size(gamma.shape)
        dw, dgamma = (differentiable_once(g, "precondition", w, gamma, grad) for g in (dw, dgamma))
        return dw, None, None, dgamma, None, None, None, None


def _check(w: Tensor, u: Tensor, v: Tensor, spectral_norm: str) -> None:
    if w.ndim < 2 or not w.is_floating_point():
        raise ValueError(
            f"w must be floating point [..., rows, cols], got {w.dtype} {list(w.shape)}"
        )
    if u.shape != w.shape[:-1]:
        raise ValueError(f"u must have shape {list(w.shape[:-1])}, got {list(u.shape)}")
    if v.shape != w.shape[:-2] + w.shape[-1:]:
        raise ValueError(f"v must have shape {[*w.shape[:-2], w.shape[-1]]}, got {list(v.shape)}")
    if spectral_norm not in ("stream", "none"):
        raise ValueError(f"spectral_norm must be 'stream' or 'none', got {spectral_norm!r}")


def _per_matrix(gamma: Tensor | float, w: Tensor) -> Tensor:
    """Shape gamma as `[..., 1, 1]` (or `[]`) in the dtype of the polynomial."""
    gamma = torch.as_tensor(gamma, device=w.device).to(w.dtype)
    if gamma.ndim and gamma.shape != w.shape[:-2]:
        raise ValueError(f"gamma must be a scalar or {list(w.shape[:-2])}, got {list(gamma.shape)}")
    return gamma[..., None, None]


def _working(w: Tensor) -> Tensor:
    # Level 4 in bfloat16 has an error of 3 to 4% in the spectral norm: half precision is widened.
    return w.float() if w.dtype in (torch.bfloat16, torch.float16) else w


def precondition(
    w: Tensor,
    u: Tensor,
    v: Tensor,
    gamma: Tensor | float,
    level: Level,
    *,
    norm_recovery: bool = True,
    spectral_norm: SpectralNorm = "stream",
    epsilon: float = 1e-7,
) -> Tensor:
    """Compute the effective weight PC(W), differentiable once in `w` and `gamma`.

    Half precision is computed in float32 and rounded at the end. Source: "PC Layer", section 3,
    equation of PC(W).

    Args:
        w: `[..., rows, cols]`; the result has its shape and dtype.
        u, v: its top singular pair, `[..., rows]` and `[..., cols]`, constants.
        gamma: a scalar or `[...]`.
        level: as in `stages`.
        norm_recovery: multiply by s again, without gradient. False: PC(W) = gamma g(W / s).
        spectral_norm: "stream" takes s from the cached pair; "none" does not normalise,
            PC(W) = gamma g(W).
        epsilon: added to s, so that a zero matrix gives zero.

    Raises:
        ValueError: shapes that do not fit, or an unknown level or `spectral_norm`.
        RuntimeError: the result is differentiated twice.
    """
    _check(w, u, v, spectral_norm)
    wide = _working(w)
    out: Tensor = _EffectiveWeight.apply(  # type: ignore[no-untyped-call]
        wide,
        u.detach(),
        v.detach(),
        _per_matrix(gamma, wide),
        stages(level),
        norm_recovery,
        spectral_norm,
        epsilon,
    )
    return out.to(w.dtype)


def precondition_vjp(
    grad: Tensor,
    w: Tensor,
    u: Tensor,
    v: Tensor,
    gamma: Tensor | float,
    level: Level,
    *,
    norm_recovery: bool = True,
    spectral_norm: SpectralNorm = "stream",
    epsilon: float = 1e-7,
) -> EffectiveWeightGradient:
    """Compute dL/dW `[..., rows, cols]` and dL/dgamma `[...]` from `grad`, without a graph.

    `grad` is dL/dPC(W), of the shape of `w`. It may be a sum over any number of micro-batches, as
    PC(W) does not depend on the data. The other arguments are those of the matching call of
    `precondition`. In "stream" mode <dL/dW, W> = 0 up to epsilon. Raises ValueError as
    `precondition` does.
    """
    _check(w, u, v, spectral_norm)
    if grad.shape != w.shape:
        raise ValueError(f"grad must have the shape of w, {list(w.shape)}, got {list(grad.shape)}")
    with torch.no_grad():
        wide = _working(w)
        x = _normalize(wide, u, v, spectral_norm, epsilon)
        dw, dgamma = _backward(
            grad.to(wide.dtype),
            x,
            _per_matrix(gamma, wide),
            stages(level),
            norm_recovery,
            spectral_norm == "stream",
        )
        return EffectiveWeightGradient(dw.to(w.dtype), dgamma[..., 0, 0])
