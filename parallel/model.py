"""The model of one rank: Megatron's chunks, their units and gradients, forward and backward."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.blocks.compiled import fuse_blocks_
from models.blocks.experts import GroupedExperts
from models.blocks.in_graph_pc import UnitWeight, gathered, precondition_, with_gammas
from models.blocks.self_attention import RotatedSelfAttention
from models.config import ModelConfig
from models.engine import without_advice
from models.families import FAMILIES, declare_stage_units
from models.initialize import initialize_
from models.layout import ChunkSpec
from models.pc_config import PCConfig
from models.units import Unit, check_coverage, units_of_domain
from parallel.comm.collectives import CommVolume, all_reduce_
from parallel.comm.cpu import schedule_devices
from parallel.comm.groups import Axis, Domain, Groups, chunk_specs
from parallel.storage.bucket_layout import BucketPlanner
from parallel.storage.domain_model import Buffers, DomainModel, GradientReducer, sum_in_products_
from spectral.batching import grouped

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
"""Function that returns a micro-batch's scalar loss and the metrics to collect, given token losses
`[b, s]`, or `[2, b, s]` with a z-loss (`DecoderModel`)."""

Batch = dict[str, Any]
"""A micro-batch: `tokens` `[b, s]`; `labels` `[b, s]` for training or validation; `documents`
(`Documents`) if documents are packed; and further inputs of the loss function."""


@dataclass
class ParallelModel:
    """One rank's part of the model.

    chunks            the model chunks of this pipeline rank
    parameters        this rank's tensor-parallel piece of each parameter, by declared name
    domains           one `DomainModel` for dense parameters, and one for experts if there are any
    comm_volume       bytes sent for gradients, optimizer and weights
    sequence_length   tokens per sample, before context parallelism splits samples
    in_graph          PC layers whose effective weight is computed in every forward pass
    sums_in_products  whether linear layers accumulate weight gradients directly in the buckets
    after_backward    function called after the backward pass, before the wait for other ranks'
                      gradients
    """

    config: TransformerConfig
    chunks: list[torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    domains: list[DomainModel]
    comm_volume: CommVolume
    sequence_length: int
    in_graph: list[UnitWeight] = field(default_factory=list)
    sums_in_products: bool = False
    after_backward: Callable[[], None] = lambda: None

    @property
    def units(self) -> list[Unit]:
        """Units with at least a part on this rank, in forward order within each domain."""
        return [unit for part in self.domains for unit in part.units]

    def domain_of(self, unit: Unit) -> Domain:
        """Return the domain of `unit`."""
        return next(part.domain for part in self.domains if part.domain.name == unit.domain)

    def reports(self, unit: Unit) -> bool:
        """Return whether this rank, which must have a part of `unit`, reports the unit."""
        domain = self.domain_of(unit)
        first = domain.replicas.rank == 0 and (unit.shard_axis is None or domain.tensor.rank == 0)
        return first and not unit.is_copy

    def gradient(self, unit: Unit) -> Tensor:
        """Return a view of the gradient of this rank's piece of `unit`, float32 or wider."""
        parameter = self.parameters[unit.parameter]
        return unit.view(parameter.main_grad)  # type: ignore[attr-defined]

    def refresh_in_graph(self, active: Tensor) -> None:
        """Update the tracked singular vectors of PC layers in the graph for the new weights.

        The method waits for the weights. Nothing changes if `active`, a 0-d bool, is False.
        """
        if self.in_graph:
            self.wait_for_weights()
        for effective in self.in_graph:
            effective.refresh_(self._weight_of(effective), active)

    def guard_in_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the largest normalised singular values and gammas of the PC layers in the graph.

        Both lists contain one tensor `[units]` per layer (`UnitWeight.guard_`), on one of the ranks
        that have the layer. All ranks of a stage must call this method together.
        """
        seen, gammas = [], []
        for effective in self.in_graph:
            largest = effective.guard_(self._weight_of(effective))
            if self.reports(effective.units[0]):
                seen.append(largest)
                gammas.append(effective.gamma.detach().to(largest.dtype))
        return seen, gammas

    def effective_in_graph(self) -> Iterator[tuple[Unit, Tensor, Tensor, Tensor]]:
        """Yield each unit of the PC layers in the graph with PC(W) `[rows, cols]`, gamma `[]` and
        the tracked spectral norm `[]` of W.

        Each unit is yielded on one of its ranks. All ranks of a stage must call this method
        together.
        """
        for effective in self.in_graph:
            domain = self.domain_of(effective.units[0])
            if domain.replicas.rank > 0:
                continue
            weight = self._weight_of(effective)
            local, tracked = effective(weight), effective.tracked_norms(weight)
            for i, unit in enumerate(effective.units):
                whole = gathered(unit, unit.view(local), domain.tensor.group)
                if self.reports(unit):
                    yield unit, whole, effective.gamma[i], tracked[i]

    def _weight_of(self, effective: UnitWeight) -> Tensor:
        return self.parameters[effective.units[0].parameter]

    def sum_in_products(self, active: bool) -> None:
        """Enable or disable gradient accumulation within the matrix products of linear layers.

        If enabled, the reducers' observers do not receive the gradients of these layers.
        """
        sum_in_products_(self.chunks, active)

    def zero_gradients(self) -> None:
        """Clear the gradient buckets."""
        for part in self.domains:
            torch._foreach_zero_(part.buffers.gradients)

    def wait_for_weights(self) -> None:
        """Wait until all new weights of the last step have arrived."""
        for part in self.domains:
            part.wait(list(part.gathers))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Suppress gradient reductions after micro-batches within a context."""
        with contextlib.ExitStack() as stack:
            for part in self.domains:
                stack.enter_context(part.reducer.no_sync())
            yield

    def finish_gradients(self) -> None:
        """Wait until every gradient shard contains the mean over the global batch."""
        self.after_backward()
        for part in self.domains:
            part.reducer.finish()

    def forward_backward(
        self,
        batches: Callable[[], Iterator[Batch]],
        loss: Callable[[Batch], LossFunction],
        *,
        microbatches: int,
        micro_batch: int,
        train: bool,
        length: int | None = None,
    ) -> list[dict[str, Tensor]]:
        """Run all micro-batches of a step through Megatron's schedule.

        If `train` is true, the schedule includes backward passes and the gradient reduction.

        Args:
            batches: function that returns an iterator of batches; called once per chunk. For
                batches without labels, the loss function receives logits `[b, s, v / tensor]` of
                this rank's part of the vocabulary.
            loss: function that returns the loss function of a batch.
            microbatches: number of micro-batches of this rank.
            micro_batch: number of samples per micro-batch, b.
            train: whether to compute gradients.
            length: tokens per sample, before context parallelism splits samples; None for
                `sequence_length`, the largest length.

        Returns the metrics of each micro-batch on the last pipeline stage, and an empty list on
        other stages.
        """

        def forward(
            iterator: Iterator[Batch], chunk: torch.nn.Module
        ) -> tuple[Tensor, LossFunction]:
            batch = next(iterator)
            tokens = batch["tokens"]
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            output = chunk(
                tokens,
                positions,
                None,
                labels=batch.get("labels"),
                packed_seq_params=batch.get("documents"),
            )
            return output, self.share(loss(batch))

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
                seq_length=length or self.sequence_length,
                micro_batch_size=micro_batch,
                forward_only=not train,
            )

    def share(self, loss: LossFunction) -> LossFunction:
        """Return `loss` divided by the context-parallel size.

        `loss` is a mean over this rank's part of each sequence, so the sum over context-parallel
        ranks becomes the mean over whole sequences. Megatron's schedules multiply all losses,
        including balancing losses, by the context-parallel size.
        """
        size = self.config.context_parallel_size

        def shared(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            value, figures = loss(output)
            return value / size, figures

        return loss if size == 1 else shared


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Options for building a model of any shape.

    seed                seed of the initial weights
    sequence_length     tokens per sample
    buckets             planner of a domain's buckets; its `ranks` is set for each domain
    dtype               dtype of weights and activations
    engine              options of the family's `transformer_config`: recompute, fp8
    split               fields of `Split`: qkv_units, split_gate_up
    loss                options of `DecoderModel`: loss_chunk, fused_loss, z_loss
    overlap_reduce      whether reduce-scatters start during the backward pass
    gradient_dtype      dtype of gradient buckets; see `Buffers`
    pc                  config of PC layers; used if they are evaluated in the graph
    radius_scalers      radius scalers by role, where they differ from `InitConfig`
    weights             function that returns the initial value `[*shape]` of a whole unit; None:
                        values are drawn
    fused_backward      whether Triton kernels compute gradients; see `fuse_blocks_`
    compile_backend     backend of torch.compile; None: compile nothing
    """

    seed: int
    sequence_length: int
    buckets: BucketPlanner
    dtype: torch.dtype = torch.float32
    engine: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, Any] = field(default_factory=dict)
    loss: Mapping[str, Any] = field(default_factory=dict)
    overlap_reduce: bool = True
    gradient_dtype: torch.dtype | None = None
    pc: PCConfig | None = None
    radius_scalers: Mapping[str, float] = field(default_factory=dict)
    weights: Callable[[Unit], Tensor] | None = None
    fused_backward: bool = False
    compile_backend: str | None = None


def build_model(model: ModelConfig, groups: Groups, options: ModelOptions) -> ParallelModel:
    """Build and initialise this rank's part of the model, with its buckets.

    Raises ValueError if the declared units do not match the model's parameters.
    """
    code, layout, pc = FAMILIES[model.family].code, groups.layout, options.pc
    specs = chunk_specs(model.layers, layout, groups.pipeline.rank)
    stage_units = declare_stage_units(
        model, specs, layout, expert_rank=groups.expert.rank, **options.split
    )
    config = code.transformer_config(model, dtype=options.dtype, layout=layout, **options.engine)
    chunks = build_chunks(model, config, specs, options, groups)
    in_graph: list[UnitWeight] = []
    if pc is not None and pc.evaluator == "in_graph":
        plain = named_parameters(code.parameter_names, chunks, specs)
        tensor = {domain.name: domain.tensor.group for domain in (groups.dense, groups.experts)}
        in_graph = precondition_(chunks, plain, stage_units[groups.tensor.rank], pc, tensor)
        stage_units = [with_gammas(units, pc) for units in stage_units]
    parameters = named_parameters(code.parameter_names, chunks, specs)
    check_coverage(stage_units[groups.tensor.rank], parameters)
    comm_volume = CommVolume()
    built = ParallelModel(
        config,
        chunks,
        parameters,
        build_domains(stage_units, parameters, groups, options, comm_volume),
        comm_volume,
        options.sequence_length,
        in_graph,
        sums_in_products=groups.device.type == "cuda",
    )
    set_weights_(built, model, options)
    install_hooks(built)
    return built


def named_parameters(
    names: Callable[[torch.nn.Module, Sequence[int]], dict[str, str]],
    modules: Sequence[torch.nn.Module],
    specs: Sequence[ChunkSpec],
) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the chunks by declared global name."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for module, spec in zip(modules, specs, strict=True):
        declared = names(module, spec.layers)
        for name, parameter in module.named_parameters():
            parameters[declared[name]] = parameter
    return parameters


def named_buffers(
    chunks: Iterable[torch.nn.Module], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and value of the chunks' persistent buffers, which are equal on all ranks of a
    pipeline stage.

    The first part of a name is the name of a parameter of the same module:
    `layers.0.router.expert_bias`.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    for chunk in chunks:
        for module in chunk.modules():
            for name, value in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{names[id(next(module.parameters(recurse=False)))]}.{name}", value


def build_chunks(
    model: ModelConfig,
    config: TransformerConfig,
    specs: Sequence[ChunkSpec],
    options: ModelOptions,
    groups: Groups,
) -> list[torch.nn.Module]:
    """Build the Megatron models of this pipeline rank's chunks, with uninitialised weights."""
    with without_advice():
        chunks = [
            FAMILIES[model.family]
            .code.build(
                model,
                config,
                spec,
                sequence_length=options.sequence_length,
                virtual_stage=i if groups.layout.virtual_pipeline > 1 else None,
                **options.loss,
            )
            .to(groups.device)
            for i, spec in enumerate(specs)
        ]
    if options.compile_backend is not None or options.fused_backward:
        fuse_blocks_(chunks, options.compile_backend, backward=options.fused_backward)
    return chunks


def build_domains(
    stage_units: Sequence[Sequence[Unit]],
    parameters: Mapping[str, torch.nn.Parameter],
    groups: Groups,
    options: ModelOptions,
    comm_volume: CommVolume,
) -> list[DomainModel]:
    """Move the dense parameters, and the experts if any, into buckets."""
    domains, sequence = [], groups.layout.sequence_parallel
    for domain in (groups.dense, groups.experts):
        units = units_of_domain(stage_units, domain.name)
        if domain is groups.experts:  # all tensor-parallel ranks declare the same units
            units = [units[groups.tensor.rank]] * domain.tensor.size
        local = units[domain.tensor.rank]
        if not local:
            continue
        bucket_layout = replace(options.buckets, ranks=domain.replicas.size).layout(local)
        members = {unit.parameter: parameters[unit.parameter] for unit in local}
        buffers = Buffers(
            bucket_layout, members, domain.replicas, gradient_dtype=options.gradient_dtype
        )
        reducer = GradientReducer(
            buffers,
            members,
            domain,
            comm_volume,
            tensor_sums=[unit for unit in local if unit.summed_over_tensor(sequence)],
            tied=[unit for unit in local if unit.tied_stage],
            overlap=options.overlap_reduce,
        )
        domains.append(DomainModel(domain, units, buffers, reducer, comm_volume))
    return domains


def set_weights_(built: ParallelModel, model: ModelConfig, options: ModelOptions) -> None:
    """Initialise the weights, the state of PC layers in the graph, and the master weights."""
    scalers = options.radius_scalers
    for part in built.domains:
        by_scaler = grouped(part.units, lambda u: scalers.get(u.role, model.init.radius_scaler))
        for scaler, units in by_scaler.items():
            initialize_(
                built.parameters,
                units,
                replace(model.init, radius_scaler=scaler),
                seed=options.seed,
                layers=model.layers,
                tensor=(part.domain.tensor.rank, part.domain.tensor.size),
                given=options.weights,
                together=partial(in_shares, part.domain.replicas),
            )
    for effective in built.in_graph:
        effective.start_(built._weight_of(effective))
    for part in built.domains:
        part.buffers.reload_masters()


def in_shares(
    axis: Axis, units: Sequence[Unit], compute: Callable[[Sequence[Unit]], Tensor]
) -> Tensor:
    """Return `compute(units)` `[units]`: each rank of the axis computes every `axis.size`-th unit.
    All ranks of the axis must have the same units."""
    share = compute(units[axis.rank :: axis.size])
    figures = share.new_zeros(len(units))
    figures[axis.rank :: axis.size] = share
    return all_reduce_(figures, axis, CommVolume(), "norms of initial weights")


def install_hooks(model: ParallelModel) -> None:
    """Register the gradient reduction with Megatron's schedules, and make modules wait for
    weights."""
    model.config.no_sync_func = model.no_sync
    model.config.finalize_model_grads_func = lambda *_, **__: model.finish_gradients()
    wait_before_forward(model)
    model.sum_in_products(model.sums_in_products)


def wait_before_forward(model: ParallelModel) -> None:
    """Make every module wait for its new weights before its forward pass."""
    place = {
        id(model.parameters[name]): (i, bucket.index)
        for i, part in enumerate(model.domains)
        for name, (bucket, _) in part.buffers.bucket_layout.slots.items()
    }

    def wait(needed: Sequence[tuple[int, int]], *_: object) -> None:
        for domain, bucket in needed:
            model.domains[domain].wait([bucket])

    for chunk in model.chunks:
        for module in chunk.modules():
            # These modules use weights of submodules without calling the submodules.
            inside = isinstance(module, GroupedExperts | RotatedSelfAttention)
            needed = {place[id(p)]: None for p in module.parameters(recurse=inside)}
            if needed:
                module.register_forward_pre_hook(partial(wait, list(needed)))
