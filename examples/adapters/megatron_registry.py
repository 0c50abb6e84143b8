"""Megatron-LM: `--optimizer sso`, `muon_sphere` or `muon_plus_plus`, by megatron-core's registry.

    from megatron_registry import register

    register()  # in pretrain_gpt.py, before `pretrain(...)`

Needs megatron-core 0.19, whose registry it extends, and emerging-optimizers, without which Megatron
does not read it. Heads of q, k and v and both halves of a gated layer are stepped by themselves,
embeddings, heads and gains by Megatron's Adam. Matrices must be whole on a rank: tensor parallelism
is refused, pipeline and data parallelism are fine.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from spectrain import MuonPlusPlus, MuonSphere, SpectralOptimizer, SpectralSphere

KINDS: dict[str, type[SpectralOptimizer]] = {
    "sso": SpectralSphere,
    "muon_sphere": MuonSphere,
    "muon_plus_plus": MuonPlusPlus,
}


def register() -> None:
    """Add `KINDS` to megatron-core's optimizers."""
    from megatron.core.optimizer import emerging_optimizers

    for name, kind in KINDS.items():
        emerging_optimizers._EMERGING_OPTIMIZERS[name] = emerging_optimizers.EmergingOptimizerEntry(
            optimizer_cls=partial(build, kind),
            init_state_fn=lambda optimizer, config=None: None,  # state exists from the start
            config_to_kwargs=settings,
        )


def settings(
    config: Any, model_chunks: Sequence[torch.nn.Module], pg_collection: Any
) -> dict[str, Any]:
    """Return the arguments of `build` that Megatron's config has."""
    if pg_collection is not None and pg_collection.tp.size() > 1:
        raise ValueError(
            "these optimizers need whole matrices: tensor parallelism must be 1, got "
            f"{pg_collection.tp.size()}"
        )
    return {"model_chunks": model_chunks, "lr": config.lr, "weight_decay": config.weight_decay}


def build(
    kind: type[SpectralOptimizer],
    groups: Iterable[dict[str, Any]],
    *,
    model_chunks: Sequence[torch.nn.Module],
    lr: float,
    weight_decay: float,
) -> SpectralOptimizer:
    """Make an optimizer of Megatron's groups, divided by how their weights consist of matrices.

    A gradient that is not finite skips the step: Megatron looks for it before.
    """
    divisions = {
        parameter: rows_of(name, parameter, chunk)
        for chunk in model_chunks
        for name, parameter in chunk.named_parameters()
    }
    divided = []
    for group in groups:
        by_rows: dict[int, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            by_rows.setdefault(divisions[parameter], []).append(parameter)
        for rows, params in by_rows.items():
            divided.append({**group, "params": params, "units": {"rows": [rows]} if rows else {}})
    return kind(divided, lr=lr, weight_decay=weight_decay, nonfinite="skip")


def rows_of(name: str, parameter: torch.Tensor, chunk: torch.nn.Module) -> int:
    """Return the rows of each matrix in a weight, 0 for one that is a single matrix."""
    config = next(module.config for module in chunk.modules() if hasattr(module, "config"))
    if name.endswith("linear_qkv.weight"):
        return int(config.kv_channels)
    if name.endswith("linear_fc1.weight") and config.gated_linear_unit:
        return int(parameter.shape[0] // 2)
    return 0
