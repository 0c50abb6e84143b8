"""The choice between a spectral rule and AdamW, matrix by matrix, by nr(G) >= st(A).

Rank 0 has the ratios of all matrices; the owners keep the smoothed ones and what they decide in the
rule's state, with which checkpoints save it (`spectral.rules.switched`).
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from parallel.comm.collectives import from_all
from parallel.optimizer.optimizer import DistributedOptimizer
from training.monitor import figures as figures
from training.monitor.figures import Record


def choose(
    optimizer: DistributedOptimizer, units: dict[str, Record], host: dist.ProcessGroup
) -> None:
    """Tell every owner the ratios nr(G) / st(A) that rank 0 has, by which matrices under a
    switched rule choose."""
    ratios = {n: r["criterion_ratio"] for n, r in units.items() if "criterion_ratio" in r}
    told: list[Any] = [ratios]
    dist.broadcast_object_list(told, src=0, group=host)
    for batch in optimizer.batches:
        if batch.rule.on_spectral(batch.state) is not None:
            mine = [told[0].get(unit.name, math.nan) for unit in batch.units]
            batch.rule.observe_(batch.state, torch.tensor(mine, dtype=torch.float64))


def choices(optimizer: DistributedOptimizer) -> dict[str, float]:
    """1 for each matrix of the whole model that now takes its steps from the spectral rule, 0 for
    each that could; all ranks together."""
    mine = {
        unit.name: on
        for batch in optimizer.batches
        if (chosen := batch.rule.on_spectral(batch.state)) is not None
        for unit, on in zip(batch.units, chosen.tolist(), strict=True)
    }
    return {name: on for owned in from_all(mine) for name, on in owned.items()}


def shares(units: dict[str, Record]) -> dict[str, float]:
    """`auto_rule/share/<role>`: of the role's units, those that the spectral rule has stepped."""
    on = [
        {"role": record["role"], "layer": None, "on": record["on_spectral"]}
        for record in units.values()
        if "on_spectral" in record
    ]
    means = figures.role_means(on)
    return {name.replace("monitor/on", "auto_rule/share"): v for name, v in means.items()}
