"""Bytes that each rank of a pipeline stage sends per step."""

from collections.abc import Mapping, Sequence

import numpy as np

from models.units import Unit
from parallel.optimizer.penalty_gradient import SUMS
from parallel.optimizer.placement import Work
from parallel.optimizer.routing import Assign
from parallel.plan.inputs import PlanInputs
from parallel.storage.bucket_layout import BucketLayout

PENALTY_KINDS = ("penalty weights", "penalty out", "penalty figures")
"""Kinds of communication of steps in which the Gram penalty acts, and is measured, alone."""


def sent_bytes(
    units: Sequence[Sequence[Unit]],
    layout: BucketLayout,
    works: Sequence[Work],
    owners: Mapping[str, int],
    assign: Assign,
    setting: PlanInputs,
) -> dict[str, np.ndarray]:
    """Bytes each rank of a stage sends per step, `[stage ranks]`, by kind of communication.

    As `collectives.Traffic` counts them: ring algorithms, and nothing for what stays on a rank.
    Those of `PENALTY_KINDS` are of a step in which the Gram penalty acts.
    """
    ranks, data, tensor = setting.stage_ranks, setting.data, setting.tensor
    others = layout.numel // data * (data - 1)
    effective = {u.name for each in units for u in each if assign(u).pc is not None}
    leaving, returning, penalty = np.zeros((3, ranks), dtype=np.int64)
    penalised = {u.name for each in units for u in each if assign(u).penalty is not None}
    stepped = {u.name for each in units for u in each if assign(u).has_owner}
    for work in works:
        owner = owners[work.name]
        if work.name in penalised:
            elsewhere = sum(held for rank, held in work.holders.items() if rank != owner)
            penalty[owner] += elsewhere * 4
        if work.name not in stepped:
            continue
        # What comes back is an update, or of a PC layer the parameter itself.
        back = setting.dtype.itemsize if work.name in effective else setting.exchange_bytes
        for rank, held in work.holders.items():
            if rank != owner:
                leaving[rank] += held
                returning[owner] += held * back
    sums = layout.shard_elements(
        (unit, 4) for unit in units[0] if unit.summed_over_tensor(setting.sequence_parallel)
    )
    return {
        "reduce-scatter": np.full(ranks, others * 4),
        "all-gather": np.full(ranks, others * setting.dtype.itemsize),
        "exchange in": leaving * setting.exchange_bytes,
        "exchange out": returning,
        "exchange weights": _weight_bytes(
            units,
            {name: owners[name] for name in owners if name in stepped and name not in effective},
            setting,
        ),
        "tensor-parallel sum of gradients": np.repeat(
            2 * np.array(sums) * (tensor - 1) // tensor, tensor
        ),
        "penalty weights": _weight_bytes(
            units, {name: owners[name] for name in owners if name in penalised}, setting
        ),
        "penalty out": penalty,
    }


def _weight_bytes(
    units: Sequence[Sequence[Unit]], owners: Mapping[str, int], setting: PlanInputs
) -> np.ndarray:
    """Bytes of weights each rank sends to owners beside it that lack its tensor-parallel piece."""
    tensor = setting.tensor
    sent = np.zeros(setting.stage_ranks, dtype=np.int64)
    for source, members in enumerate(units):
        for unit in members:
            owner = owners.get(unit.name)
            if owner is not None and owner % tensor != source:
                pieces = tensor if unit.shard_axis is not None else 1
                local = unit.numel // pieces * setting.dtype.itemsize
                sent[owner // tensor * tensor + source] += local
    return sent


def norm_bytes(setting: PlanInputs) -> int:
    """Bytes a rank sends to sum the two squares of the gradient norm over all ranks."""
    return _sum_bytes(2 * 4, setting)


def penalty_figure_bytes(setting: PlanInputs) -> int:
    """Bytes a rank sends to sum the figures of the Gram penalty over all ranks, in a step in which
    it is measured."""
    return _sum_bytes(SUMS * 8, setting) if setting.penalised else 0


def _sum_bytes(size: int, setting: PlanInputs) -> int:
    """Bytes a rank sends to sum `size` bytes over all ranks."""
    ranks = setting.stage_ranks * setting.pipeline
    return 2 * size * (ranks - 1) // ranks
