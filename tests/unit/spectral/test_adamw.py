"""AdamW by PyTorch's fused step: beside `torch.optim.AdamW`, what may be skipped, and what may be
joined."""

import pytest
import torch
from torch import Tensor

from spectral.optimizer import AdamW, Muon, SpectralOptimizer, are_finite
from spectral.rules import AdamWRule, Stack, Step, take_step

SHAPES = [(1, 40), (3, 5, 7), (2, 1), (1, 0)]
"""Of stacks: a range of a shard, matrices, gammas, and nothing."""


def stacks(dtype: torch.dtype, lr: float | Tensor, active: Tensor | None = None) -> list[Stack]:
    generator = torch.Generator().manual_seed(0)
    rule, step = AdamWRule(), Step(lr, 0.1, active)
    found = []
    for shape in SHAPES:
        weight = torch.randn(shape, generator=generator, dtype=dtype)
        found.append(Stack(weight, torch.zeros_like(weight), rule.init_state(weight), step))
    return found


def gradient(shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step + 1), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch(dtype: torch.dtype) -> None:
    """float64 to its rounding; in float32 PyTorch's own loop rounds in another order."""
    mine = stacks(dtype, torch.tensor(0.01, dtype=torch.float64), torch.tensor(True))
    theirs = [torch.nn.Parameter(s.weight.clone()) for s in mine]
    reference = torch.optim.AdamW(
        theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    for step in range(5):
        for stack, parameter in zip(mine, theirs, strict=True):
            stack.grad.copy_(gradient(stack.grad.shape, step, dtype))
            parameter.grad = stack.grad.clone()
        AdamWRule().update(mine)
        reference.step()
    tolerance = 1e-6 if dtype == torch.float32 else 1e-13
    for stack, parameter in zip(mine, theirs, strict=True):
        torch.testing.assert_close(stack.weight, parameter.detach(), rtol=tolerance, atol=tolerance)


def test_joined_and_single_steps_are_equal_bit_for_bit() -> None:
    """Also single steps of units whose rates come as a tensor."""
    joined, single, rated = (stacks(torch.float32, 0.01) for _ in range(3))
    for step in range(3):
        for each in (joined, single, rated):
            for stack in each:
                stack.grad.copy_(gradient(stack.grad.shape, step, torch.float32))
        AdamWRule().update(joined)
        for stack in single:
            AdamWRule().update([stack])
        for stack in rated:
            rates = torch.full((len(stack.weight),), 0.01, dtype=torch.float64)
            AdamWRule().update([stack._replace(step=Step(rates, 0.1))])
    for one, *others in zip(joined, single, rated, strict=True):
        for other in others:
            torch.testing.assert_close(one.weight, other.weight, rtol=1e-6, atol=1e-8)
            assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
        assert torch.equal(one.weight, others[0].weight)


def test_a_skipped_step_changes_no_bit() -> None:
    mine = stacks(torch.float32, 0.01, torch.tensor(False))
    before = [(s.weight.clone(), {k: v.clone() for k, v in s.state.items()}) for s in mine]
    for stack in mine:
        stack.grad.fill_(torch.nan)
    AdamWRule().update(mine)
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


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_the_optimizer_sees_gradients_that_are_not_finite(
    kind: type[SpectralOptimizer], poison: float
) -> None:
    """And huge ones, whose sum overflows, for what they are."""
    parameters = [torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    optimizer = kind(parameters, lr=0.1, nonfinite="skip")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert parameters[0].grad is not None
    parameters[0].grad[:2] = poison
    optimizer.step()
    skipped = int(optimizer.skipped_steps)
    assert skipped == (poison != 3e38)
    assert torch.equal(parameters[1].detach(), torch.ones(4, 6)) == bool(skipped)


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Of every shape and order of memory that a model may have."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 5), (), (0,), (3, 0), (7,), (6, 4), (8, 8), (2, 3, 4, 5), (3,)]
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    made[5], made[6] = made[5].t(), made[6][::2, ::2]
    made[7] = made[7].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(each) for each in made]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_optimizer_equals_torch_on_any_parameter(nonfinite: str, as_tensor: bool) -> None:
    """Scalars, empty ones, ones without gradient, and any order of memory; gradients stay."""
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    rates = [torch.tensor(x, dtype=torch.float64) if as_tensor else x for x in (0.01, 0.1)]
    ours = AdamW(mine, lr=rates[0], weight_decay=rates[1], nonfinite=nonfinite)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(
        theirs, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1, foreach=False
    )
    for step in range(5):
        for i, (own, other) in enumerate(zip(mine, theirs, strict=True)):
            grad = gradient(own.shape, 10 * step + i, own.dtype)
            without = i == len(mine) - 1 and step % 2
            own.grad, other.grad = (None, None) if without else (grad.clone(), grad)
        ours.step()
        reference.step()
        for own, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-13)
            assert own.grad is None or torch.equal(own.grad, other.grad)


def test_empty_gradients_of_a_device_are_finite() -> None:
    """A device computes norms, which nothing has none of; it is not asked for them."""
    empty, full = torch.zeros(0, device="meta"), torch.ones(3, device="meta")
    assert are_finite([empty, full]).device.type == "meta"
    assert are_finite([empty]).device.type == "meta"
