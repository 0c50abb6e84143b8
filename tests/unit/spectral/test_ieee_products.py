"""The precision of matmuls inside and outside the optimizer, for any settings of the process."""

from collections.abc import Callable, Iterator
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spectral import SpectralOptimizer, SpectralSphere, preconditioned
from spectral.ieee_products import AUTOCAST, MATMUL, REDUCTIONS, ieee_products, is_ieee
from spectral.rules import RULES

PRODUCTS = ("mm", "bmm", "addmm", "baddbmm")


WAYS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "newer": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "everywhere": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for place in MATMUL:
        place.fp32_precision = "none"


def state() -> list[Any]:
    """Return all precision settings, with a marker for a setting that PyTorch refuses to return."""
    found = [place.fp32_precision for place in MATMUL]
    found += [getattr(torch.backends.cuda.matmul, name) for name in REDUCTIONS]
    try:
        return [*found, torch.get_float32_matmul_precision()]
    except RuntimeError:
        return [*found, "two ways"]


class Precisions(TorchDispatchMode):
    """Records, for every float32 matmul within a context, whether it uses IEEE float32."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.overloadpacket.__name__.rstrip("_") in PRODUCTS:
            self.seen.append(is_ieee())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", WAYS)
def test_inside_products_are_ieee_and_afterwards_as_before(way: str) -> None:
    WAYS[way]()
    before = state()
    with pytest.raises(KeyError), ieee_products():
        assert is_ieee() and not any(state()[2:5])
        with ieee_products():
            assert is_ieee()
        assert is_ieee()
        raise KeyError
    assert state() == before


@pytest.mark.parametrize("way", [way for way in WAYS if way != "nothing"])
def test_a_step_of_the_library_asks_for_ieee_and_the_forward_pass_for_what_was_set(way) -> None:
    WAYS[way]()
    model = nn.Linear(24, 16, bias=False)
    optimizer = SpectralSphere(model.parameters(), lr=1e-2)
    with Precisions() as forward:
        model(torch.ones(2, 24)).sum().backward()
    with Precisions() as step:
        optimizer.step()
    assert forward.seen and not any(forward.seen)
    assert step.seen and all(step.seen)


@pytest.mark.parametrize("way", WAYS)
def test_threads_that_overlap_leave_the_process_as_it_was(way: str) -> None:
    """The thread that enters first also leaves first."""
    WAYS[way]()
    before, barrier, left, inside = state(), Barrier(2, timeout=60), Event(), list[bool]()

    def first() -> None:
        with ieee_products():
            barrier.wait()
        left.set()

    def second() -> None:
        with ieee_products():
            barrier.wait()
            left.wait(60)
            inside.append(is_ieee())

    threads = [Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inside == [True] and state() == before


@pytest.mark.parametrize("rule", RULES)
def test_an_optimizer_within_autocast_is_the_plain_one(rule: str) -> None:
    """The optimizer is created and stepped within autocast."""
    generator = torch.Generator().manual_seed(0)
    start, grad = (torch.randn(24, 16, generator=generator) for _ in range(2))
    weights = []
    for enabled in (False, True):
        weights.append(nn.Parameter(start.clone()))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = SpectralOptimizer([weights[-1]], rule=rule, lr=1e-2)
            entries = [value.clone() for value in made.state[weights[-1]].values()]
            for _ in range(2):
                weights[-1].grad = grad.clone()
                made.step()
            assert torch.is_autocast_enabled("cpu") is enabled
        weights += entries
    half = len(weights) // 2
    assert all(map(torch.equal, weights[:half], weights[half:]))


def test_autocast_of_all_devices_is_off_inside() -> None:
    for device in AUTOCAST:
        torch.set_autocast_enabled(device, True)
    try:
        with ieee_products(), ieee_products():
            assert not any(map(torch.is_autocast_enabled, AUTOCAST))
        assert all(map(torch.is_autocast_enabled, AUTOCAST))
    finally:
        for device in AUTOCAST:
            torch.set_autocast_enabled(device, False)


def test_a_pc_layer_within_autocast_has_the_weight_that_is_merged() -> None:
    layer = nn.Sequential(nn.Linear(16, 24))
    preconditioned(layer, blocks=["0"])
    trained = [*layer[0].parametrizations.parameters()]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            effective = layer[0].weight
            found += [effective.detach(), *torch.autograd.grad(effective.sin().sum(), trained)]
    half = len(found) // 2
    assert all(map(torch.equal, found[:half], found[half:]))
