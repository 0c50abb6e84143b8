"""The communication volume: bytes that each rank of a pipeline stage sends per step."""

from collections.abc import Mapping, Sequence

import numpy as np

from models.units import Unit
from parallel.optimizer.penalty_gradient import SUMS
from parallel.optimizer.placement import Work
from parallel.optimizer.routing import Assign
from parallel.plan.inputs import PlanInputs
from parallel.storage.bucket_layout import BucketLayout

PENALTY_KINDS = ("penalty weights", "penalty out", "penalty figures")
"""Kinds of communication that occur only in steps in which the Gram penalty acts or is measured."""


def sent_bytes(
    units: Sequence[Sequence[Unit]],
    bucket_layout: BucketLayout,
    works: Sequence[Work],
    owners: Mapping[str, int],
    assign: Assign,
    inputs: PlanInputs,
) -> dict[str, np.ndarray]:
    """Bytes that each rank of a stage sends per step, `[stage ranks]`, by kind of communication.

    They are counted as by `collectives.CommVolume`: for ring algorithms, without what stays on a
    rank. `PENALTY_KINDS` are those of a step in which the Gram penalty acts.
    """
    ranks, data, tensor = inputs.stage_ranks, inputs.data, inputs.tensor
    others = bucket_layout.numel // data * (data - 1)
    pc_layers = {u.name for each in units for u in each if assign(u).pc is not None}
    leaving, returning, penalty = np.zeros((3, ranks), dtype=np.int64)
    penalised = {u.name for each in units for u in each if assign(u).penalty is not None}
    stepped = {u.name for each in units for u in each if assign(u).has_owner}
    for work in works:
        owner = owners[work.name]
        if work.name in penalised:
            elsewhere = sum(numel for rank, numel in work.holders.items() if rank != owner)
            penalty[owner] += elsewhere * 4
        if work.name not in stepped:
            continue
        # An owner sends back an update, or for a PC layer the parameter itself.
        back = inputs.dtype.itemsize if work.name in pc_layers else inputs.exchange_bytes
        for rank, numel in work.holders.items():
            if rank != owner:
                leaving[rank] += numel
                returning[owner] += numel * back
    # Owners keep the masters of parameters in 16 bits.
    exchanged = {
        name: owners[name]
        for name in owners
        if name in stepped and name not in pc_layers and inputs.dtype.itemsize >= 4
    }
    sums = bucket_layout.shard_elements(
        (unit, 4) for unit in units[0] if unit.summed_over_tensor(inputs.sequence_parallel)
    )
    return {
        "reduce-scatter": np.full(ranks, others * 4),
        "all-gather": np.full(ranks, others * inputs.dtype.itemsize),
        "exchange in": leaving * inputs.exchange_bytes,
        "exchange out": returning,
        "exchange weights": _weight_bytes(units, exchanged, inputs),
        "tensor-parallel sum of gradients": np.repeat(
            2 * np.array(sums) * (tensor - 1) // tensor, tensor
        ),
        "penalty weights": _weight_bytes(
            units, {name: owners[name] for name in owners if name in penalised}, inputs
        ),
        "penalty out": penalty,
    }


def _weight_bytes(
    units: Sequence[Sequence[Unit]], owners: Mapping[str, int], inputs: PlanInputs
) -> np.ndarray:
    """Bytes of weights that each rank sends to owners that lack its tensor-parallel piece."""
    tensor = inputs.tensor
    sent = np.zeros(inputs.stage_ranks, dtype=np.int64)
    for source, members in enumerate(units):
        for unit in members:
            owner = owners.get(unit.name)
            if owner is not None and owner % tensor != source:
                pieces = tensor if unit.shard_axis is not None else 1
                local = unit.numel // pieces * inputs.dtype.itemsize
                sent[owner // tensor * tensor + source] += local
    return sent


def norm_bytes(inputs: PlanInputs) -> int:
    """Bytes that a rank sends to sum the two squares of the gradient norm over all ranks."""
    return _sum_bytes(2 * 4, inputs)


def penalty_figure_bytes(inputs: PlanInputs) -> int:
    """Bytes that a rank sends to sum the Gram penalty's figures, in a step that measures them."""
    return _sum_bytes(SUMS * 8, inputs) if inputs.penalised else 0


def _sum_bytes(size: int, inputs: PlanInputs) -> int:
    """Bytes that a rank sends in an all-reduce of `size` bytes over all ranks."""
    ranks = inputs.stage_ranks * inputs.pipeline
    return 2 * size * (ranks - 1) // ranks
