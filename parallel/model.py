"""The model of one rank: Megatron chunks, their units and gradients, and one step through them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from models.config import ModelConfig
from models.families import FAMILIES
from models.initialize import initialize_
from models.units import QKVUnits, Unit, check_coverage
from parallel.cpu import schedule_devices
from parallel.groups import Groups, Stage, stages

LossFunction = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
"""Token losses `[b, s]` to (scalar loss of the micro-batch, figures to collect)."""


@dataclass(frozen=True)
class ParallelModel:
    """One rank's share of the model.

    parameters   declared name -> parameter of this rank (its tensor-parallel shard)
    units        the units this rank holds, whole or in part, in forward order
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    parameters: dict[str, torch.nn.Parameter]
    units: list[Unit]
    sequence_length: int

    def gradient(self, unit: Unit) -> Tensor:
        """The accumulated gradient of this rank's piece of `unit`, float32 or wider, a view."""
        return unit.view(self.parameters[unit.parameter].main_grad)

    def zero_gradients(self) -> None:
        """None; clears the gradient buffers before a step."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

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
    dtype: torch.dtype = torch.float32,
    virtual_pipeline: int = 1,
    sequence_parallel: bool = False,
    qkv_units: QKVUnits = "head",
    split_gate_up: bool = True,
) -> ParallelModel:
    """This rank's share of the model, initialised. 16-bit weights get float32 gradients.

    Raises ValueError where the model and its declared units disagree.
    """
    family = FAMILIES[model.family]
    config = family.transformer_config(
        model,
        dtype=dtype,
        tensor_size=groups.tensor.size,
        pipeline_size=groups.pipeline.size,
        virtual_size=virtual_pipeline,
        sequence_parallel=sequence_parallel,
    )
    config.finalize_model_grads_func = finalize_model_grads
    parts = stages(
        model.layers,
        rank=groups.pipeline.rank,
        size=groups.pipeline.size,
        virtual=virtual_pipeline,
    )
    modules = [
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
    parameters = named_parameters(family.parameter_names, modules, parts)
    units = [
        unit
        for part in parts
        for unit in family.units(
            model,
            layers=part.layers,
            embedding=part.embedding,
            head=part.head,
            qkv_units=qkv_units,
            split_gate_up=split_gate_up,
            tensor_rank=groups.tensor.rank,
            tensor_size=groups.tensor.size,
        )
    ]
    check_coverage(units, parameters)
    initialize_(
        parameters,
        units,
        model.init,
        seed=seed,
        layers=model.layers,
        tensor_rank=groups.tensor.rank,
        tensor_size=groups.tensor.size,
    )
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=dtype.itemsize < 4, overlap_grad_reduce=torch.cuda.is_available()
    )
    chunks = [
        DistributedDataParallel(config, ddp, module, disable_bucketing=i > 0)
        for i, module in enumerate(modules)
    ]
    return ParallelModel(config, chunks, parameters, units, sequence_length)


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
