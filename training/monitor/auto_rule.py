"""The choice between a spectral rule and AdamW for each matrix, by nr(G) >= st(A).

Rank 0 has the ratios of all matrices. Their owners keep the smoothed ratios and the choices in the
state of the rule (`spectral.rules.switched`), so checkpoints have them.
"""

import math
from typing import Any

import torch
import torch.distributed as dist

from parallel.comm.collectives import from_all, named
from parallel.optimizer.optimizer import DistributedOptimizer
from training.monitor import figures
from training.monitor.figures import Record


def choose(
    optimizer: DistributedOptimizer, units: dict[str, Record], host: dist.ProcessGroup
) -> None:
    """Send the ratios nr(G) / st(A) from rank 0 to the owners, whose switched rules then choose."""
    ratios = {n: r["criterion_ratio"] for n, r in units.items() if "criterion_ratio" in r}
    told: list[Any] = [ratios]
    with named("exchange of plain values"):
        dist.broadcast_object_list(told, src=0, group=host)
    for batch in optimizer.stacks:
        if batch.rule.on_spectral(batch.state) is not None:
            mine = [told[0].get(unit.name, math.nan) for unit in batch.units]
            batch.rule.observe_(batch.state, torch.tensor(mine, dtype=torch.float64))


def choices(optimizer: DistributedOptimizer) -> dict[str, float]:
    """Return 1 for each matrix of the whole model that is on its spectral rule, 0 if on AdamW.

    Matrices without a choice are absent. Collective.
    """
    mine = {
        unit.name: on
        for batch in optimizer.stacks
        if (chosen := batch.rule.on_spectral(batch.state)) is not None
        for unit, on in zip(batch.units, chosen.tolist(), strict=True)
    }
    return {name: on for owned in from_all(mine) for name, on in owned.items()}


def shares(units: dict[str, Record]) -> dict[str, float]:
    """Return `auto_rule/share/<role>`, the share of units that the spectral rule has stepped."""
    on = [
        {"role": record["role"], "layer": None, "on": record["on_spectral"]}
        for record in units.values()
        if "on_spectral" in record
    ]
    means = figures.role_means(on)
    return {name.replace("monitor/on", "auto_rule/share"): v for name, v in means.items()}
