"""A PC layer's weights as state: W, its top singular pair and gamma, and the map to PC(W).

`spectral.effective_weight` is the function; this is how a training run keeps and refreshes what the
function needs. One definition serves both evaluators, in the graph of every forward pass and once
per optimizer step. Source: "PC Layer: Polynomial Weight Preconditioning for Improving LLM
Pre-Training", algorithms 1 and 3.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spectral.effective_weight import (
    PreconditionGradient,
    SpectralNorm,
    precondition,
    precondition_vjp,
)
from spectral.odd_polynomial import Level
from spectral.power_iteration import COLD_STEPS, top_singular

DOMAIN = 1.1
"""End of the interval [0, 1.1] of normalised singular values that the published maps were fitted
on; they explode beyond it."""


@dataclass(frozen=True, kw_only=True)
class Preconditioner:
    """How weights are preconditioned. All matrices are stacks `[batch, rows, cols]`, with `u`
    `[batch, rows]`, `v` `[batch, cols]` and `gamma` `[batch]`.

    level             preset 0 to 4, coefficients, or the name of a composite (`stages`)
    steps             block Krylov steps that refresh the top singular pair after each update
    norm_recovery     PC(W) = gamma s g(W / s) if True, else gamma g(W / s)
    spectral_norm     "stream" divides by the tracked norm, "none" takes W as it is
    init_compensation gamma starts where PC(W) has the Frobenius norm of W, instead of at 1
    """

    level: Level = 4
    steps: int = 10
    norm_recovery: bool = True
    spectral_norm: SpectralNorm = "stream"
    init_compensation: bool = False

    @torch.no_grad()
    def cold_pair(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """u and v of weights that nothing is known of."""
        u, v = w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[0], w.shape[2])
        _, u, v = top_singular(w, u, v, steps=COLD_STEPS)
        return u, v

    @torch.no_grad()
    def refresh_(self, w: Tensor, u: Tensor, v: Tensor, active: Tensor | None = None) -> None:
        """Make `u`, `v`, which fitted `w` before its last update, fit it again, in place.

        `active` is a 0-d bool tensor; where it is False both stay as they are, bit for bit.
        """
        _, new_u, new_v = top_singular(w, u, v, steps=self.steps)
        for old, new in ((u, new_u), (v, new_v)):
            old.copy_(new if active is None else torch.where(active, new, old))

    @torch.no_grad()
    def initial_gamma(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """gamma `[batch]` at the beginning; 1 for a zero matrix."""
        one = w.new_ones(w.shape[0])
        if not self.init_compensation:
            return one
        effective = torch.linalg.matrix_norm(self.effective(w, u, v, one))
        scale: Tensor = torch.linalg.matrix_norm(w) / effective
        return torch.where(effective > 0, scale, one)

    def effective(self, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
        """PC(W) `[batch, rows, cols]`, differentiable in `w` and `gamma`."""
        return precondition(
            w,
            u,
            v,
            gamma,
            self.level,
            norm_recovery=self.norm_recovery,
            spectral_norm=self.spectral_norm,
            guard=0,
        )

    def vjp(
        self, grad: Tensor, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor
    ) -> PreconditionGradient:
        """dL/dW `[batch, rows, cols]` and dL/dgamma `[batch]` from `grad` = dL/dPC(W)."""
        return precondition_vjp(
            grad,
            w,
            u,
            v,
            gamma,
            self.level,
            norm_recovery=self.norm_recovery,
            spectral_norm=self.spectral_norm,
            guard=0,
        )

    @torch.no_grad()
    def guard_(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """`[batch]`, the largest singular value that the polynomial sees: s_exact / s, or s_exact.

        s_exact comes from a cold start, so it does not share what the tracked pair may miss. Where
        the figure is outside `[0, DOMAIN]`, on which the map is defined, `u` and `v` are replaced
        by the pair that was found, in place.
        """
        cold = torch.zeros_like(u), torch.zeros_like(v)
        exact, new_u, new_v = top_singular(w, *cold, steps=COLD_STEPS)
        if self.spectral_norm == "none":
            return exact
        tracked = torch.linalg.vecdot(u, (w @ v[..., None])[..., 0])
        seen = torch.where(exact > 0, exact / tracked, torch.zeros_like(exact))
        # A tracked value of the wrong sign, or none, is outside as well.
        outside = ~((seen >= 0) & (seen <= DOMAIN))[:, None]
        u.copy_(torch.where(outside, new_u, u))
        v.copy_(torch.where(outside, new_v, v))
        return seen
