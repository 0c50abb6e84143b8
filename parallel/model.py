"""The model of one rank: Megatron chunks, their units and gradients, and one step through them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.config import ModelConfig
from models.families import FAMILIES
from models.initialize import initialize_
from models.units import QKVUnits, Unit, check_coverage
from parallel.buffers import Buffers
from parallel.collectives import Traffic
from parallel.cpu import schedule_devices
from parallel.gradients import GradientReducer
from parallel.groups import Groups, Stage, stages
from parallel.layout import Storage, plan_layout

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
"""Token losses `[b, s]` to (scalar loss of the micro-batch, figures to collect)."""


@dataclass
class ParallelModel:
    """One rank's share of the model.

    parameters   declared name -> parameter of this rank (its tensor-parallel shard)
    stage_units  the units of every tensor-parallel rank of this stage, in forward order
    buffers      the flat memory that parameters and gradients are views of
    gathers      per bucket, the all-gather of new weights that may still be under way
    traffic      bytes sent by gradients, optimizer and weights
    """

    config: TransformerConfig
    chunks: list[torch.nn.Module]
    parameters: dict[str, torch.nn.Parameter]
    stage_units: list[list[Unit]]
    tensor_rank: int
    buffers: Buffers
    reducer: GradientReducer
    traffic: Traffic
    sequence_length: int
    gathers: dict[int, dist.Work | None] = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """The units this rank holds, whole or in part, in forward order."""
        return self.stage_units[self.tensor_rank]

    def gradient(self, unit: Unit) -> Tensor:
        """The accumulated gradient of this rank's piece of `unit`, float32 or wider, a view."""
        return unit.view(self.parameters[unit.parameter].main_grad)

    def zero_gradients(self) -> None:
        """None; clears the gradient buckets before a step."""
        self.buffers.zero_gradients()

    def wait_for_weights(self, buckets: Sequence[int] | None = None) -> None:
        """None; waits until the weights of `buckets` (None: of all) are those of the last step."""
        for bucket in list(self.gathers) if buckets is None else buckets:
            handle = self.gathers.pop(bucket, None)
            if handle is not None:
                handle.wait()

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

        def forward(iterator, chunk):
            batch = next(iterator)
            tokens = batch["tokens"]
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            return chunk(tokens, positions, None, labels=batch["labels"]), loss(batch)

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


def build_model(
    model: ModelConfig,
    groups: Groups,
    *,
    seed: int,
    sequence_length: int,
    elementwise: Callable[[Unit], bool],
    dtype: torch.dtype = torch.float32,
    virtual_pipeline: int = 1,
    sequence_parallel: bool = False,
    qkv_units: QKVUnits = "head",
    split_gate_up: bool = True,
    storage: Storage = "auto",
    bucket_numel: int | None = None,
    overlap_reduce: bool = True,
) -> ParallelModel:
    """This rank's share of the model, initialised, its weights and gradients in flat buckets.

    `elementwise` says which units may be cut anywhere, `storage` and `bucket_numel` are those of
    `plan_layout`. Raises ValueError where the model and its declared units disagree.
    """
    family = FAMILIES[model.family]
    tensor = groups.tensor
    config = family.transformer_config(
        model,
        dtype=dtype,
        tensor_size=tensor.size,
        pipeline_size=groups.pipeline.size,
        virtual_size=virtual_pipeline,
        sequence_parallel=sequence_parallel,
    )
    parts = stages(
        model.layers,
        rank=groups.pipeline.rank,
        size=groups.pipeline.size,
        virtual=virtual_pipeline,
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
        ).to(groups.device)
        for i, part in enumerate(parts)
    ]
    parameters = named_parameters(family.parameter_names, chunks, parts)
    stage_units = [
        [
            unit
            for part in parts
            for unit in family.units(
                model,
                layers=part.layers,
                embedding=part.embedding,
                head=part.head,
                qkv_units=qkv_units,
                split_gate_up=split_gate_up,
                tensor_rank=rank,
                tensor_size=tensor.size,
            )
        ]
        for rank in range(tensor.size)
    ]
    units = stage_units[tensor.rank]
    check_coverage(units, parameters)
    layout = plan_layout(
        units,
        ranks=groups.data.size,
        elementwise=elementwise,
        tensor_size=tensor.size,
        storage=storage,
        bucket_numel=bucket_numel,
        parameter_bytes=dtype.itemsize,
    )
    buffers = Buffers(layout, parameters, groups.data)
    initialize_(
        parameters,
        units,
        model.init,
        seed=seed,
        layers=model.layers,
        tensor_rank=tensor.rank,
        tensor_size=tensor.size,
    )
    buffers.reload_masters()
    traffic = Traffic()
    sums = {unit.parameter for unit in units if unit.replicated} if sequence_parallel else set()
    reducer = GradientReducer(
        buffers,
        parameters,
        tensor,
        tensor_sums=frozenset(sums),
        overlap=overlap_reduce,
        traffic=traffic,
    )
    config.no_sync_func = reducer.no_sync
    config.finalize_model_grads_func = lambda *_, **__: reducer.finish()
    built = ParallelModel(
        config, chunks, parameters, stage_units, tensor.rank, buffers, reducer, traffic,
        sequence_length,
    )  # fmt: skip
    wait_before_forward(built)
    return built


def wait_before_forward(model: ParallelModel) -> None:
    """None; makes every module wait, before its forward, for the weights it is about to use."""
    slots = model.buffers.layout.slots
    bucket_of = {id(p): slots[name][0].index for name, p in model.parameters.items()}
    for chunk in model.chunks:
        for module in chunk.modules():
            buckets = sorted({bucket_of[id(p)] for p in module.parameters(recurse=False)})
            if buckets:
                module.register_forward_pre_hook(
                    lambda module, inputs, buckets=buckets: model.wait_for_weights(buckets)
                )


def named_parameters(
    names: Callable[[torch.nn.Module, Sequence[int]], dict[str, str]],
    modules: Sequence[torch.nn.Module],
    parts: Sequence[Stage],
) -> dict[str, torch.nn.Parameter]:
    """Every parameter of the chunks under its declared, global name."""
    found: dict[str, torch.nn.Parameter] = {}
    for module, part in zip(modules, parts, strict=True):
        declared = names(module, part.layers)
        for name, parameter in module.named_parameters():
            found[declared[name]] = parameter
    return found
