"""One rank's model: Megatron chunks with their units and gradients, and the forward-backward
pass."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.utils import parametrize

from models.blocks.compiled import fuse_blocks_
from models.blocks.experts import GroupedExperts
from models.blocks.in_graph_pc import UnitWeight, gathered, precondition_, with_gammas
from models.blocks.self_attention import RotatedSelfAttention
from models.config import ModelConfig
from models.families import FAMILIES, declare_stage_units
from models.initialize import initialize_
from models.layout import ChunkSpec
from models.pc_config import PCConfig
from models.units import Unit, check_coverage, units_of_domain
from parallel.comm.collectives import CommVolume, all_reduce_
from parallel.comm.cpu import schedule_devices
from parallel.comm.groups import Axis, Domain, Groups, chunk_specs
from parallel.storage.bucket_layout import BucketPlanner
from parallel.storage.domain_model import DomainModel, WeightProducts
from spectral.batching import grouped

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
"""Function that maps token losses (`[b, s]`, or `[2, b, s]` if there is a z-loss; see
`DecoderModel`) to the scalar loss of a micro-batch and the metrics to collect."""

Batch = dict[str, Any]
"""A micro-batch: `tokens` `[b, s]`; `labels` `[b, s]` for training or validation; `documents`
(`Documents`) for packed documents; and any other inputs of the loss function."""


@dataclass
class ParallelModel:
    """One rank's part of the model.

    chunks            model chunks on this pipeline rank
    parameters        this rank's tensor-parallel piece of each parameter, by declared name
    domains           one `DomainModel` for the dense parameters and, if any, one for the experts
    comm_volume       bytes sent for gradients, the optimizer and weights
    sequence_length   tokens per sample, before the context-parallel split
    in_graph          PC layers whose effective weight is computed in every forward pass
    sums_in_products  whether linear layers accumulate weight gradients directly in the buckets
    after_backward    function called after the backward pass, before waiting for gradients from
                      other ranks
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
        """Units that this rank stores in whole or in part, by domain and then in forward order."""
        return [unit for part in self.domains for unit in part.units]

    def domain_of(self, unit: Unit) -> Domain:
        """Return the domain of `unit`."""
        return next(part.domain for part in self.domains if part.domain.name == unit.domain)

    def reports(self, unit: Unit) -> bool:
        """Return whether this rank reports `unit`. The rank must hold a part of the unit."""
        domain = self.domain_of(unit)
        first = domain.replicas.rank == 0 and (unit.shard_axis is None or domain.tensor.rank == 0)
        return first and not unit.is_copy

    def refresh_in_graph(self, active: Tensor) -> None:
        """Update the tracked singular vectors of in-graph PC layers for the new weights.

        Waits for the all-gathers of the weights. If `active`, a 0-d bool tensor, is False, this is
        a no-op.
        """
        if self.in_graph:
            self.wait_for_weights()
        for effective in self.in_graph:
            effective.refresh_(self._weight_of(effective), active)

    def guard_in_graph(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the largest normalised singular values and the gammas of in-graph PC layers.

        Both lists contain one tensor `[units]` per layer (see `UnitWeight.guard_`). For each layer,
        only one of the ranks that hold the layer returns tensors. Collective: all ranks of a stage
        must call this method.
        """
        seen, gammas = [], []
        for effective in self.in_graph:
            largest = effective.guard_(self._weight_of(effective))
            if self.reports(effective.units[0]):
                seen.append(largest)
                gammas.append(effective.gamma.detach().to(largest.dtype))
        return seen, gammas

    def effective_in_graph(self) -> Iterator[tuple[Unit, Tensor, Tensor, Tensor]]:
        """Yield (unit, PC(W) `[rows, cols]`, gamma `[]`, tracked spectral norm of W `[]`) for each
        unit of the in-graph PC layers.

        Each unit is yielded on only one of the ranks that hold it. Collective: all ranks of a stage
        must call this method.
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
        """Enable or disable fused gradient accumulation in the weight gradient GEMMs of linear
        layers.

        While fused accumulation is enabled, autograd receives None as the weight gradient of these
        layers, and the reducers' observers are not called for these weights. Weights computed
        during the forward pass have no `main_grad`, so their layers are excluded.
        """
        layers.fused_weight_gradient_mlp_cuda = WeightProducts
        for chunk in self.chunks:
            for module in chunk.modules():
                if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
                    computed = parametrize.is_parametrized(module)
                    module.gradient_accumulation_fusion = active and not computed

    def zero_gradients(self) -> None:
        """Clear the gradient buckets."""
        for part in self.domains:
            torch._foreach_zero_(part.gradients)

    def wait_for_weights(self) -> None:
        """Wait until the weights that the last step updated have been all-gathered."""
        for part in self.domains:
            part.wait(list(part.gathers))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context manager to disable gradient reduction after micro-batches."""
        for part in self.domains:
            part.is_last = False
        try:
            yield
        finally:
            for part in self.domains:
                part.is_last = True

    def finish_gradients(self) -> None:
        """Wait until every gradient shard holds the mean gradient over the global batch."""
        self.after_backward()
        for part in self.domains:
            part.finish_gradients()

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

        If `train` is true, this includes the backward passes and the gradient reduction.

        Args:
            batches: function that returns an iterator over batches; called once per chunk. If
                batches contain no labels, the loss function receives the logits `[b, s, v /
                tensor]` of this rank's vocabulary shard.
            loss: function that maps a batch to its loss function.
            microbatches: number of micro-batches on this rank.
            micro_batch: number of samples per micro-batch (b).
            train: whether to compute gradients.
            length: tokens per sample, before the context-parallel split; at most `sequence_length`,
                which is the default.

        Returns the metrics of each micro-batch on the last pipeline stage, and an empty list on all
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

        `loss` averages over this rank's part of each sequence. After the division, summing over
        context-parallel ranks gives the mean over whole sequences. Megatron's schedules multiply
        all losses, including balancing losses, by the context-parallel size.
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
    buckets             bucket planner; `ranks` is set separately for each domain
    dtype               dtype of weights and activations
    engine              options passed to the family's `transformer_config`: recompute, fp8
    split               fields of `Split`: qkv_units, split_gate_up
    loss                options of `DecoderModel`: loss_chunk, fused_loss, z_loss
    overlap_reduce      whether reduce-scatters start during the backward pass
    gradient_dtype      dtype of gradient buckets; see `DomainModel`
    pc                  PC layer config; only used if PC layers are evaluated in the graph
    radius_scalers      radius scalers by role; other roles use the scaler in `InitConfig`
    weights             function that returns the initial value `[*shape]` of a whole unit; None:
                        random initialisation
    fused_backward      whether Triton kernels compute gradients; see `fuse_blocks_`
    compile_backend     torch.compile backend; None: no compilation
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
    """Build and initialise this rank's part of the model and its buckets.

    Raises ValueError if the declared units do not match the model's parameters.
    """
    code, layout, pc = FAMILIES[model.family].code, groups.layout, options.pc
    specs = chunk_specs(model.layers, layout, groups.pipeline.rank)
    stage_units = declare_stage_units(
        model, specs, layout, expert_rank=groups.expert.rank, **options.split
    )
    config = code.transformer_config(model, dtype=options.dtype, layout=layout, **options.engine)
    chunks = build_chunks(model, config, specs, options, groups)
    parameters = named_parameters(code.parameter_names, chunks, specs)
    in_graph: list[UnitWeight] = []
    if pc is not None and pc.evaluator == "in_graph":
        tensor = {domain.name: domain.tensor.group for domain in (groups.dense, groups.experts)}
        in_graph = precondition_(chunks, parameters, stage_units[groups.tensor.rank], pc, tensor)
        stage_units = [with_gammas(units, pc) for units in stage_units]
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
    """Map declared global names to the parameters of the chunks."""
    parameters: dict[str, torch.nn.Parameter] = {}
    for module, spec in zip(modules, specs, strict=True):
        declared = names(module, spec.layers)
        for name, parameter in module.named_parameters():
            parameters[declared[name]] = parameter
    return parameters


def named_buffers(
    chunks: Iterable[torch.nn.Module], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the chunks' persistent buffers, which are identical on all
    ranks of a pipeline stage.

    Each name starts with the name of a parameter of the same module, as in
    `layers.0.router.expert_bias`, where the parameter is `layers.0.router`.
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
    """Build the Megatron models for this pipeline rank's chunks, with uninitialised weights."""
    code, virtual = FAMILIES[model.family].code, groups.layout.virtual_pipeline > 1
    chunks = [
        code.build(
            model,
            config,
            spec,
            sequence_length=options.sequence_length,
            virtual_stage=i if virtual else None,
            **options.loss,
        ).to(groups.device)
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
    """Move the dense parameters and, if any, the experts into buckets."""
    domains = []
    for domain in (groups.dense, groups.experts):
        units = units_of_domain(stage_units, domain.name)
        if domain is groups.experts:  # all tensor-parallel ranks declare the same units
            units = [units[groups.tensor.rank]] * domain.tensor.size
        local = units[domain.tensor.rank]
        if local:
            built = DomainModel(
                domain,
                units,
                parameters,
                replace(options.buckets, ranks=domain.replicas.size).layout(local),
                comm_volume,
                gradient_dtype=options.gradient_dtype,
                overlap=options.overlap_reduce,
                sequence_parallel=groups.layout.sequence_parallel,
            )
            domains.append(built)
    return domains


def set_weights_(built: ParallelModel, model: ModelConfig, options: ModelOptions) -> None:
    """Initialise the weights, the state of in-graph PC layers, and the master weights."""
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
        part.reload_masters()


def in_shares(
    axis: Axis, units: Sequence[Unit], compute: Callable[[Sequence[Unit]], Tensor]
) -> Tensor:
    """Return `compute(units)` `[units]`, with the work split across the axis: each rank computes
    every `axis.size`-th unit. All ranks of the axis must pass the same units."""
    share = compute(units[axis.rank :: axis.size])
    figures = share.new_zeros(len(units))
    figures[axis.rank :: axis.size] = share
    return all_reduce_(figures, axis, CommVolume(), "norms of initial weights")


def install_hooks(model: ParallelModel) -> None:
    """Hook the gradient reduction into Megatron's schedules, and make modules wait for their
    weights."""
    model.config.no_sync_func = model.no_sync
    model.config.finalize_model_grads_func = lambda *_, **__: model.finish_gradients()
    bucket_of = {
        id(model.parameters[name]): (i, bucket.index)
        for i, part in enumerate(model.domains)
        for name, (bucket, _) in part.bucket_layout.slots.items()
    }

    def wait(needed: Sequence[tuple[int, int]], *_: object) -> None:
        for domain, bucket in needed:
            model.domains[domain].wait([bucket])

    for chunk in model.chunks:
        for module in chunk.modules():
            # These modules use their submodules' weights without calling the submodules.
            inside = isinstance(module, GroupedExperts | RotatedSelfAttention)
            needed = {bucket_of[id(p)]: None for p in module.parameters(recurse=inside)}
            if needed:
                module.register_forward_pre_hook(partial(wait, list(needed)))
    model.sum_in_products(model.sums_in_products)
