"""Plans a run on N ranks without starting it.

Bucket layout and placement are computed by the same functions as in a run, so bytes, loads and
padding are exact. Activations and transient buffers are estimated, and times are modelled
(step_time.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import torch

from models.families import declare_stage_units
from models.units import Unit
from parallel.optimizer.routing import Assign, Assignment, unit_work
from parallel.optimizer.unit_transfer import shardwise
from parallel.plan.activation_costs import Memory, Traffic, activation_traffic, stage_activations
from parallel.plan.devices import Device
from parallel.plan.step_shape import PlanInputs, Replicas, StepShape
from parallel.plan.step_time import OptimizerLoad, StepTime, step_time
from parallel.storage.bucket_layout import BucketPlanner
from parallel.storage.domain_model import TIED_SUM
from spectral.batching import grouped
from spectral.rules.base import Rule
from spectral.sharded.placement import place

STEP_COPIES: Final = 6
"""Number of float32 copies of a step group's matrices: momentum, weights, and four for SSO's
multiplier. Muon needs one or two instead of these four (tests/rehearsal/test_peak_memory.py).
"""

Owners = Mapping[str, int]
"""Owner rank within the stage, by unit name."""


@dataclass(frozen=True)
class StagePlan:
    """The plan for one pipeline stage.

    Unless stated otherwise, loads, state and bytes are maxima over the stage's ranks.

    parameters         elements per rank, excluding padding
    buckets            number of buckets
    padding            padding elements
    elements           elements in a rank's shards
    units              matrices with an owner
    load_max           maximum optimizer FLOPs per rank
    load_mean          mean optimizer FLOPs per rank
    sent               bytes sent by a rank per step, by kind of communication
    reduced, gathered  bytes sent by a rank in reduce-scatters and all-gathers, by domain
    sent_max           total bytes sent by a rank per step, excluding the Gram penalty
    sent_adamw         `sent_max` for AdamW with ZeRO-1 and the same gradient dtype, without padding
    state_max          maximum bytes of master weights and state per rank
    state_mean         mean bytes of master weights and state per rank
    memory             memory of a rank
    traffic            all bytes sent by a rank per step, by kind, including activations
    """

    stage: int
    parameters: int
    buckets: int
    padding: int
    elements: int
    units: int
    load_max: float
    load_mean: float
    sent: dict[str, int]
    reduced: dict[Replicas, float]
    gathered: dict[Replicas, float]
    sent_max: int
    sent_adamw: int
    state_max: int
    state_mean: float
    memory: Memory
    traffic: tuple[Traffic, ...] = ()

    @property
    def load(self) -> OptimizerLoad:
        """Optimizer work per step in this stage."""
        return OptimizerLoad(
            flops=self.load_max,
            elements=self.elements,
            gradients=self.reduced,
            weights=self.gathered,
            exchanged=self.sent["exchange in"] + self.sent["exchange out"],
            tied=self.sent.get(TIED_SUM, 0),
        )

    @property
    def imbalance(self) -> float:
        """Maximum load divided by mean load, or 1 if there is no load."""
        return self.load_max / self.load_mean if self.load_mean else 1.0

    @property
    def sent_ratio(self) -> float:
        """`sent_max` divided by `sent_adamw`, or 1 if AdamW would send nothing."""
        return self.sent_max / self.sent_adamw if self.sent_adamw else 1.0


@dataclass(frozen=True)
class Plan:
    """The plan for a run on `gpus` devices.

    model_flops   forward and backward FLOPs per step and rank
    time          modelled step time
    """

    gpus: int
    data: int
    pipeline: int
    model_flops: float
    tokens: int
    device: Device
    operands: str
    time: StepTime
    stages: tuple[StagePlan, ...]

    @property
    def heaviest(self) -> StagePlan:
        """Stage with the largest memory per rank."""
        return max(self.stages, key=lambda stage: stage.memory.total)

    @property
    def memory(self) -> Memory:
        """Memory of a rank in the heaviest stage."""
        return self.heaviest.memory

    @property
    def fits(self) -> bool:
        """Whether the memory of every rank, including the reserve, fits in device memory."""
        return self.memory.total <= self.device.room

    @property
    def peak_flops(self) -> float:
        """Peak FLOP/s per device."""
        return self.device.peak[self.operands]

    @property
    def tokens_per_second(self) -> float:
        """Modelled throughput of the whole run in tokens per second."""
        return self.tokens / self.time.total

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs per step divided by the peak FLOPs possible in the
        modelled step time."""
        return self.model_flops / (self.time.total * self.peak_flops)

    def as_dict(self) -> dict[str, Any]:
        """Return all values, including derived ones, for JSON."""
        figures = asdict(self)
        for stage, content in zip(self.stages, figures["stages"], strict=True):
            content["memory"]["total"] = stage.memory.total
            content["sent"] |= {traffic.kind: int(traffic.size) for traffic in stage.traffic}
            content["sent_across_nodes"] = {
                traffic.kind: int(traffic.size * traffic.across) for traffic in stage.traffic
            }
            del content["traffic"]
        return figures | {
            "fits": self.fits,
            "device_memory_bytes": self.device.memory_bytes,
            "step_seconds": self.time.total,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


def plan(shape: StepShape, assign: Assign, *, step_flops: float, **unit_options: Any) -> Plan:
    """Plan a run.

    Args:
        shape: model, layout, batch and device.
        assign: function that returns a unit's rule, rates and penalty.
        step_flops: forward and backward FLOPs of one step, summed over ranks.
        **unit_options: options passed to the family's `units`.
    """
    inputs = shape.inputs
    stages = []
    for stage in range(inputs.pipeline):
        units = declare_stage_units(shape.model, shape.chunks(stage), inputs, **unit_options)
        stages.append(completed(plan_stage(units, assign, inputs), shape, stage))
    return assemble(shape, stages, step_flops)


def completed(planned: StagePlan, shape: StepShape, stage: int) -> StagePlan:
    """Return a stage's plan, completed with its activations and all of its traffic."""
    traffic = activation_traffic(shape, stage)
    for kind, size in planned.sent.items():
        if kind in ("reduce-scatter", "all-gather"):
            of_domain = planned.reduced if kind == "reduce-scatter" else planned.gathered
            across = sum(shape.links(d).ring_across * size for d, size in of_domain.items())
            traffic.append(Traffic(kind, size, 0, shape.links("dense"), across / max(size, 1)))
        elif kind == TIED_SUM:
            links = shape.links("pipeline")
            traffic.append(Traffic(kind, size, 1, links, links.ends_across))
        elif size:
            links = shape.links("stage")
            traffic.append(Traffic(kind, size, 0, links, links.all_to_all_across))
    memory = replace(planned.memory, activations=stage_activations(shape, stage))
    return replace(planned, stage=stage, memory=memory, traffic=tuple(traffic))


def assemble(shape: StepShape, stages: Sequence[StagePlan], step_flops: float) -> Plan:
    """Assemble the plan of a run from its stage plans."""
    inputs = shape.inputs
    gpus = inputs.stage_ranks * inputs.pipeline
    copies = inputs.data // shape.inputs.context
    return Plan(
        gpus=gpus,
        data=inputs.data,
        pipeline=inputs.pipeline,
        model_flops=step_flops / gpus,
        tokens=shape.microbatches * shape.micro_batch * shape.sequence_length * copies,
        device=shape.device,
        operands=shape.operands,
        time=step_time(shape, [stage.load for stage in stages]),
        stages=tuple(stages),
    )


def plan_stage(units: Sequence[Sequence[Unit]], assign: Assign, inputs: PlanInputs) -> StagePlan:
    """Plan a stage, given the units of its tensor-parallel ranks. `completed` adds the activations
    and the rest of the traffic."""
    domains: dict[Replicas, _Placed] = {}
    loads = np.zeros(inputs.stage_ranks)
    for name, part, members, repeats in inputs.domains(units):
        domains[name] = _Placed(DomainPlan(members, assign, part), repeats, loads)
        loads = domains[name].loads
    parts = list(domains.values())
    layouts = [part.domain.bucket_layout for part in parts]
    padding = sum(layout.padding for layout in layouts)
    numel = sum(layout.numel for layout in layouts)
    sent = {kind: np.sum([part.sent[kind] for part in parts], axis=0) for kind in parts[0].sent}
    ranks = inputs.stage_ranks * inputs.pipeline
    # All ranks reduce two 4-byte numbers: the squared norm, and the number of unsound ranks.
    sent["gradient norm"] = np.full(inputs.stage_ranks, 2 * 8 * (ranks - 1) // ranks)
    tied = [(unit, inputs.gradient_bytes) for unit in units[0] if unit.tied_stage]
    if tied:  # two ranks send their shards
        shards = domains["dense"].domain.bucket_layout.shard_elements(tied)
        sent[TIED_SUM] = np.repeat(shards, inputs.tensor)
    master = sum(part.master for part in parts)
    state = np.sum([part.state for part in parts], axis=0)
    kept = np.sum([part.kept for part in parts], axis=0)
    return StagePlan(
        stage=0,
        parameters=numel - padding,
        buckets=sum(len(layout.buckets) for layout in layouts),
        padding=padding,
        elements=sum(part.elements for part in parts),
        units=sum(part.units for part in parts),
        load_max=float(loads.max()),
        load_mean=float(loads.mean()),
        sent={kind: int(sizes.max()) for kind, sizes in sent.items()},
        reduced={name: float(p.sent["reduce-scatter"].max()) for name, p in domains.items()},
        gathered={name: float(p.sent["all-gather"].max()) for name, p in domains.items()},
        sent_max=int(np.sum(list(sent.values()), axis=0).max()),
        sent_adamw=sum(part.sent_adamw for part in parts),
        state_max=int(state.max()) + master,
        state_mean=float(state.mean()) + master,
        memory=Memory(
            weights=numel * inputs.dtype.itemsize,
            gradients=numel * inputs.gradient_bytes,
            master=master,
            state=int((state + kept).max()),
            activations=0,
            buffers=max(part.buffers for part in parts),
        ),
    )


class DomainPlan:
    """A stage's dense units or experts, their buckets, and the work of their owners.

    units   each tensor-parallel rank's list of units in the domain, in rank order
    works   optimizer work for each owned unit, sorted by unit name

    Arrays have one entry per rank in the stage.
    """

    def __init__(self, units: Sequence[Sequence[Unit]], assign: Assign, inputs: PlanInputs) -> None:
        self.inputs = inputs
        self._set_units(units, assign)

        def of(unit: Unit) -> Assignment:
            return self.assigned[unit.name]

        self.bucket_layout = BucketPlanner(
            ranks=inputs.data,
            parameter_bytes=inputs.dtype.itemsize,
            preconditioned=lambda unit: of(unit).pc is not None,
        ).layout(units[0])
        if inputs.tensor_mode == "shardwise":
            self._set_units(shardwise(units, lambda unit: of(unit).whole_matrix), assign)
        self.works = unit_work(self.units, self.bucket_layout, of)
        self.stepped = [work for work in self.works if self.assigned[work.name].has_owner]

    def _set_units(self, units: Sequence[Sequence[Unit]], assign: Assign) -> None:
        self.units = units
        self.whole = {unit.name: unit for members in units for unit in members}
        self.assigned = {name: assign(unit) for name, unit in self.whole.items()}

    def sent(self, owners: Owners) -> dict[str, np.ndarray]:
        """Return the bytes sent by each rank per step, by kind of communication.

        Bytes are counted as in `collectives.CommVolume`, assuming ring algorithms and excluding a
        rank's own elements. The Gram penalty is not included.
        """
        inputs = self.inputs
        ranks, data, tensor = inputs.stage_ranks, inputs.data, inputs.tensor
        others = self.bucket_layout.numel // data * (data - 1)
        leaving, returning = np.zeros((2, ranks), dtype=np.int64)
        for work in self.stepped:
            owner, pc = owners[work.name], self.assigned[work.name].pc
            # An owner sends back an update or, for a PC layer, the parameter itself.
            size = inputs.exchange_bytes if pc is None else inputs.dtype.itemsize
            for rank, numel in work.holders.items():
                if rank != owner:
                    leaving[rank] += numel
                    returning[owner] += numel * size
        sums = self.bucket_layout.shard_elements(
            (unit, inputs.gradient_bytes)
            for unit in self.units[0]
            if unit.summed_over_tensor(inputs.sequence_parallel)
        )
        return {
            "reduce-scatter": np.full(ranks, others * inputs.gradient_bytes),
            "all-gather": np.full(ranks, others * inputs.dtype.itemsize),
            "exchange in": leaving * inputs.exchange_bytes,
            "exchange out": returning,
            "tensor-parallel sum of gradients": np.repeat(
                2 * np.array(sums) * (tensor - 1) // tensor, tensor
            ),
        }

    def state(self, owners: Owners) -> np.ndarray:
        """Return the bytes of optimizer state on each rank."""
        shards = self.bucket_layout.shard_elements(
            (unit, element_state_bytes(self.assigned[unit.name].rule, self.inputs.momentum_bytes))
            for unit in self.units[0]
            if self.assigned[unit.name].pc is None
        )
        state = np.repeat(shards, self.inputs.tensor)
        for name, assigned in self.assigned.items():
            shape = self.whole[name].shape
            if assigned.pc is not None:
                state[owners[name]] += pc_bytes(assigned, shape, self.inputs.momentum_bytes)
            elif assigned.has_owner:
                state[owners[name]] += owned_state_bytes(assigned.rule, shape)
        return state

    def kept(self, owners: Owners) -> np.ndarray:
        """Return the bytes of weights that each rank keeps as an owner (`StepGroup.kept`)."""
        kept = np.zeros(self.inputs.stage_ranks, dtype=np.int64)
        for work in self.stepped:
            unit = self.whole[work.name]
            if self.assigned[work.name].pc is None:
                copied = unit.replicated and self.inputs.tensor > 1
                moved = copied or work.holders.keys() != {owners[work.name]}
                kept[owners[work.name]] += 4 * unit.numel * moved
        return kept

    def transient(self, owners: Owners) -> int:
        """Return the largest transient memory, in bytes, that any step group needs on any rank."""
        # Numbers of elements that each rank owns, and that it sends or receives: `[step groups,
        # stage ranks]`.
        count = max(self._step_group.values()) + 1
        owned, moved = np.zeros((2, count, self.inputs.stage_ranks), dtype=np.int64)
        for work in self.stepped:
            owner, group = owners[work.name], self._step_group[work.name]
            owned[group, owner] += work.numel
            for rank, numel in work.holders.items():
                if rank != owner:
                    moved[group, rank] += numel
                    moved[group, owner] += numel
        return int((STEP_COPIES * 4 * owned + self.inputs.exchange_bytes * moved).max())

    @cached_property
    def _step_group(self) -> dict[str, int]:
        """Map unit names to step groups."""
        groups = self.bucket_layout.step_groups(self.inputs.step_groups)
        of_bucket = {bucket: i for i, buckets in enumerate(groups) for bucket in buckets}
        slots = self.bucket_layout.slots
        return {name: of_bucket[slots[u.parameter][0].index] for name, u in self.whole.items()}


class _Placed:
    """A domain of a stage with its owners.

    The stage's ranks form `repeats` sets with equal work: groups of `tensor` consecutive ranks are
    assigned to the sets round-robin. The sets only differ in the previous loads `base` `[stage
    ranks]`. Arrays have one entry per rank in the stage.
    """

    def __init__(self, domain: DomainPlan, repeats: int, base: np.ndarray) -> None:
        inputs, layout, ranks = domain.inputs, domain.bucket_layout, np.arange(base.size)
        sets = ranks.reshape(-1, repeats, inputs.tensor).swapaxes(0, 1).reshape(repeats, -1)
        self.domain = domain
        self.units = self.buffers = 0
        self.loads = np.zeros(base.size)
        self.state, self.kept = np.zeros((2, base.size), dtype=np.int64)
        self.sent: dict[str, np.ndarray] = {}
        # Sets with the same previous loads have the same plan.
        for loads, equal in grouped(sets, lambda members: tuple(base[members].tolist())).items():
            placed = place(inputs.placement, domain.works, inputs.stage_ranks, base=loads)
            owners, members = placed.owners, np.stack(equal)  # `[sets, ranks of a set]`
            self.units += len(owners) * len(equal)
            self.buffers = max(self.buffers, domain.transient(owners))
            self.loads[members] = placed.loads
            self.state[members], self.kept[members] = domain.state(owners), domain.kept(owners)
            for kind, sizes in domain.sent(owners).items():
                self.sent.setdefault(kind, np.zeros_like(self.state))[members] = sizes
        itemsize, data = inputs.dtype.itemsize, inputs.data
        self.elements = layout.numel // data
        stepped = sum(bucket.numel for bucket in layout.buckets if not bucket.stepped_by_owners)
        self.master = 4 * stepped // data if itemsize < 4 else 0
        sent = inputs.gradient_bytes + itemsize  # per element
        self.sent_adamw = (layout.numel - layout.padding) * sent * (data - 1) // data


@lru_cache(maxsize=1024)
def state_of_matrix(rule: Rule, shape: tuple[int, ...], momentum_bytes: int = 4) -> dict[str, int]:
    """Return the bytes of a rule's state for one matrix, by tensor name."""
    state = rule.init_state(torch.empty(1, *shape, device="meta"))
    return {
        name: momentum_bytes * tensor.numel() if name in rule.elementwise_state else tensor.nbytes
        for name, tensor in state.items()
    }


def owned_state_bytes(rule: Rule, shape: tuple[int, ...]) -> int:
    """Return the bytes of whole-matrix state on a unit's owner, such as cached singular vectors.

    This excludes momentum, which is stored in the shards.
    """
    state = state_of_matrix(rule, shape)
    return sum(size for name, size in state.items() if name not in rule.elementwise_state)


@lru_cache(maxsize=1024)
def pc_bytes(assigned: Assignment, shape: tuple[int, ...], momentum_bytes: int = 4) -> int:
    """Return the bytes stored by the owner of a PC layer.

    These are W, all of the rule's state, the tracked singular vectors, and gamma with its state and
    gradient.
    """
    assert assigned.pc is not None
    rows, cols = shape
    size = 4 * (rows * cols + rows + cols + 2)
    size += sum(state_of_matrix(assigned.rule, shape, momentum_bytes).values())
    rule = assigned.pc.gamma_rule
    if rule is not None:
        gamma = rule.init_state(torch.empty(1, 1, device="meta"))
        size += sum(tensor.nbytes for tensor in gamma.values())
    return size


@lru_cache(maxsize=1024)
def element_state_bytes(rule: Rule, momentum_bytes: int = 4) -> int:
    """Return the bytes of a rule's state per shard element."""
    if rule.whole_matrix:
        return momentum_bytes * len(rule.elementwise_state)
    short, long = (rule.init_state(torch.empty(1, n, device="meta")) for n in (1, 2))
    return sum(long[name].nbytes - short[name].nbytes for name in short)
