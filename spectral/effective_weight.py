"""Polynomial weight preconditioning: the effective weight of a PC layer, and its gradient.

Source: "PC Layer: Polynomial Weight Preconditioning for Improving LLM Pre-Training" (arXiv
2606.06470), section 3, algorithms 1 and 3. The forward pass of a PC layer replaces its weight W
with

    PC(W) = gamma * sg[s] * g(W / s),    s = u^T W v + epsilon,    g(x) = a_0 x + a_1 x^3 + ... ,

where (u, v) is the top singular pair (a constant), sg stops the gradient and g acts on the singular
values. g is close to min(x / cutoff, 1) on [0, 1.1] and thus raises small singular values. Because
no gradient flows through sg[s], dL/dW is orthogonal to W, so only gamma trains the magnitude.

PC(W) does not depend on the data. `Preconditioner.effective` is differentiable, for use in a
forward pass. A trainer that computes PC(W) once per optimizer step calls `Preconditioner.vjp` with
the accumulated gradient of the effective weight. `effective` and `vjp` compute gradients from the
same closed form.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .ieee_products import without_autocast
from .kernels.library import product_flops
from .odd_polynomial import Level, apply_stage, inner, stage_vjp, stages
from .singular_triplets import cold_start, top_singular, triplet_cost


class _Refusal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, name: str, *inputs: Tensor) -> Tensor:
        ctx.name = name
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(f"{ctx.name} cannot be differentiated twice")


def wide_matrices(w: Tensor) -> Tensor:
    """Return `w` in at least float32. Raise ValueError unless `w` contains floating-point matrices.

    In bfloat16, a level-4 PC layer would have an error of 3 to 4% in the spectral norm.
    """
    if w.ndim < 2 or not w.is_floating_point():
        raise ValueError(
            "w must be a floating-point tensor of shape [..., rows, cols], got "
            f"{w.dtype} {list(w.shape)}"
        )
    return w.to(torch.promote_types(w.dtype, torch.float32))


def differentiable_once(gradient: Tensor, name: str, *inputs: Tensor) -> Tensor:
    """Make `gradient` raise RuntimeError if it is differentiated with respect to `inputs`.

    torch's `once_differentiable` only raises if the incoming gradient has a graph; otherwise the
    second derivative is silently zero. `name` is the function's name in the error message.
    """
    if not torch.is_grad_enabled():  # no graph is being built for the gradient
        return gradient
    out: Tensor = _Refusal.apply(gradient, name, *inputs)  # type: ignore[no-untyped-call]
    return out


SpectralNorm = Literal["stream", "none"]

DOMAIN = 1.1
"""Upper end of [0, 1.1], the interval of normalised singular values on which the published maps
were fitted. The maps diverge above 1.1."""


class EffectiveWeightGradient(NamedTuple):
    """Gradients of a loss with respect to W and gamma."""

    weight: Tensor  # [..., rows, cols]
    gamma: Tensor  # [...], one per matrix


@dataclass(frozen=True, kw_only=True)
class Preconditioner:
    """Weight preconditioning: the map from W to PC(W), the map's gradient, and extra state.

    `effective` and `vjp` take matrices `[..., rows, cols]`, their top singular pair `u` `[...,
    rows]` and `v` `[..., cols]`, and `gamma` (`[...]` or a number). The singular pair is treated as
    a constant. All other methods require stacks `[batch, rows, cols]`. Half-precision inputs are
    processed in float32, and the result is rounded back.

    Attributes:
        level: a preset from 0 to 4, coefficients, or the name of a composite (see `stages`).
        steps: number of block Krylov steps that refresh the top singular pair after each update.
        norm_recovery: whether to multiply by sg[s]; otherwise PC(W) = gamma g(W / s).
        spectral_norm: "stream" computes s from the cached pair; "none" does not normalise W:
            PC(W) = gamma g(W).
        init_compensation: whether gamma is initialised so that ||PC(W)||_F = ||W||_F; otherwise
            gamma starts at 1.
        epsilon: added to s, so that a zero matrix is mapped to zero.

    Raises ValueError for an unknown level or `spectral_norm`.
    """

    level: Level = 4
    steps: int = 10
    norm_recovery: bool = True
    spectral_norm: SpectralNorm = "stream"
    init_compensation: bool = False
    epsilon: float = 1e-7

    def __post_init__(self) -> None:
        if self.spectral_norm not in ("stream", "none"):
            raise ValueError(
                f"spectral_norm must be 'stream' or 'none', got {self.spectral_norm!r}"
            )
        stages(self.level)
        if not isinstance(self.level, (int, str)):  # lists are not hashable
            object.__setattr__(self, "level", tuple(self.level))

    def effective(self, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor | float) -> Tensor:
        """Compute PC(W), with the shape and dtype of `w`; differentiable once in `w` and `gamma`.

        Raises ValueError for mismatched shapes. Differentiating twice raises RuntimeError.
        """
        wide = _checked(w, u, v)
        out: Tensor = _EffectiveWeight.apply(  # type: ignore[no-untyped-call]
            wide, u.detach(), v.detach(), _per_matrix(gamma, wide), self
        )
        return out.to(w.dtype)

    def vjp(
        self, grad: Tensor, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor | float
    ) -> EffectiveWeightGradient:
        """Compute dL/dW `[..., rows, cols]` and dL/dgamma `[...]` from `grad`, without a graph.

        `grad` is dL/dPC(W), with the shape of `w`. `grad` may be summed over any number of
        micro-batches, because PC(W) does not depend on the data. In "stream" mode, <dL/dW, W> = 0
        up to epsilon. Raises the same ValueErrors as `effective`.
        """
        wide = _checked(w, u, v)
        if grad.shape != w.shape:
            raise ValueError(
                f"grad must have the shape of w, which is {list(w.shape)}, got {list(grad.shape)}"
            )
        with torch.no_grad():
            dw, dgamma = self._backward(
                grad.to(wide.dtype), self._normalize(wide, u, v), _per_matrix(gamma, wide)
            )
            return EffectiveWeightGradient(dw.to(w.dtype), dgamma[..., 0, 0])

    def _normalize(self, w: Tensor, u: Tensor, v: Tensor) -> "_Normalized":
        u, v = u.to(w.dtype), v.to(w.dtype)
        if self.spectral_norm == "none":
            return _Normalized(w, w.new_ones(*w.shape[:-2], 1, 1), u, v)
        s = (u[..., None, :] @ w @ v[..., None]) + self.epsilon
        return _Normalized(w / s, s, u, v)

    def _backward(self, grad: Tensor, x: "_Normalized", gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Compute dL/dW and dL/dgamma `[..., 1, 1]` from dL/dPC(W)."""
        *first, last = stages(self.level)
        inputs = [x.x]
        for coefficients in first:
            inputs.append(apply_stage(inputs[-1], coefficients))
        scale = x.s if self.norm_recovery else torch.ones_like(x.s)
        value, dx = stage_vjp(inputs.pop(), grad, last)
        grad_gamma = scale * value
        for stage_input, coefficients in zip(reversed(inputs), reversed(first), strict=True):
            _, dx = stage_vjp(stage_input, dx, coefficients)
        if self.spectral_norm == "stream":  # backpropagate through X = W / s with ds/dW = u v^T
            dx = dx - inner(dx, x.x) * x.u[..., :, None] * x.v[..., None, :]
        return gamma * (scale / x.s) * dx, grad_gamma

    @torch.no_grad()
    def cold_pair(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and v from a cold start, without a cached pair."""
        return cold_start(w)[1:]

    @torch.no_grad()
    def refresh_(self, w: Tensor, u: Tensor, v: Tensor, active: Tensor | None = None) -> None:
        """Refresh `u` and `v` in place after `w` has been updated.

        If the 0-d bool tensor `active` is False, `u` and `v` are left bitwise unchanged.
        """
        _, new_u, new_v = top_singular(w, u, v, steps=self.steps)
        for old, new in ((u, new_u), (v, new_v)):
            old.copy_(new if active is None else torch.where(active, new, old))

    @torch.no_grad()
    def initial_gamma(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Compute the initial gamma `[batch]`, which is 1 for a zero matrix."""
        one = w.new_ones(w.shape[0])
        if not self.init_compensation:
            return one
        effective = torch.linalg.matrix_norm(self.effective(w, u, v, one))
        scale: Tensor = torch.linalg.matrix_norm(w) / effective
        return torch.where(effective > 0, scale, one)

    @torch.no_grad()
    def tracked_norm(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Compute s = u^T W v `[batch]`, which the map uses as the spectral norm."""
        tracked: Tensor = torch.linalg.vecdot(u, (w @ v[..., None])[..., 0])
        return tracked

    @torch.no_grad()
    def guard_(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Check the tracked pair, and return the largest argument of the polynomial, `[batch]`.

        The argument is s_exact / s, or s_exact without normalisation. s_exact comes from a cold
        start, so it is correct even if the tracked pair is wrong. If the argument is outside the
        map's domain `[0, DOMAIN]`, `u` and `v` are overwritten with the exact pair.
        """
        exact, new_u, new_v = cold_start(w)
        if self.spectral_norm == "none":
            return exact
        tracked = self.tracked_norm(w, u, v)
        seen = torch.where(exact > 0, exact / tracked, torch.zeros_like(exact))
        # Negative and zero values of s also count as outside the domain.
        outside = ~((seen >= 0) & (seen <= DOMAIN))[:, None]
        u.copy_(torch.where(outside, new_u, u))
        v.copy_(torch.where(outside, new_v, v))
        return seen

    def cost(self, shape: Sequence[int]) -> float:
        """Return the FLOPs per step of a PC layer for a unit of `shape`, excluding the unit's rule.

        The count includes PC(W), its transposed Jacobian, and the refresh of the singular pair. For
        sides m <= n and a polynomial with k terms beyond the linear one, PC(W) takes 2 matmuls of
        size m n m and k - 1 of size m^3. The Jacobian recomputes the Gram matrix and the iterates,
        and takes another 3 matmuls of size m n m and 2 k - 2 of size m^3.
        """
        short, long = sorted(shape)
        flops = triplet_cost(short, long, steps=self.steps)
        wide, square = product_flops(short, long, short), product_flops(short, short, short)
        composed = stages(self.level)
        for i, stage in enumerate(composed):
            powers = len(stage) - 1
            if powers:
                flops += 6 * wide + 4 * (powers - 1) * square
            if powers and i + 1 < len(composed):  # the next stage's input, for the Jacobian too
                flops += 2 * wide + (powers - 1) * square
        return flops


class _Normalized(NamedTuple):
    x: Tensor  # [..., rows, cols], W / s
    s: Tensor  # [..., 1, 1], 1 where the input is not normalised
    u: Tensor  # [..., rows]
    v: Tensor  # [..., cols]


class _EffectiveWeight(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor, pc: Preconditioner
    ) -> Tensor:
        ctx.save_for_backward(w, u, v, gamma)
        ctx.pc = pc
        x = pc._normalize(w, u, v)
        y = x.x
        for coefficients in stages(pc.level):
            y = apply_stage(y, coefficients)
        return y * (gamma * x.s if pc.norm_recovery else gamma)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        w, u, v, gamma = ctx.saved_tensors
        with torch.no_grad(), without_autocast(w.device):
            dw, dgamma = ctx.pc._backward(grad, ctx.pc._normalize(w, u, v), gamma)
            dgamma = dgamma.sum_to_size(gamma.shape)
        dw, dgamma = (differentiable_once(g, "precondition", w, gamma, grad) for g in (dw, dgamma))
        return dw, None, None, dgamma, None


def _checked(w: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return `w` in at least float32; raise ValueError for mismatched shapes."""
    wide = wide_matrices(w)
    if u.shape != w.shape[:-1]:
        raise ValueError(f"u must have shape {list(w.shape[:-1])}, got {list(u.shape)}")
    if v.shape != w.shape[:-2] + w.shape[-1:]:
        raise ValueError(f"v must have shape {[*w.shape[:-2], w.shape[-1]]}, got {list(v.shape)}")
    return wide


def _per_matrix(gamma: Tensor | float, w: Tensor) -> Tensor:
    """Reshape gamma to `[..., 1, 1]` (or `[]`) in the dtype of the polynomial."""
    gamma = torch.as_tensor(gamma, dtype=w.dtype, device=w.device)
    if gamma.ndim and gamma.shape != w.shape[:-2]:
        raise ValueError(f"gamma must be 0-d or have shape {[*w.shape[:-2]]}, got {[*gamma.shape]}")
    return gamma[..., None, None]


def reference(pc: Preconditioner, weight: Tensor, gamma: float) -> Tensor:
    """Compute PC(W) of one matrix `[rows, cols]` by SVD, as a reference for `effective`.

    Source: "PC Layer" (arXiv 2606.06470), algorithm 1. Numbers in comments refer to the lines of
    the algorithm. s is a constant in the gradient, and gamma is trained.
    """
    U, S, Vh = torch.linalg.svd(weight, full_matrices=False)  # W = U diag(S) V^T
    s = S[0] + pc.epsilon if pc.spectral_norm == "stream" else S.new_ones(())  # 3: ||W||_2
    x = S / s  # 4: singular values, at most 1
    for coefficients in stages(pc.level):  # 5: g(x) = a_0 x + a_1 x^3 + a_2 x^5 + ...
        x = torch.stack([a * x ** (2 * i + 1) for i, a in enumerate(coefficients)]).sum(0)
    scale = gamma * (s if pc.norm_recovery else torch.ones_like(s))
    effective: Tensor = scale * (U * x) @ Vh  # 6: gamma s g(W / s)
    return effective
