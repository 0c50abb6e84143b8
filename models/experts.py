"""The units of a mixture-of-experts feed-forward block: router, routed and shared experts.

Each expert is a gated feed-forward block of its own, named by its index in the whole layer,
whatever rank holds it. Every expert-parallel rank holds as many neighbouring experts; each expert
is cut over the expert-tensor ranks, as dense blocks and shared experts are over the tensor-parallel
ranks.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from models.config import MoEConfig
from models.layout import Split
from models.units import ALL, Unit, gated_mlp_units


def mixture_units(layer: int, hidden: int, moe: MoEConfig, split: Split) -> list[Unit]:
    """Return the units of layer `layer`'s block on one rank."""
    prefix = f"layers.{layer}."
    units = []
    if moe.shared_experts:
        width = moe.shared_experts * moe.expert_ffn
        shared = gated_mlp_units(layer, hidden, width, split.split_gate_up, split.tensor_size)
        units += moved(shared, prefix, "shared", "shared_", "dense")
        if moe.shared_gate:
            units.append(replicated_matrix(prefix + "shared.router", "shared_router", (1, hidden)))
    units.append(replicated_matrix(prefix + "router", "router", (moe.experts, hidden)))
    count = moe.experts // split.expert_size
    expert = gated_mlp_units(
        layer, hidden, moe.expert_ffn, split.split_gate_up, split.expert_tensor
    )
    for index in range(split.expert_rank * count, (split.expert_rank + 1) * count):
        units += moved(expert, prefix, f"experts.{index}", "expert_", "expert")
    return units


def moved(
    units: Iterable[Unit],
    prefix: str,
    place: str,
    kind: str,
    domain: Literal["dense", "expert"],
) -> list[Unit]:
    """Return the units of a layer's gated block as those of the block `place` of that layer.

    Names get `place` after the layer's `prefix`, roles get `kind` in front.
    """
    new = f"{prefix}{place}."
    return [
        replace(
            unit,
            name=new + unit.name.removeprefix(prefix),
            parameter=new + unit.parameter.removeprefix(prefix + "mlp."),
            role=kind + unit.role,
            draws=tuple((new + name.removeprefix(prefix), rows) for name, rows in unit.draws),
            domain=domain,
        )
        for unit in units
    ]


def replicated_matrix(name: str, role: str, shape: tuple[int, int]) -> Unit:
    """Return a matrix that every tensor-parallel rank holds whole."""
    return Unit(
        name=name,
        parameter=name,
        role=role,
        view_shape=shape,
        index=(ALL,),
        axes=shape,
        replicated=True,
        draws=((name, shape[0]),),
    )
