"""torchtitan adapter: adds Muon, MuonSphere, SpectralSphere and Muon++ to its optimizers.

    config.optimizer = SpectralOptimizers.Config(
        param_groups=spectral_groups("SpectralSphere", lr=5e-3, head_dim=64, adamw_lr=3e-4)
    )

Written for torchtitan 0.3. The container creates the optimizers after `fully_shard`, so the
optimizers get DTensors, and their state is saved in torchtitan's checkpoints. Experts live on a
separate mesh, which these optimizers do not support; use AdamW for them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spectrain
import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

KINDS = ("Muon", "MuonSphere", "SpectralSphere", "MuonPlusPlus")


class SpectralOptimizers(OptimizersContainer):
    """Optimizer container that also accepts the optimizers in `KINDS` for its parameter groups."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Container config, identical to torchtitan's."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name in KINDS:
            factory: Callable[..., torch.optim.Optimizer] = getattr(spectrain, name)
            return factory
        return OptimizersContainer._resolve_optimizer_factory(name)


def spectral_groups(
    kind: str, *, lr: float, head_dim: int, adamw_lr: float, **options: Any
) -> list[ParamGroupConfig]:
    """Return parameter groups for a dense model: q, k and v; other matrices; everything else
    (AdamW).

    The q, k and v weights, which may be fused, are split into heads of `head_dim` rows.
    """
    heads = r"attention\.(qkv_linear\.)?w(q|k|v|qkv)\.weight$"
    others = r"layers\..*\.w(o|1|2|3)\.weight$"
    spectral = {"lr": lr, **options}
    return [
        ParamGroupConfig(
            pattern=heads,
            optimizer_name=kind,
            optimizer_kwargs={**spectral, "units": {"rows": [head_dim]}},
        ),
        ParamGroupConfig(
            pattern=others, optimizer_name=kind, optimizer_kwargs={**spectral, "units": {}}
        ),
        ParamGroupConfig(
            pattern=r".*", optimizer_name="AdamW", optimizer_kwargs={"lr": adamw_lr, "fused": True}
        ),
    ]
