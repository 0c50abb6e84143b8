"""AdamW, which uses PyTorch's fused step, compared with `torch.optim.AdamW`; and nonfinite
gradients."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from spectral import AdamW, Muon, SpectralOptimizer
from spectral.device_values import are_finite, surely_finite


def gradient(shape: torch.Size, step: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step + 1), dtype=dtype)


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_the_optimizer_sees_gradients_that_are_not_finite(kind, poison, nonfinite) -> None:
    """Huge gradients whose sum overflows count as finite."""
    parameters = [torch.nn.Parameter(torch.ones(4, 6)) for _ in range(2)]
    named = zip(("first", "second"), parameters, strict=True)
    optimizer = kind(named, lr=0.1, nonfinite=nonfinite)  # type: ignore[arg-type]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert parameters[0].grad is not None
    parameters[0].grad[:2] = poison
    stays = poison != 3e38
    raises = stays and nonfinite == "raise"
    said = "the gradient of first is not finite"
    with pytest.raises(FloatingPointError, match=said) if raises else nullcontext():
        optimizer.step()
    assert int(optimizer.skipped_steps) == (stays and not raises)
    assert torch.equal(parameters[1].detach(), torch.ones(4, 6)) == stays


@pytest.mark.parametrize("sizes", [(3,), (2000,), (3, 2000), (2000, 0, 3, 2000, 3)])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float16, torch.float32)])
def test_any_element_of_small_and_large_tensors_is_looked_at(sizes, dtypes) -> None:
    """Small tensors are joined, even if their dtypes differ."""
    tensors = [torch.ones(n, dtype=dtypes[i % len(dtypes)]) for i, n in enumerate(sizes)]
    assert surely_finite(tensors)
    for tensor in (tensor for tensor in tensors if tensor.numel()):
        for place in (0, -1):
            for poison in (torch.nan, torch.inf, -torch.inf):
                tensor[place] = poison
                assert not surely_finite(tensors)
                tensor[place] = 1.0


def test_a_parameter_may_change_its_group() -> None:
    """The order of the parameters stays the same, so it does not reveal the change of groups."""
    first, second, third = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = AdamW([{"params": [first], "lr": 0.0}, {"params": [second, third], "lr": 0.1}])
    for moved in (False, True):
        for parameter in (first, second, third):
            parameter.grad = torch.ones(3)
        before = second.detach().clone()
        optimizer.step()
        assert torch.equal(second.detach(), before) == moved
        optimizer.param_groups[0]["params"].append(second)
        optimizer.param_groups[1]["params"] = [third]


@pytest.mark.parametrize("kind", [AdamW, Muon])
def test_weights_in_16_bits_may_be_cast_to_32(kind: type[SpectralOptimizer]) -> None:
    """Weights are cast in place, as by a module, with the state of a run without master weights.
    Counters stay in 32 bits, because bfloat16 counts only up to 256."""
    (parameter,) = mine = [torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16))]
    optimizer = kind(mine, lr=0.1, master_weights=False)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        parameter.data = parameter.data.to(dtype)
        parameter.grad = torch.ones(4, 6, dtype=dtype)
        optimizer.step()
        dtypes = {name: value.dtype for name, value in optimizer.state[parameter].items()}
        assert dtypes == {name: torch.float32 if name == "step" else dtype for name in dtypes}


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return parameters of every kind of shape and memory format that occurs in models."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(4, 5), (), (0,), (3, 0), (7,), (6, 4), (8, 8), (2, 3, 4, 5), (3,)]
    made = [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
    made[5], made[6] = made[5].t(), made[6][::2, ::2]
    made[7] = made[7].to(memory_format=torch.channels_last)
    return [torch.nn.Parameter(each) for each in made]


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_the_optimizer_equals_torch_on_any_parameter(nonfinite: str, as_tensor: bool) -> None:
    """Test scalars, empty tensors, parameters without gradients, and any memory format. Gradients
    do not change."""
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
    """The norm of empty tensors is not computed on devices, because they have none."""
    empty, full = torch.zeros(0, device="meta"), torch.ones(3, device="meta")
    assert are_finite([empty, full]).device.type == "meta"
    assert are_finite([empty]).device.type == "meta"
