"""State of a PC layer's weights: W, its top singular pair and gamma, and the map to PC(W).

`spectral.effective_weight` is the function; this file is how a training run keeps and refreshes
what the function needs. One definition serves both evaluators, in the graph of every forward pass
and once per optimizer step. Source: "PC Layer: Polynomial Weight Preconditioning for Improving LLM
Pre-Training", algorithms 1 and 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cost import Product, product_flops, triplet_cost
from .effective_weight import (
    EffectiveWeightGradient,
    SpectralNorm,
    precondition,
    precondition_vjp,
)
from .odd_polynomial import Level, stages
from .power_iteration import COLD_STEPS, top_singular

DOMAIN = 1.1
"""End of the interval [0, 1.1] of normalised singular values on which the published maps were
fitted; they diverge beyond it."""


@dataclass(frozen=True, kw_only=True)
class Preconditioner:
    """How weights are preconditioned.

    All methods work on stacks `[batch, rows, cols]`, with `u` `[batch, rows]`, `v` `[batch, cols]`
    and `gamma` `[batch]`.

    Attributes:
        level: preset 0 to 4, coefficients, or the name of a composite (see `stages`).
        steps: block Krylov steps that refresh the top singular pair after each update.
        norm_recovery: PC(W) = gamma s g(W / s) if True, else gamma g(W / s).
        spectral_norm: "stream" divides by the tracked norm, "none" does not normalise.
        init_compensation: gamma starts where PC(W) has the Frobenius norm of W, instead of at 1.
    """

    level: Level = 4
    steps: int = 10
    norm_recovery: bool = True
    spectral_norm: SpectralNorm = "stream"
    init_compensation: bool = False

    @torch.no_grad()
    def cold_pair(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Compute u and v of weights without a cached pair."""
        u, v = w.new_zeros(w.shape[:2]), w.new_zeros(w.shape[0], w.shape[2])
        _, u, v = top_singular(w, u, v, steps=COLD_STEPS)
        return u, v

    @torch.no_grad()
    def refresh_(self, w: Tensor, u: Tensor, v: Tensor, active: Tensor | None = None) -> None:
        """Refresh `u` and `v` in place after an update of `w`.

        `active` is a 0-d bool tensor; where it is False both stay as they are, bit for bit.
        """
        _, new_u, new_v = top_singular(w, u, v, steps=self.steps)
        for old, new in ((u, new_u), (v, new_v)):
            old.copy_(new if active is None else torch.where(active, new, old))

    @torch.no_grad()
    def initial_gamma(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Compute the initial gamma `[batch]`; 1 for a zero matrix."""
        one = w.new_ones(w.shape[0])
        if not self.init_compensation:
            return one
        effective = torch.linalg.matrix_norm(self.effective(w, u, v, one))
        scale: Tensor = torch.linalg.matrix_norm(w) / effective
        return torch.where(effective > 0, scale, one)

    def effective(self, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor) -> Tensor:
        """Compute PC(W) `[batch, rows, cols]`, differentiable in `w` and `gamma`."""
        return precondition(
            w,
            u,
            v,
            gamma,
            self.level,
            norm_recovery=self.norm_recovery,
            spectral_norm=self.spectral_norm,
        )

    def vjp(
        self, grad: Tensor, w: Tensor, u: Tensor, v: Tensor, gamma: Tensor
    ) -> EffectiveWeightGradient:
        """Compute dL/dW `[batch, rows, cols]` and dL/dgamma `[batch]` from `grad` = dL/dPC(W)."""
        return precondition_vjp(
            grad,
            w,
            u,
            v,
            gamma,
            self.level,
            norm_recovery=self.norm_recovery,
            spectral_norm=self.spectral_norm,
        )

    @torch.no_grad()
    def tracked_norm(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Compute s = u^T W v, `[batch]`, which the map takes for the spectral norm."""
        tracked: Tensor = torch.linalg.vecdot(u, (w @ v[..., None])[..., 0])
        return tracked

    @torch.no_grad()
    def guard_(self, w: Tensor, u: Tensor, v: Tensor) -> Tensor:
        """Check the tracked pair and return the largest argument of the polynomial, `[batch]`.

        That is s_exact / s, or s_exact without normalisation. s_exact comes from a cold start, so
        it finds values that the tracked pair may miss. Where the figure is outside `[0, DOMAIN]`,
        on which the map is defined, `u` and `v` are replaced in place by the pair that was found.
        """
        cold = torch.zeros_like(u), torch.zeros_like(v)
        exact, new_u, new_v = top_singular(w, *cold, steps=COLD_STEPS)
        if self.spectral_norm == "none":
            return exact
        tracked = self.tracked_norm(w, u, v)
        seen = torch.where(exact > 0, exact / tracked, torch.zeros_like(exact))
        # A tracked value of the wrong sign, or none, is outside as well.
        outside = ~((seen >= 0) & (seen <= DOMAIN))[:, None]
        u.copy_(torch.where(outside, new_u, u))
        v.copy_(torch.where(outside, new_v, v))
        return seen

    def cost(self, shape: Sequence[int], *, product: Product = product_flops) -> float:
        """Count the FLOPs per step of a PC layer on a unit of `shape`, beside those of its rule.

        These are PC(W), its transposed Jacobian, and the refreshed singular pair. With m <= n the
        sides and k the powers after the first, PC(W) takes 2 products m n m and k - 1 of m^3; the
        Jacobian computes the Gram matrix and iterates again, and adds 3 products m n m and 2 k - 2
        of m^3.
        """
        short, long = sorted(shape)
        found = triplet_cost(short, long, steps=self.steps, product=product)
        wide, square = product(short, long, short), product(short, short, short)
        composed = stages(self.level)
        for i, stage in enumerate(composed):
            powers = len(stage) - 1
            if powers:
                found += 6 * wide + 4 * (powers - 1) * square
            if powers and i + 1 < len(composed):  # the next one's argument, again for the Jacobian
                found += 2 * wide + (powers - 1) * square
        return found
