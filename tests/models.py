"""Models and tokens for tests: built model chunks and initialised units."""

from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.families import FAMILIES, all_units
from models.initialize import initialize_
from models.layout import ChunkSpec
from models.units import Unit


def tokens_of(batch: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and next-token labels `[batch, length]`, identical on all ranks."""
    generator = torch.Generator().manual_seed(11)
    window = torch.randint(vocab, (batch, length + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def losses_of(chunk: torch.nn.Module, batch: int = 4) -> Tensor:
    """Return the per-token losses of a chunk that holds the whole model."""
    tokens, labels = tokens_of(batch, 16, 60)
    losses: Tensor = chunk(tokens, torch.zeros_like(tokens), None, labels=labels)
    return losses


def built(
    model: ModelConfig,
    dtype: torch.dtype = torch.float64,
    *,
    length: int = 16,
    loss_chunk: int | None = None,
    z_loss: bool = False,
    **options: Any,
) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """Build an uninitialised single-process Megatron model. Return it with its parameters by
    declared name.

    `options` are passed to the family's `transformer_config`.
    """
    family, whole = FAMILIES[model.family], ChunkSpec(tuple(range(model.layers)))
    config = family.code.transformer_config(model, dtype=dtype, **options)
    chunk: torch.nn.Module = family.code.build(
        model, config, whole, sequence_length=length, loss_chunk=loss_chunk, z_loss=z_loss
    )
    names = family.code.parameter_names(chunk, whole.layers)
    return chunk, {names[name]: parameter for name, parameter in chunk.named_parameters()}


def drawn(
    model: ModelConfig, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """Like `built`, but with initial weights."""
    chunk, parameters = built(model, dtype, **options)
    initialize_(parameters, all_units(model), model.init, seed=3, layers=model.layers)
    return chunk, parameters


def parameters_of(units: list[Unit]) -> dict[str, Tensor]:
    """Return float64 parameters for `units`, filled with zeros."""
    return {u.parameter: torch.zeros(u.view_shape, dtype=torch.float64).flatten() for u in units}


def initialized(
    model: ModelConfig,
    tensor: tuple[int, int] = (0, 1),
    expert_tensor: tuple[int, int] = (0, 1),
    **options: Any,
) -> tuple[list[Unit], dict[str, Tensor]]:
    """Return the units of `model` on one rank, and their initialised float64 parameters.

    The rank is given as (rank, size) among the ranks that share dense matrices and among the ranks
    that share experts. `options` are passed to `all_units`.
    """
    if model.moe is not None:
        options["expert_tensor"] = expert_tensor[1]
    units = all_units(model, tensor_rank=tensor[0], tensor_size=tensor[1], **options)
    parameters = parameters_of(units)
    for domain, (rank, size) in (("dense", tensor), ("expert", expert_tensor)):
        initialize_(
            parameters,
            [unit for unit in units if unit.domain == domain],
            model.init,
            seed=5,
            layers=model.layers,
            tensor=(rank, size),
        )
    return units, parameters
