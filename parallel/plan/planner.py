"""What a config needs and does on N ranks, without running it.

BucketLayout and placement are those of the run itself; bytes, loads and padding follow from them
exactly. Activations and transient buffers are estimates, times assume every FLOP at the same speed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit
from parallel.comm.groups import Stage, stages
from parallel.optimizer.cost import assigned_cost
from parallel.optimizer.placement import Placement, place, unit_work
from parallel.optimizer.routing import Assign
from parallel.plan.inputs import PlanInputs
from parallel.plan.memory import (
    Memory,
    activation_bytes,
    penalty_bytes,
    score_bytes,
    state_bytes,
    transient_bytes,
)
from parallel.plan.monitor_memory import MonitorMemory, monitor_memory, monitored_bytes
from parallel.plan.volume import PENALTY_KINDS, norm_bytes, penalty_figure_bytes, sent_bytes
from parallel.storage.bucket_layout import BucketLayout, plan_layout


@dataclass(frozen=True)
class StagePlan:
    """One pipeline stage. Ranks differ, so loads, state and bytes are of the ranks that have most.

    parameters         elements on each rank, padding not counted
    buckets            and how many of them are in owner storage
    padding            elements
    units              matrices that have an owner
    strategy           of their placement
    load_max           FLOPs of the busiest rank; load_mean of all; load_bound no placement is below
    load_unit          FLOPs of the costliest matrix
    moved              elements of momentum that travel to an owner elsewhere, over all ranks
    sent               bytes per step of the busiest rank for each kind of communication
    sent_max           bytes per step of the rank that sends most in all, no Gram penalty acting
    sent_penalised     the same of a step in which it acts and is measured
    sent_adamw         bytes per step of AdamW with ZeRO-1 on the same ranks, without padding
    state_max          bytes of masters and state on the fullest rank, state_mean on all
    memory             of the fullest rank
    """

    stage: int
    parameters: int
    buckets: int
    owner_buckets: int
    padding: int
    units: int
    strategy: str
    load_max: float
    load_mean: float
    load_bound: float
    load_unit: float
    moved: int
    sent: dict[str, int]
    sent_max: int
    sent_penalised: int
    sent_adamw: int
    state_max: int
    state_mean: float
    memory: Memory

    @property
    def imbalance(self) -> float:
        """Largest over mean load; 1 where there is nothing to do."""
        return self.load_max / self.load_mean if self.load_mean else 1.0

    @property
    def units_per_rank(self) -> float:
        """The mean load in matrices of the costliest kind; few cannot be spread evenly."""
        return self.load_mean / self.load_unit if self.load_unit else 0.0

    @property
    def sent_ratio(self) -> float:
        """Bytes sent over those of AdamW with ZeRO-1; 1 on a single data-parallel rank."""
        return self.sent_max / self.sent_adamw if self.sent_adamw else 1.0


@dataclass(frozen=True)
class Plan:
    """A run on `gpus` ranks.

    model_flops   per step and rank, forward and backward
    peak_flops    FLOP/s of a rank
    """

    gpus: int
    data: int
    tensor: int
    pipeline: int
    model_flops: float
    peak_flops: float
    stages: tuple[StagePlan, ...]

    @property
    def memory(self) -> Memory:
        """Of the stage whose ranks need most."""
        return max((stage.memory for stage in self.stages), key=lambda memory: memory.total)

    @property
    def padding(self) -> float:
        """Share of the parameters."""
        parameters = sum(stage.parameters for stage in self.stages)
        return sum(stage.padding for stage in self.stages) / parameters

    @property
    def optimizer_seconds(self) -> float:
        """Per step, of the busiest rank, at peak."""
        return max(stage.load_max for stage in self.stages) / self.peak_flops

    @property
    def optimizer_share(self) -> float:
        """Of the FLOPs, and so of the time where both run at the same share of peak."""
        optimizer = max(stage.load_max for stage in self.stages)
        return optimizer / (optimizer + self.model_flops)

    def as_dict(self) -> dict[str, Any]:
        """Everything, the derived figures too, as JSON can hold it."""
        found = asdict(self)
        for stage, content in zip(self.stages, found["stages"], strict=True):
            for name in ("imbalance", "units_per_rank", "sent_ratio"):
                content[name] = getattr(stage, name)
            content["memory"]["total"] = stage.memory.total
        derived = ("padding", "optimizer_seconds", "optimizer_share")
        return found | {name: getattr(self, name) for name in derived}


def plan(
    model: ModelConfig,
    assign: Assign,
    setting: PlanInputs,
    *,
    micro_batch: int,
    sequence_length: int,
    step_flops: float,
    peak_flops: float,
    **unit_options: Any,
) -> Plan:
    """The plan of `model` spread as `setting` says.

    `step_flops` are those of forward and backward of a whole step, over all ranks; `micro_batch`
    and `sequence_length` bound the activations.
    """
    found = []
    for stage in range(setting.pipeline):
        parts = stages(
            model.layers,
            rank=stage,
            size=setting.pipeline,
            virtual=setting.virtual_pipeline,
            first=setting.first_stage_layers,
            last=setting.last_stage_layers,
        )
        # 1F1B keeps `pipeline - stage` micro-batches of activations in flight.
        activations = (setting.pipeline - stage) * activation_bytes(
            model,
            parts,
            tokens=micro_batch * sequence_length,
            tensor=setting.tensor,
            sequence_parallel=setting.sequence_parallel,
            bytes_per_element=setting.dtype.itemsize,
            recompute=setting.recompute,
            loss_chunk=setting.loss_chunk,
        )
        activations += score_bytes(
            model, tokens=micro_batch * sequence_length, tensor=setting.tensor
        )
        units = stage_units(model, parts, setting, **unit_options)
        found.append(plan_stage(units, assign, setting, stage=stage, activations=activations))
    gpus = setting.stage_ranks * setting.pipeline
    return Plan(
        gpus=gpus,
        data=setting.data,
        tensor=setting.tensor,
        pipeline=setting.pipeline,
        model_flops=step_flops / gpus,
        peak_flops=peak_flops,
        stages=tuple(found),
    )


def stage_units(
    model: ModelConfig, parts: Iterable[Stage], setting: PlanInputs, **unit_options: Any
) -> list[list[Unit]]:
    """The units of every tensor rank of a pipeline stage; of the experts, those of one rank."""
    if setting.expert > 1:
        unit_options |= {"expert_rank": 0, "expert_size": setting.expert}
    if setting.expert_tensor > 1:
        unit_options["expert_tensor"] = setting.expert_tensor
    return [
        [
            unit
            for part in parts
            for unit in FAMILIES[model.family].units(
                model,
                layers=part.layers,
                embedding=part.embedding,
                head=part.head,
                tensor_rank=rank,
                tensor_size=setting.tensor,
                **unit_options,
            )
        ]
        for rank in range(setting.tensor)
    ]


@dataclass(frozen=True)
class _DomainPlan:
    """The part of a stage that is copied over the same ranks. Arrays are `[stage ranks]`."""

    layout: BucketLayout
    placed: list[Placement]
    loads: np.ndarray
    load_unit: float
    sent: dict[str, np.ndarray]
    sent_adamw: int
    master: int
    state: np.ndarray
    buffers: int
    monitored: MonitorMemory
    penalty: int


def plan_stage(
    units: Sequence[Sequence[Unit]],
    assign: Assign,
    setting: PlanInputs,
    *,
    stage: int = 0,
    activations: int = 0,
) -> StagePlan:
    """The plan of one stage, given the units of each of its tensor ranks."""
    parts: list[_DomainPlan] = []
    loads = np.zeros(setting.stage_ranks)
    for part, members, repeats in setting.domains(units):
        parts.append(_plan_domain(members, assign, part, repeats, loads))
        loads = parts[-1].loads
    padding = sum(part.layout.padding for part in parts)
    numel = sum(part.layout.numel for part in parts)
    sent = {kind: np.sum([part.sent[kind] for part in parts], axis=0) for kind in parts[0].sent}
    sent["gradient norm"] = np.full(setting.stage_ranks, norm_bytes(setting))
    sent["penalty figures"] = np.full(setting.stage_ranks, penalty_figure_bytes(setting))
    always = [each for kind, each in sent.items() if kind not in PENALTY_KINDS]
    master = sum(part.master for part in parts)
    state = np.sum([part.state for part in parts], axis=0)
    buckets = [bucket for part in parts for bucket in part.layout.buckets]
    placed = [each for part in parts for each in part.placed]
    return StagePlan(
        stage=stage,
        parameters=numel - padding,
        buckets=len(buckets),
        owner_buckets=sum(bucket.storage == "owner" for bucket in buckets),
        padding=padding,
        units=sum(len(each.owners) for each in placed),
        strategy=" and ".join(dict.fromkeys(each.strategy for each in placed if each.owners)),
        load_max=float(loads.max()),
        load_mean=float(loads.mean()),
        load_bound=max(each.bound for each in placed),
        load_unit=max(part.load_unit for part in parts),
        moved=sum(each.moved for each in placed),
        sent={kind: int(each.max()) for kind, each in sent.items()},
        sent_max=int(np.sum(always, axis=0).max()),
        sent_penalised=int(np.sum(list(sent.values()), axis=0).max()),
        sent_adamw=sum(part.sent_adamw for part in parts),
        state_max=int(state.max()) + master,
        state_mean=float(state.mean()) + master,
        memory=Memory(
            weights=numel * setting.dtype.itemsize,
            gradients=numel * 4,
            master=master,
            state=int(state.max()),
            activations=activations,
            buffers=max(part.buffers for part in parts),
            monitors=monitored_bytes([part.monitored for part in parts]),
            penalty=max(part.penalty for part in parts),
        ),
    )


def _plan_domain(
    units: Sequence[Sequence[Unit]],
    assign: Assign,
    setting: PlanInputs,
    repeats: int,
    base: np.ndarray,
) -> _DomainPlan:
    """The plan of units that are copied over the same ranks.

    There are `repeats` sets of such ranks, alike but for what they have to do already: `base`
    `[stage ranks]`, of which they have `tensor` neighbours each in turn.
    """

    def elementwise(unit: Unit) -> bool:
        return not assign(unit).whole_matrix

    layout = plan_layout(
        units[0],
        ranks=setting.data,
        storage=setting.storage,
        elementwise=elementwise,
        tensor_size=setting.tensor,
        bucket_numel=setting.bucket_numel,
        parameter_bytes=setting.dtype.itemsize,
        exchange_bytes=setting.exchange_bytes,
        preconditioned=lambda unit: assign(unit).pc is not None,
    )
    cost = lru_cache(maxsize=None)(assigned_cost)
    works = unit_work(
        units,
        layout,
        elementwise=elementwise,
        cost=lambda unit: cost(unit.shape, assign(unit)),
    )
    placed = [
        place(setting.placement, works, setting.stage_ranks, base=mine.flatten().tolist())
        for mine in base.reshape(-1, repeats, setting.tensor).swapaxes(0, 1)
    ]
    sent = [sent_bytes(units, layout, works, each.owners, assign, setting) for each in placed]
    state = [state_bytes(units, layout, each.owners, assign, setting) for each in placed]
    covered = [u for u in units[0] if assign(u).pc is not None]
    monitored = MonitorMemory(0, 0, 0)
    if setting.monitored is not None:
        ranks = {"data": setting.data, "tensor": setting.tensor}
        monitored = monitor_memory(units, layout, covered, setting.monitored, **ranks)
    wire = 4 + setting.dtype.itemsize
    stepped = sum(bucket.numel for bucket in layout.buckets if not bucket.stepped_by_owners)
    return _DomainPlan(
        layout=layout,
        placed=placed,
        loads=dealt([each.loads for each in placed], setting.tensor),
        load_unit=max((work.cost for work in works), default=0.0),
        sent={kind: dealt([each[kind] for each in sent], setting.tensor) for kind in sent[0]},
        sent_adamw=(layout.numel - layout.padding) * wire * (setting.data - 1) // setting.data,
        master=4 * stepped // setting.data if setting.dtype.itemsize < 4 else 0,
        state=dealt(state, setting.tensor),
        buffers=max(
            transient_bytes(units, layout, works, each, assign, setting) for each in placed
        ),
        monitored=monitored,
        penalty=max(penalty_bytes(units, layout, works, each, assign, setting) for each in placed),
    )


def dealt(sets: Iterable[ArrayLike], tensor: int) -> np.ndarray:
    """What the ranks of each set have, `[ranks of a set]`, as `[stage ranks]`: `tensor` neighbours
    of one set, as many of the next, and so on in turn."""
    return np.stack([np.reshape(each, (-1, tensor)) for each in sets], axis=1).reshape(-1)
