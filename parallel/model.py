"""The model of one rank: Megatron chunks, their units and gradients, and one step through them."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.blocks.compiled import compile_blocks_
from models.blocks.grouped_experts import GroupedExperts
from models.blocks.in_graph_pc import (
    EffectiveWeight,
    gathered,
    precondition_,
    with_gammas,
)
from models.config import ModelConfig
from models.families import FAMILIES
from models.initialize import initialize_
from models.pc_config import PCConfig
from models.units import QKVUnits, Unit, check_coverage
from parallel.comm.collectives import Traffic, all_reduce_
from parallel.comm.cpu import schedule_devices
from parallel.comm.groups import Axis, Domain, Groups, Stage, stages
from parallel.storage.bucket_layout import Storage, plan_layout
from parallel.storage.buffers import Buffers
from parallel.storage.domain_model import DomainModel
from parallel.storage.gradients import GradientReducer
from parallel.storage.parameter_names import named_parameters

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
"""Token losses `[b, s]` to (scalar loss of the micro-batch, figures to collect)."""


@dataclass
class ParallelModel:
    """One rank's share of the model.

    parameters   declared name -> parameter of this rank (its tensor-parallel shard)
    domains      dense parameters, and experts where there are any
    expert       the ranks that share the experts of a layer
    traffic      bytes sent by gradients, optimizer and weights
    in_graph     PC layers whose effective weight is computed in every forward pass
    """

    config: TransformerConfig
    chunks: list[torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    domains: list[DomainModel]
    expert: Axis
    traffic: Traffic
    sequence_length: int
    in_graph: list[EffectiveWeight] = field(default_factory=list)

    @property
    def units(self) -> list[Unit]:
        """The units this rank holds, whole or in part, in forward order within each domain."""
        return [unit for part in self.domains for unit in part.units]

    def gradient(self, unit: Unit) -> Tensor:
        """The accumulated gradient of this rank's piece of `unit`, float32 or wider, a view."""
        parameter = self.parameters[unit.parameter]
        return unit.view(parameter.main_grad)  # type: ignore[attr-defined]

    def refresh_in_graph(self, active: Tensor) -> None:
        """Fit the tracked singular vectors of PC layers in the graph to new weights, once
        they are here, where `active` (0-d bool) holds."""
        if self.in_graph:
            self.wait_for_weights()
        for effective in self.in_graph:
            effective.refresh_(self._weight_of(effective), active)

    def guard_in_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        """The largest normalised singular values (`EffectiveWeight.guard_`) and the gammas of the
        units of each PC layer in the graph, on one rank of those that have them; all ranks of a
        stage together."""
        domains = {part.domain.name: part.domain for part in self.domains}
        seen, gammas = [], []
        for effective in self.in_graph:
            found = effective.guard_(self._weight_of(effective))
            unit, _ = effective.units[0]
            domain = domains[unit.domain]
            copied = domain.tensor.rank > 0 and unit.shard_axis is not None
            if domain.replicas.rank == 0 and not copied:
                seen.append(found)
                gammas.append(effective.gamma.detach().to(found.dtype))
        return seen, gammas

    def effective_in_graph(self) -> Iterator[tuple[Unit, Tensor, Tensor]]:
        """Each unit of the PC layers in the graph with PC(W) `[rows, cols]` and gamma `[]`, on one
        rank of those that have it; all ranks of a stage together."""
        domains = {part.domain.name: part.domain for part in self.domains}
        for effective in self.in_graph:
            domain = domains[effective.units[0][0].domain]
            if domain.replicas.rank > 0:
                continue
            local = effective(self._weight_of(effective))
            for i, (unit, _) in enumerate(effective.units):
                whole = gathered(unit, unit.view(local), domain.tensor.group)
                if unit.shard_axis is None or domain.tensor.rank == 0:
                    yield unit, whole, effective.gamma[i]

    def _weight_of(self, effective: EffectiveWeight) -> Tensor:
        return self.parameters[effective.units[0][0].parameter]

    def start_in_graph(self) -> None:
        """Set what PC layers in the graph keep beside the initial weights."""
        for effective in self.in_graph:
            effective.start_(self._weight_of(effective))

    def zero_gradients(self) -> None:
        """Clear the gradient buckets before a step."""
        for part in self.domains:
            part.buffers.zero_gradients()

    def wait_for_weights(self) -> None:
        """Wait until all weights are those of the last step."""
        for part in self.domains:
            part.wait(list(part.gathers))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context of the micro-batches after which no gradient reduction starts."""
        with contextlib.ExitStack() as stack:
            for part in self.domains:
                stack.enter_context(part.reducer.no_sync())
            yield

    def finish_gradients(self) -> None:
        """Wait until every gradient shard holds the mean over the global batch."""
        for part in self.domains:
            part.reducer.finish()

    def run(
        self,
        batches: Callable[[], Iterator[dict[str, Tensor]]],
        loss: Callable[[dict[str, Tensor]], LossFunction],
        *,
        microbatches: int,
        micro_batch: int,
        train: bool,
    ) -> list[dict[str, Tensor]]:
        """The figures of each micro-batch on the last pipeline stage, an empty list elsewhere.

        Runs forward (and with `train` backward and the gradient reduction) through Megatron's
        schedule. `batches()` starts an iterator of `{"tokens": [b, s], "labels": [b, s], ...}`,
        one per chunk; `loss(batch)` turns token losses into the micro-batch's loss.
        """

        def forward(
            iterator: Iterator[dict[str, Tensor]], chunk: torch.nn.Module
        ) -> tuple[Tensor, LossFunction]:
            batch = next(iterator)
            tokens = batch["tokens"]
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return chunk(tokens, positions, None, labels=batch["labels"]), self.share(loss(batch))

        iterators = [batches() for _ in self.chunks]
        for chunk in self.chunks:
            chunk.train(train)
        single = len(self.chunks) == 1
        with schedule_devices(), torch.set_grad_enabled(train):
            return get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iterators[0] if single else iterators,
                model=self.chunks[0] if single else self.chunks,
                num_microbatches=microbatches,
                seq_length=self.sequence_length,
                micro_batch_size=micro_batch,
                forward_only=not train,
            )

    def share(self, loss: LossFunction) -> LossFunction:
        """`loss`, a mean over this rank's part of each sequence, as its share of the whole mean.

        Megatron's schedules multiply losses, the balancing ones too, by the context-parallel size.
        """
        size = self.config.context_parallel_size

        def shared(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value, figures = loss(output)
            return value / size, figures

        return loss if size == 1 else shared


def build_model(
    model: ModelConfig,
    groups: Groups,
    *,
    seed: int,
    sequence_length: int,
    elementwise: Callable[[Unit], bool],
    preconditioned: Callable[[Unit], bool] | None = None,
    dtype: torch.dtype = torch.float32,
    virtual_pipeline: int = 1,
    sequence_parallel: bool = False,
    qkv_units: QKVUnits = "head",
    split_gate_up: bool = True,
    storage: Storage = "auto",
    bucket_numel: int | None = None,
    exchange_bytes: int = 4,
    overlap_reduce: bool = True,
    gradient_dtype: torch.dtype | None = None,
    pc: PCConfig | None = None,
    weights: Callable[[Unit], Tensor] | None = None,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
    loss_chunk: int | None = None,
    compile_backend: str | None = None,
    **engine: Any,
) -> ParallelModel:
    """This rank's share of the model, initialised, its weights and gradients in flat buckets.

    `elementwise`, `preconditioned`, `storage`, `bucket_numel` and `exchange_bytes` are those of
    `plan_layout`, `gradient_dtype` that of `Buffers`, `first_stage_layers` and `last_stage_layers`
    those of `stages`. `pc` matters if its evaluator is in the graph. `weights` gives whole units
    `[*shape]` to begin with, null draws them. The loss takes `loss_chunk` entries of a rank's
    vocabulary at a time, null for all. `compile_backend` is for `compile_blocks_`, null for
    none. What is left (`recompute`, `fp8`) goes to the family's `transformer_config`.
    Raises ValueError where model and declared units disagree.
    """
    family = FAMILIES[model.family]
    parallelism = {"context_size": groups.context.size} if groups.context.size > 1 else {}
    if groups.expert.size > 1:
        parallelism["expert_size"] = groups.expert.size
    if groups.experts.tensor.size > 1:
        parallelism["expert_tensor"] = groups.experts.tensor.size
    config = family.transformer_config(
        model,
        dtype=dtype,
        tensor_size=groups.tensor.size,
        pipeline_size=groups.pipeline.size,
        virtual_size=virtual_pipeline,
        sequence_parallel=sequence_parallel,
        first_stage_layers=first_stage_layers,
        last_stage_layers=last_stage_layers,
        **parallelism,
        **engine,
    )
    parts = stages(
        model.layers,
        rank=groups.pipeline.rank,
        size=groups.pipeline.size,
        virtual=virtual_pipeline,
        first=first_stage_layers,
        last=last_stage_layers,
    )
    chunks = [
        family.build(
            model,
            config,
            layers=part.layers,
            embedding=part.embedding,
            head=part.head,
            sequence_length=sequence_length,
            virtual_stage=i if virtual_pipeline > 1 else None,
            loss_chunk=loss_chunk,
        ).to(groups.device)
        for i, part in enumerate(parts)
    ]
    if compile_backend is not None:
        compile_blocks_(chunks, compile_backend)
    options = {"qkv_units": qkv_units, "split_gate_up": split_gate_up}
    stage_units = declare_stage(model, parts, groups, **options)
    in_graph: list[EffectiveWeight] = []
    if pc is not None and pc.evaluator == "in_graph":
        plain = named_parameters(family.parameter_names, chunks, parts)
        mine_of_stage = stage_units[groups.tensor.rank]
        in_graph = install_in_graph(pc, chunks, plain, mine_of_stage, groups)
        stage_units = [with_gammas(units, pc) for units in stage_units]
    parameters = named_parameters(family.parameter_names, chunks, parts)
    check_coverage(stage_units[groups.tensor.rank], parameters)
    traffic = Traffic()
    domains = []
    for domain in (groups.dense, groups.experts):
        mine = domain_units(stage_units, domain, groups.tensor.rank)
        if mine[0]:
            layout = plan_layout(
                mine[domain.tensor.rank],
                ranks=domain.replicas.size,
                elementwise=elementwise,
                tensor_size=domain.tensor.size,
                storage=storage,
                bucket_numel=bucket_numel,
                parameter_bytes=dtype.itemsize,
                exchange_bytes=exchange_bytes,
                preconditioned=preconditioned,
            )
            held = {unit.parameter: parameters[unit.parameter] for unit in mine[domain.tensor.rank]}
            buffers = Buffers(layout, held, domain.replicas, gradient_dtype=gradient_dtype)
            sums = frozenset(
                unit.parameter
                for unit in mine[domain.tensor.rank]
                if unit.summed_over_tensor(sequence_parallel)
            )
            reducer = GradientReducer(
                buffers, held, domain, tensor_sums=sums, overlap=overlap_reduce, traffic=traffic
            )
            domains.append(DomainModel(domain, mine, buffers, reducer))
    built = ParallelModel(
        config, chunks, parameters, domains, groups.expert, traffic, sequence_length, in_graph
    )
    for part in domains:
        initialize_(
            parameters,
            part.units,
            model.init,
            seed=seed,
            layers=model.layers,
            tensor_rank=part.domain.tensor.rank,
            tensor_size=part.domain.tensor.size,
            given=weights,
            together=partial(in_shares, part.domain.replicas),
        )
    built.start_in_graph()
    for part in domains:
        part.buffers.reload_masters()
    config.no_sync_func = built.no_sync
    config.finalize_model_grads_func = lambda *_, **__: built.finish_gradients()
    wait_before_forward(built)
    return built


def in_shares(
    axis: Axis, units: Sequence[Unit], compute: Callable[[Sequence[Unit]], Tensor]
) -> Tensor:
    """`compute(units)` `[units]`, of which each rank of the axis, all with the same units, computes
    every `axis.size`-th."""
    mine = compute(units[axis.rank :: axis.size])
    found = mine.new_zeros(len(units))
    found[axis.rank :: axis.size] = mine
    return all_reduce_(found, axis, Traffic(), "norms of initial weights")


def install_in_graph(
    pc: PCConfig,
    chunks: Sequence[torch.nn.Module],
    parameters: Mapping[str, torch.nn.Parameter],
    units: Sequence[Unit],
    groups: Groups | None = None,
) -> list[EffectiveWeight]:
    """The PC layers put into the graph of the chunks; `units` are those of this rank, whole ones
    without `groups`."""
    members: dict[int, list[Unit]] = {}
    for unit in units:
        members.setdefault(id(parameters[unit.parameter]), []).append(unit)
    modules = [module for chunk in chunks for module in chunk.modules()]
    domains = () if groups is None else (groups.dense, groups.experts)
    tensor = {domain.name: domain.tensor.group for domain in domains}
    return precondition_(modules, members, pc.preconditioner, pc.learnable_gamma, tensor)


def declare_stage(
    model: ModelConfig, parts: Sequence[Stage], groups: Groups, **options: object
) -> list[list[Unit]]:
    """The units of every tensor-parallel rank of this pipeline stage, in forward order."""
    if groups.expert.size > 1:
        options |= {"expert_rank": groups.expert.rank, "expert_size": groups.expert.size}
    if groups.experts.tensor.size > 1:
        options["expert_tensor"] = groups.experts.tensor.size
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
                tensor_size=groups.tensor.size,
                **options,
            )
        ]
        for rank in range(groups.tensor.size)
    ]


def domain_units(
    stage_units: Sequence[Sequence[Unit]], domain: Domain, tensor_rank: int
) -> list[list[Unit]]:
    """The units of one domain, a list per tensor-parallel rank of the domain."""
    chosen = [[unit for unit in units if unit.domain == domain.name] for units in stage_units]
    # Experts have tensor ranks of their own, which all declare the same units.
    return chosen if domain.name == "dense" else [chosen[tensor_rank]] * domain.tensor.size


def wait_before_forward(model: ParallelModel) -> None:
    """Make every module wait, before its forward, for the weights it is about to use."""
    place = {
        id(model.parameters[name]): (i, bucket.index)
        for i, part in enumerate(model.domains)
        for name, (bucket, _) in part.buffers.layout.slots.items()
    }

    def hook_on(module: torch.nn.Module, needed: list[tuple[int, int]]) -> None:
        def wait(*_: object) -> None:
            for domain, bucket in needed:
                model.domains[domain].wait([bucket])

        module.register_forward_pre_hook(wait)

    for chunk in model.chunks:
        for module in chunk.modules():
            # Grouped experts multiply by the weights of modules that they never call.
            inside = isinstance(module, GroupedExperts)
            needed = {place[id(p)]: None for p in module.parameters(recurse=inside)}
            if needed:
                hook_on(module, list(needed))
