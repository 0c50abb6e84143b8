"""A small mixture-of-experts model on megatron-core, without our optimizer."""

from dataclasses import replace
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from models import moe
from models.config import ModelConfig, MoEConfig
from models.families import FAMILIES
from models.initialize import initialize_
from models.layout import ChunkSpec, Layout
from models.units import Unit, check_coverage
from parallel.comm.groups import Groups

MODEL = ModelConfig(
    family="moe",
    layers=3,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=12,
    qk_norm=True,
    ffn=48,
    vocab_size=60,
    moe=MoEConfig(experts=4, top_k=2, expert_ffn=16, shared_experts=2, dense_layers=1),
)


def model_with(**changes: Any) -> ModelConfig:
    """MODEL with other settings of its mixture-of-experts layers."""
    return replace(MODEL, moe=replace(MODEL.moe, **changes))


def build(
    model: ModelConfig, groups: Groups, *, dtype: torch.dtype = torch.float64, length: int = 16
) -> tuple[GPTModel, list[Unit], dict[str, torch.nn.Parameter]]:
    """One rank's model of all layers, its units, its initialised parameters by declared name."""
    layers = range(model.layers)
    tensor, expert, expert_tensor = groups.tensor, groups.expert, groups.experts.tensor
    config = moe.transformer_config(
        model,
        dtype=dtype,
        layout=Layout(
            tensor=tensor.size,
            expert=expert.size,
            expert_tensor=expert_tensor.size,
            context=groups.context.size,
            sequence_parallel=tensor.size > 1,
        ),
    )
    chunk = moe.build(model, config, ChunkSpec(tuple(layers)), sequence_length=length)
    units = FAMILIES[model.family].units(
        model,
        layers=layers,
        tensor_rank=tensor.rank,
        tensor_size=tensor.size,
        expert_rank=expert.rank,
        expert_size=expert.size,
        expert_tensor=expert_tensor.size,
    )
    names = moe.parameter_names(chunk, layers)
    parameters = {names[name]: parameter for name, parameter in chunk.named_parameters()}
    check_coverage(units, parameters)
    for domain in (groups.dense, groups.experts):
        initialize_(
            parameters,
            [unit for unit in units if unit.domain == domain.name],
            model.init,
            seed=5,
            layers=model.layers,
            tensor=(domain.tensor.rank, domain.tensor.size),
        )
    return chunk, units, parameters
