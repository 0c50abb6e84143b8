"""How evenly experts are used, and the expert bias that keeps it even."""

from collections.abc import Iterable

import torch
from torch import Tensor

from models.blocks.router import Router
from models.engine import take_losses

ENGINE_LOSSES = {
    "seq_load_balancing_loss": "sequence_aux_loss",
    "global_load_balancing_loss": "global_aux_loss",
    "z_loss": "z_loss",
}
"""The engine's names of the balancing losses, and the config's."""


def max_violation(counts: Tensor) -> Tensor:
    """Return MaxVio `[layers]` of token counts `[layers, experts]`: (max - mean) / mean, 0 if even.

    "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", equation 4.
    """
    mean = counts.mean(dim=1)
    return (counts.amax(dim=1) - mean) / mean


def routers(chunks: Iterable[torch.nn.Module]) -> list[Router]:
    """Return the routers of the model chunks, in forward order."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]


def token_counts(chunks: Iterable[torch.nn.Module]) -> Tensor:
    """Return the tokens `[layers, experts]` that this rank sent to each expert since `balance_`.

    `balance_` and `max_violation` take their sum over the ranks that hold the same layers. It is
    `[0, 0]` where the chunks have no mixture-of-experts layer.
    """
    counts = [router.tokens_per_expert for router in routers(chunks)]
    return torch.stack(counts) if counts else torch.zeros(0, 0)


def layer_numbers(chunks: Iterable[torch.nn.Module]) -> list[int]:
    """Return the global index, from 0, of each layer that has a router."""
    return [router.layer_number - 1 for router in routers(chunks)]


def take_balancing_losses() -> dict[str, Tensor]:
    """Return this rank's part of each balancing loss of every layer `[layers]`, and clear it.

    Without coefficients, summed over the micro-batches since the last call.

    The sequence loss is a sum over the ranks that share a sequence, the global one over all ranks
    of a stage, the z-loss a mean over them.
    """
    return {ENGINE_LOSSES[name]: values for name, values in take_losses().items()}


def balance_(
    chunks: Iterable[torch.nn.Module],
    counts: Tensor,
    *,
    rate: float,
    active: Tensor | None = None,
) -> None:
    """End a step: move every expert bias by `rate` against its load and clear the counts.

    `counts` `[layers, experts]` are those of all ranks. The bias of an expert with less than its
    share rises, of one with more falls ("Auxiliary-Loss-Free Load Balancing Strategy for
    Mixture-of-Experts", algorithm 1). `active` is a 0-d bool; where false no bias moves.
    """
    with torch.no_grad():
        for router, load in zip(routers(chunks), counts, strict=True):
            if router.expert_bias is not None:
                move = rate * torch.sign(load.mean() - load)
                router.expert_bias += move if active is None else move * active
            router.note_load(load, active)
