"""Activation recomputation gives equal losses and gradients and keeps fewer bytes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.blocks.experts import token_counts
from models.config import ModelConfig
from parallel.comm.groups import Groups
from tests.models import drawn, losses_of
from tests.tiny_families import MIXTURE, tiny_model

SHAPE: dict[str, Any] = {"ffn": 64, "head_dim": None}
MODELS = {
    "llama": tiny_model("llama", **SHAPE),
    "deepseek": tiny_model("deepseek", **SHAPE, moe=MIXTURE | {"z_loss": 0.01}),
}


def loss_and_gradients(model: ModelConfig, recompute: str) -> dict[str, Any]:
    """Return the loss, the gradients, the number of tokens per expert, and the bytes kept for the
    backward pass."""
    chunk, parameters = drawn(model, recompute=recompute)
    weights = {parameter.untyped_storage().data_ptr() for parameter in parameters.values()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = losses_of(chunk).mean()
    size = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    loss.backward()
    return {
        "loss": loss.detach(),
        "gradients": {name: parameter.grad for name, parameter in parameters.items()},
        "counts": token_counts([chunk]),
        "kept": size,
    }


@pytest.mark.parametrize("name", MODELS)
def test_recomputation_changes_what_is_kept_and_nothing_else(name: str, world: Groups) -> None:
    results = {
        mode: loss_and_gradients(MODELS[name], mode) for mode in ("none", "selective", "full")
    }
    plain = results["none"]
    for mode in ("selective", "full"):
        found = results[mode]
        assert torch.equal(found["loss"], plain["loss"])
        assert torch.equal(found["counts"], plain["counts"])  # counted once
        close = {"rtol": 1e-10, "atol": 1e-12}
        torch.testing.assert_close(found["gradients"], plain["gradients"], **close)
    assert results["full"]["kept"] < 0.8 * results["selective"]["kept"]
    assert results["selective"]["kept"] < 0.9 * plain["kept"]
