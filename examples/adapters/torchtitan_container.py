"""torchtitan: Muon, MuonSphere, SpectralSphere and Muon++ in addition to its own optimizers.

    config.optimizer = SpectralOptimizers.Config(
        param_groups=spectral_groups("SpectralSphere", lr=5e-3, head_dim=64, adamw_lr=3e-4)
    )

For torchtitan 0.3. The container creates the optimizers after `fully_shard`, so they get DTensors,
and its checkpoints contain their state. Experts are on a separate mesh and would need another
optimizer: leave them to AdamW.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spectrain
import torch
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

KINDS = ("Muon", "MuonSphere", "SpectralSphere", "MuonPlusPlus")


class SpectralOptimizers(OptimizersContainer):
    """A container whose groups may also use one of `KINDS`."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        """Config of the container, as in torchtitan."""

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        if name in KINDS:
            factory: Callable[..., torch.optim.Optimizer] = getattr(spectrain, name)
            return factory
        return OptimizersContainer._resolve_optimizer_factory(name)


def spectral_groups(
    kind: str, *, lr: float, head_dim: int, adamw_lr: float, **options: Any
) -> list[ParamGroupConfig]:
    """Return groups for a dense model: heads of q, k and v, other matrices, and the rest for AdamW.

    q, k and v may be one weight, as in torchtitan.
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
