"""The mixture-of-experts block, compared with a loop over experts in plain PyTorch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from models.blocks.experts import grouped_linear, routers
from models.config import routed_scale
from tests.models import drawn, losses_of
from tests.step_trace import Operations
from tests.tiny_families import mixture

SETTINGS = {
    "sigmoid": {},
    "softmax": {"score": "softmax", "expert_bias": False},
    "own scale": {"routed_scale": 2.5},
    "shared gate": {"shared_gate": True},
    "no shared experts": {"shared_experts": 0},
    "one expert per token": {"top_k": 1},
    "one expert per token, softmax": {"top_k": 1, "score": "softmax", "expert_bias": False},
    "every expert": {"top_k": 4},
}

# float64 on both sides, but the engine rounds scores to float32: errors of about 1e-7 for values of
# order 1.
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def swiglu(x, gate_up, down):
    """Compute a gated feed-forward block whose gate and up are stacked in `gate_up`."""
    gate, up = gate_up.chunk(2)
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def reference(x, weights, moe, bias):
    """Compute the block's output `[tokens, hidden]` by applying every expert to every token."""
    logits = x @ weights["router"].T
    scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(1)
    chosen = (scores + bias).topk(moe.top_k, dim=1).indices
    gates = torch.zeros_like(scores).scatter(1, chosen, 1.0) * scores
    if moe.top_k > 1:
        gates = gates / gates.sum(1, keepdim=True)
    scale = moe.routed_scale
    if scale is None:
        scale = routed_scale(moe.experts, moe.top_k, moe.shared_experts, moe.score)
    out = torch.zeros_like(x)
    for e in range(moe.experts):
        expert = swiglu(x, weights[f"experts.{e}.gate_up"], weights[f"experts.{e}.down"])
        out = out + scale * gates[:, e, None] * expert
    if moe.shared_experts:
        shared = swiglu(x, weights["shared.gate_up"], weights["shared.down"])
        if moe.shared_gate:
            shared = shared * (x @ weights["shared.router"].T).sigmoid()
        out = out + shared
    return out


def weights_of_layer(parameters, layer):
    """Return the parameters of one layer by their names within the layer."""
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix): parameter
        for name, parameter in parameters.items()
        if name.startswith(prefix)
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_block_is_the_sum_over_experts(world, setting):
    model = mixture(**SETTINGS[setting])
    chunk, parameters = drawn(model)
    block = chunk.decoder.layers[2].mlp
    weights = weights_of_layer(parameters, 2)
    weights["router"].data *= 4  # scores that differ
    bias = torch.zeros(4)
    if model.moe.expert_bias:
        bias = torch.tensor([0.0, 0.2, -0.1, 0.0])
        block.router.expert_bias.copy_(bias)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(16, 2, 32, generator=generator, dtype=torch.float64)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    upstream = torch.randn(x.shape, generator=generator, dtype=torch.float64)

    out, _ = block(ours)
    out.backward(upstream)
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    for weight in weights.values():
        weight.grad = None
    expected = reference(theirs.flatten(0, 1), weights, model.moe, bias).view_as(x)
    expected.backward(upstream)

    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)
    used = {name for name in weights if not name.startswith(("attention", "mlp"))}
    torch.testing.assert_close(gradients, {name: weights[name].grad for name in used}, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_those_of_one_expert_after_the_other(world, dtype):
    """Some experts have tokens, and others have none."""
    found = {}
    for backend in ("sequential", "grouped"):
        chunk, parameters = drawn(mixture(backend=backend), dtype)
        block = chunk.decoder.layers[2].mlp
        block.router.expert_bias.copy_(torch.tensor([0.0, 2.0, -2.0, 0.0]))
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(16, 2, 32, generator=generator).to(dtype).requires_grad_()
        out, _ = block(x)
        out.backward(torch.randn(x.shape, generator=generator).to(dtype))
        weights = weights_of_layer(parameters, 2)
        grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
        found[backend] = {"out": out.detach(), "x": x.grad, **grads}
        assert block.router.tokens_per_expert[2] == 0
    assert not found["grouped"]["experts.2.down"].any()
    # Two roundings of the dtype for values and sums of order 1.
    atol = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found["grouped"], found["sequential"], rtol=0, atol=atol)


def test_scores_are_float32_in_a_bfloat16_model(world):
    chunk, parameters = drawn(mixture(), torch.bfloat16)
    router = chunk.decoder.layers[1].mlp.router
    x = torch.randn(16, 2, 32).bfloat16()
    logits = router.gating(x)
    assert logits.dtype == torch.float32
    exact = x.flatten(0, 1).float() @ parameters["layers.1.router"].float().T
    torch.testing.assert_close(logits.flatten(0, 1), exact, rtol=1e-5, atol=1e-6)
    assert router.expert_bias.dtype == router.tokens_per_expert.dtype == torch.float32


@pytest.mark.parametrize(
    "loss", [{"sequence_aux_loss": 1e-1}, {"global_aux_loss": 1e-1}, {"z_loss": 1e-1}]
)
def test_auxiliary_losses_move_the_router_alone(world, loss):
    gradients = []
    for setting in ({}, loss):
        chunk, parameters = drawn(mixture(**setting))
        for router in routers([chunk]):
            if router.earlier_load is not None:  # equal shares give no gradient
                router.earlier_load.copy_(torch.tensor([9.0, 4.0, 1.0, 0.0]))
        losses_of(chunk).mean().backward()
        gradients.append({name: parameter.grad for name, parameter in parameters.items()})
    plain, changed = gradients
    assert not torch.allclose(plain["layers.2.router"], changed["layers.2.router"])
    assert torch.equal(plain["layers.2.experts.0.down"], changed["layers.2.experts.0.down"])


@pytest.mark.parametrize("loss", [{"global_aux_loss": 1e-1}, {"z_loss": 1e-1}])
def test_a_deeper_model_trains_in_a_schedule_after_a_shallower_one_without(world, loss):
    for layers in (3, 4):
        chunk, _ = drawn(replace(mixture(**loss), layers=layers))
        if layers == 4:
            MoEAuxLossAutoScaler.set_loss_scale(torch.ones(1))  # as in Megatron's schedules
        losses_of(chunk).mean().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in chunk.parameters())


def test_a_rank_whose_experts_get_no_token_launches_no_product():
    tokens = torch.zeros(0, 8, requires_grad=True)
    weights = [torch.ones(16, 8, requires_grad=True) for _ in range(2)]
    with Operations() as operations:
        out = grouped_linear(tokens, torch.zeros(2, dtype=torch.int32), weights)
        out.sum().backward()
    assert not any("grouped_mm" in name for name, _ in operations.seen)
    assert out.shape == (0, 16) and tokens.grad.shape == (0, 8)
    assert all(weight.grad.shape == (16, 8) and not weight.grad.any() for weight in weights)
