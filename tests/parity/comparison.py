"""Compare a model with its export to transformers, for the parity tests."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from models.blocks.experts import routers
from models.config import ModelConfig
from models.families import all_units
from models.huggingface.config_json import config_json
from models.huggingface.tensors import their_tensors
from models.initialize import normal_
from models.units import Unit
from tests.models import built, tokens_of

LENGTH = 24


def weight(unit: Unit, model: ModelConfig) -> Tensor:
    """Return a random weight `[*unit.shape]` that is large enough for every part of the layer to
    have an effect. For latents, it is so small that the fixed epsilon of the norm has an effect."""
    if not unit.is_matrix:
        return unit.start + 0.3 * normal_(torch.empty(unit.numel), unit.name, 0)
    drawn = normal_(torch.empty(unit.shape), unit.name, 0) * 2 / unit.shape[1] ** 0.5
    if model.latent is not None and unit.role in ("q_a", "kv_a"):
        drawn[: model.latent.query_rank if unit.role == "q_a" else model.latent.kv_rank] *= 1e-3
    return drawn


def compare(model: ModelConfig, folder: Path) -> None:
    """Give both models the same float32 weights, through files in `folder`, and compare the models.

    The logits and all gradients must be equal.
    """
    ours, parameters = built(model, torch.float32, length=LENGTH)
    with torch.no_grad():
        for unit in all_units(model):
            unit.view(parameters[unit.parameter]).copy_(weight(unit, model).view(unit.axes))
        biases = {f"layers.{i}.router.expert_bias": b for i, b in biased(model, ours).items()}
        theirs = loaded(model, {**parameters, **biases}, folder)

    tokens, labels = tokens_of(3, LENGTH, model.vocab_size or 0)
    our_logits = ours(tokens, torch.zeros_like(tokens), None)[..., : model.vocab_size]
    their_logits = theirs(tokens).logits
    assert their_logits.std() > 0.5
    # The models round differently in float32; logits are of order 1.
    assert (our_logits - their_logits).abs().max() < 1e-4

    for logits in (our_logits, their_logits):
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    gradients = separate({name: p.grad for name, p in theirs.named_parameters()})
    for each in their_tensors(model):
        if not each.buffer:
            expected = gradients.pop(each.name)
            found = each.take(parameters[each.parameter].grad)
            # Not every expert is chosen by these few tokens.
            assert expected.norm() > 0 or ".experts." in each.name, each.name
            assert (found - expected).norm() <= 1e-4 * expected.norm(), each.name
    assert not gradients


def biased(model: ModelConfig, ours: torch.nn.Module) -> dict[int, Tensor]:
    """Set expert biases that change the choice of experts, and return them by layer."""
    found = {}
    for router in routers([ours]):
        layer = router.layer_number - 1
        router.expert_bias.copy_(0.2 * normal_(torch.empty(model.moe.experts), f"bias {layer}", 0))
        found[layer] = router.expert_bias
    assert model.moe is None or len(found) == model.layers - model.moe.dense_layers
    return found


def loaded(model: ModelConfig, ours: dict[str, Tensor], folder: Path) -> torch.nn.Module:
    """Return a float32 transformers model with the weights and settings of our model."""
    content = config_json(model, dtype="float32", positions=LENGTH, end_token=0)
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {
        each.name: each.take(ours[each.parameter]).detach().clone() for each in their_tensors(model)
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert type(theirs).__name__ == content["architectures"][0]
    assert not any(info.values()), info
    return theirs


def separate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients by the names in the file, with experts and gates split."""
    found = {}
    for name, gradient in gradients.items():
        experts, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            for i, both in enumerate(gradient):
                gate, up = both.chunk(2)
                found[f"{experts}.{i}.gate_proj.weight"] = gate
                found[f"{experts}.{i}.up_proj.weight"] = up
        elif kind == "down_proj":
            for i, each in enumerate(gradient):
                found[f"{experts}.{i}.down_proj.weight"] = each
        else:
            found[name] = gradient
    return found
