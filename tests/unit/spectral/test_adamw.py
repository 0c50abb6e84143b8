"""AdamW by PyTorch's fused step: beside `torch.optim.AdamW`, what may be skipped, and what may be
joined."""

import pytest
import torch
from torch import Tensor

from spectral.rules import AdamWRule
from spectral.rules.base import Stack, State, take_step

SHAPES = [(1, 40), (3, 5, 7), (2, 1), (1, 0)]
"""Of stacks: a range of a shard, matrices, gammas, and nothing."""


def stacks(dtype: torch.dtype, lr: float | Tensor, *, trusted: bool) -> list[Stack]:
    generator = torch.Generator().manual_seed(0)
    rule = AdamWRule()
    found = []
    for shape in SHAPES:
        weight = torch.randn(shape, generator=generator, dtype=dtype)
        found.append(Stack(weight, torch.zeros_like(weight), rule.init_state(weight), lr, trusted))
    return found


def gradient(shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step + 1), dtype=dtype)


@pytest.mark.parametrize("trusted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype: torch.dtype, trusted: bool) -> None:
    """float64 to its rounding; in float32 PyTorch's own loop rounds in another order."""
    mine = stacks(dtype, torch.tensor(0.01, dtype=torch.float64), trusted=trusted)
    theirs = [torch.nn.Parameter(s.weight.clone()) for s in mine]
    reference = torch.optim.AdamW(
        theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    for step in range(5):
        for stack, parameter in zip(mine, theirs, strict=True):
            stack.grad.copy_(gradient(stack.grad.shape, step, dtype))
            parameter.grad = stack.grad.clone()
        AdamWRule().step_many(mine, weight_decay=0.1, active=torch.tensor(True))
        reference.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for stack, parameter in zip(mine, theirs, strict=True):
        torch.testing.assert_close(stack.weight, parameter.detach(), rtol=tolerance, atol=tolerance)


def test_joined_and_single_steps_are_equal_bit_for_bit() -> None:
    joined, single = (stacks(torch.float32, 0.01, trusted=t) for t in (True, False))
    for step in range(3):
        for each in (joined, single):
            for stack in each:
                stack.grad.copy_(gradient(stack.grad.shape, step, torch.float32))
            AdamWRule().step_many(each, weight_decay=0.1)
    for one, other in zip(joined, single, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)


def test_a_skipped_step_changes_no_bit_of_trusted_stacks() -> None:
    mine = stacks(torch.float32, 0.01, trusted=True)
    before = [(s.weight.clone(), {k: v.clone() for k, v in s.state.items()}) for s in mine]
    for stack in mine:
        stack.grad.fill_(torch.nan)
    AdamWRule().step_many(mine, weight_decay=0.1, active=torch.tensor(False))
    for stack, (weight, state) in zip(mine, before, strict=True):
        assert torch.equal(stack.weight, weight)
        assert all(torch.equal(stack.state[name], state[name]) for name in state)


def test_a_matrix_in_another_order_of_memory() -> None:
    weight, grad = torch.randn(1, 6, 4).mT, torch.randn(1, 4, 6)
    plain = weight.contiguous()
    for each in (weight, plain):
        rule = AdamWRule()
        take_step(rule, each, grad.clone(), rule.init_state(each), lr=0.1, weight_decay=0.1)
    assert torch.equal(weight, plain)


def poisoned(name: str, value: float) -> State:
    """A state after three sound steps of two units, of which the second is poisoned."""
    rule, weight = AdamWRule(), torch.ones(2, 50)
    state = rule.init_state(weight)
    for step in range(3):
        take_step(rule, weight, gradient(weight.shape, step, torch.float32), state, lr=0.1)
    state[name][1].view(-1)[0] = value
    return state


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("momentum", torch.nan), ("momentum", torch.inf), ("momentum", 1e30), ("momentum", 1e9),
        ("variance", torch.nan), ("variance", -1e-3), ("step", torch.nan), ("step", -1.0),
    ],
)  # fmt: skip
def test_states_of_no_gradient_are_seen(name: str, value: float) -> None:
    assert AdamWRule().sound_state(poisoned(name, value)).tolist() == [True, False]


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e12, 1e18])
@pytest.mark.parametrize("beta2", [0.9, 0.95, 0.999])
def test_states_of_any_finite_gradients_are_sound(size: float, beta2: float) -> None:
    """Of all sizes up to where squares overflow, a single one, and ones that change suddenly."""
    rule = AdamWRule(beta2=beta2)
    for sizes in ([size] * 20, [size] + [0.0] * 30, [1e-6] * 10 + [size], [size] + [1e-9] * 60):
        weight = torch.ones(1, 30)
        state = rule.init_state(weight)
        for step, each in enumerate(sizes):
            grad = each * gradient(weight.shape, step, torch.float32)
            report = take_step(rule, weight, grad, state, lr=1e-3)
            assert report["refused"].tolist() == [0.0]
