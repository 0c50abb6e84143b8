"""The contract of torch optimizers, following torch's tests, for every class in the library.

Intended differences are listed in docs/library.md ("Differences from torch.optim").
"""

import copy
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import spectral
from spectral import SpectralOptimizer
from tests.slow_cases import slow_but

CLASSES = [
    kind
    for kind in vars(spectral).values()
    if inspect.isclass(kind)
    and issubclass(kind, SpectralOptimizer)
    and kind is not SpectralOptimizer
]
EVERY = pytest.mark.parametrize("kind", CLASSES)
Kind = Callable[..., SpectralOptimizer]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Return two matrices."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((6, 4), (4, 5))
    return [Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def loss_of(weights: list[Parameter]) -> Tensor:
    """Return a loss that depends on every entry."""
    x = torch.linspace(-1, 1, 18).view(3, 6).to(weights[0].dtype)
    return ((x @ weights[0]).tanh() @ weights[1]).square().mean()


def train(optimizer: SpectralOptimizer, steps: int = 3) -> list[Tensor]:
    """Take `steps` steps, and return the parameters."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(listed).backward()
        optimizer.step()
    return [p.detach().clone() for p in listed]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@EVERY
def test_the_loss_falls_and_a_closure_has_gradients(kind: Kind) -> None:
    weights = parameters()
    # Spectral descent multiplies its rate by the nuclear norm of the gradient.
    optimizer = kind(weights, lr=1e-2, weight_decay=0)

    def closure() -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(weights)
        loss.backward()
        return loss

    first = optimizer.step(closure)  # spheres move to their radius
    losses = [float(optimizer.step(closure).detach()) for _ in range(12)]
    assert isinstance(first, Tensor) and losses[-1] < 0.98 * losses[0]
    assert optimizer.step() is None


@EVERY
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_nothing_moves_without_gradients(kind: Kind, nonfinite: str) -> None:
    weights = parameters()
    optimizer = kind(weights, nonfinite=nonfinite)
    before, state = [w.detach().clone() for w in weights], copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.zero_grad()
    assert all(w.grad is None for w in weights)
    weights[0].grad = torch.ones_like(weights[0])
    optimizer.step()
    assert not torch.equal(weights[0], before[0]) and torch.equal(weights[1], before[1])
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(now[1][k], v) for k, v in state["state"].get(1, {}).items())
    optimizer.zero_grad(set_to_none=False)
    assert weights[0].grad is not None and not weights[0].grad.any()


@EVERY
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_a_rate_may_be_a_tensor_and_a_group_has_its_own(kind: Kind, option: str) -> None:
    """Compare matrices in groups with different values, given as numbers and as tensors, with
    separate optimizers."""
    rates, apart = (0.02, 0.3), []
    for value in (*rates, *map(torch.tensor, rates)):
        optimizer = kind(parameters(), **{"lr": 0.01, option: value})
        apart.append(train(optimizer, 1))
    groups = [{"params": [p], option: r} for p, r in zip(parameters(), rates, strict=True)]
    mixed = train(kind(groups, lr=0.01), 1)
    for i in range(2):
        torch.testing.assert_close(mixed[i], apart[i][i])
        torch.testing.assert_close(apart[2 + i], apart[i])
    # Their retraction undoes decay, up to rounding.
    undone = option == "weight_decay" and kind in (spectral.MuonSphere, spectral.SpectralSphere)
    assert torch.allclose(apart[0][0], apart[1][0], rtol=1e-4) is undone


@EVERY
def test_a_copy_has_all_attributes_and_steps_by_itself(kind: Kind) -> None:
    for copied in (copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))):
        optimizer = kind(parameters(), lr=0.05)
        train(optimizer)
        twin = copied(optimizer)
        public = {name for name in vars(optimizer) if not name.startswith("_")}
        assert public <= vars(twin).keys() and type(twin) is type(optimizer)
        twin.defaults.pop("differentiable", None)  # torch adds this key to a copy
        assert twin.defaults == optimizer.defaults and repr(twin) == repr(optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        first = train(twin)
        now = optimizer.state_dict()["state"]
        for i, state in before["state"].items():
            assert all(torch.equal(value, now[i][name]) for name, value in state.items())
        assert equal(train(optimizer), first)


@EVERY
def test_the_defaults_make_an_equal_optimizer(kind: Kind) -> None:
    optimizer = kind(parameters(), lr=0.03, weight_decay=0.05)
    again = kind(parameters(), **{k: v for k, v in optimizer.defaults.items() if k != "rule"})
    assert equal(train(optimizer), train(again))


@EVERY
@pytest.mark.parametrize("names", ["none", "saved", "loading", "both"])
def test_a_state_is_loaded_with_and_without_names(kind: Kind, names: str) -> None:
    """The state is saved to a file and loaded with weights_only. Later steps do not change the
    saved state. Its keys are the same as in a new optimizer."""

    def made(named: bool, seed: int) -> SpectralOptimizer:
        listed: list[Any] = parameters(seed)
        return kind([*zip("ab", listed, strict=True)] if named else listed, lr=0.03)

    saved, loading = made(names in ("saved", "both"), 0), made(names in ("loading", "both"), 1)
    keys = [[*state] for state in saved.state_dict()["state"].values()]
    train(saved)
    buffer = io.BytesIO()
    torch.save(saved.state_dict(), buffer)
    assert keys == [[*state] for state in saved.state_dict()["state"].values()]
    buffer.seek(0)
    loading.load_state_dict(torch.load(buffer, weights_only=True))
    listed = [p for group in loading.param_groups for p in group["params"]]
    for new, old in zip(listed, saved.param_groups[0]["params"], strict=True):
        new.data.copy_(old)
    assert equal(train(loading), train(saved))
    assert ("param_names" in loading.param_groups[0]) == (names != "none")


@EVERY
def test_hooks_are_called_around_steps_saves_and_loads(kind: Kind) -> None:
    optimizer, calls = kind(parameters()), list[str]()

    def note(name: str) -> Callable[..., None]:
        return lambda *arguments, **named: calls.append(name)

    handles = [
        register_optimizer_step_pre_hook(note("pre of all")),
        register_optimizer_step_post_hook(note("post of all")),
        optimizer.register_step_pre_hook(note("pre")),
        optimizer.register_step_post_hook(note("post")),
        optimizer.register_state_dict_pre_hook(note("saving")),
        optimizer.register_state_dict_post_hook(note("saved")),
        optimizer.register_state_dict_post_hook(note("saved first"), prepend=True),
        optimizer.register_load_state_dict_pre_hook(note("loading")),
        optimizer.register_load_state_dict_pre_hook(note("loading first"), prepend=True),
        optimizer.register_load_state_dict_post_hook(note("loaded")),
        optimizer.register_load_state_dict_post_hook(note("loaded first"), prepend=True),
    ]
    try:
        train(optimizer, 1)
        assert calls == ["pre of all", "pre", "post", "post of all"]
        calls.clear()
        optimizer.load_state_dict(optimizer.state_dict())
        wanted = ["saving", "saved first", "saved", "loading first", "loading"]
        assert calls == [*wanted, "loaded first", "loaded"]
    finally:
        for handle in handles:
            handle.remove()
    calls.clear()
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == []


@EVERY
def test_a_hook_may_change_what_is_stepped_and_saved(kind: Kind) -> None:
    optimizer, plain = kind(parameters()), kind(parameters())

    def double(changed: Any, *_: object) -> None:
        for parameter in changed.param_groups[0]["params"]:
            parameter.grad.mul_(-1)

    def tag(_: object, saved: dict[str, Any]) -> dict[str, Any]:
        return {**saved, "tag": 1}

    optimizer.register_step_pre_hook(double)
    optimizer.register_state_dict_post_hook(tag)
    assert not equal(train(optimizer, 1), train(plain, 1))
    assert optimizer.state_dict()["tag"] == 1


@EVERY
def test_groups_may_be_added_and_mistakes_are_errors(kind: Kind) -> None:
    first, second = parameters()
    whole, optimizer = kind([first, second]), kind([copy.deepcopy(first)])
    optimizer.add_param_group({"params": copy.deepcopy(second)})
    assert equal(train(optimizer), train(whole))
    with pytest.raises(ValueError, match="more than one parameter group"):
        whole.add_param_group({"params": [second]})
    with pytest.raises(ValueError, match="empty parameter list"):
        kind([])
    with pytest.raises(TypeError, match="given to the optimizer should be an iterable"):
        kind(first)
    with pytest.raises(TypeError, match="ordered collections"):
        kind([{"params": {first, second}}])
    with pytest.raises(TypeError, match="must be an ordered collection, got a set"):
        kind({first, second})
    with pytest.raises(ValueError, match="non-leaf"):
        kind([first * 2])
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        kind([first, "text"])
    small = Parameter(torch.ones(3, 3).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ValueError, match="must have at least 16 bits, got torch.float8_e4m3fn"):
        kind([small])
    with pytest.raises(ValueError, match="real floating-point tensors, got torch.complex64"):
        kind([Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    with pytest.warns(UserWarning, match="duplicate parameters"):
        kind([first, first])


@EVERY
def test_dtypes_may_be_mixed(kind: Kind) -> None:
    """Parameters are updated as by separate optimizers, and keep their dtypes."""
    dtypes = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    starts = [parameters(i, dtype)[0] for i, dtype in enumerate(dtypes)]

    def stepped(together: bool) -> Iterator[Tensor]:
        own = copy.deepcopy(starts)
        options: dict[str, Any] = {"lr": 0.01}
        if "steps" in inspect.signature(kind).parameters:
            options |= {"steps": 5, "msign_dtype": "float32"}  # the default for float64
        lists = [own] if together else [[p] for p in own]
        optimizers = [kind(members, **options) for members in lists]
        for _ in range(2):
            for p in own:
                p.grad = torch.linspace(-1, 1, p.numel()).view_as(p).to(p.dtype).sin()
            for optimizer in optimizers:
                optimizer.step()
        yield from (p.detach() for p in own)

    for start, mixed, alone in zip(starts, stepped(True), stepped(False), strict=True):
        assert mixed.dtype == start.dtype and not torch.equal(mixed, start)
        torch.testing.assert_close(mixed, alone)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.StepLR(o, 2)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2, cycle_momentum=False),
}
SAME_WAY = {"StepLR", "MultiStepLR", "ConstantLR", "LinearLR", "PolynomialLR", "CosineAnnealingLR"}
"""Schedulers that differ from `ExponentialLR` or `LambdaLR` only in their formula."""


@EVERY
@pytest.mark.parametrize(
    "schedules", slow_but([SCHEDULES.keys() - SAME_WAY], [SCHEDULES.keys() - SAME_WAY, SAME_WAY])
)
@pytest.mark.parametrize("tensor", [False, True])
def test_schedulers_drive_the_rate_and_the_step(
    kind: Kind, tensor: bool, schedules: set[str]
) -> None:
    """Schedulers work as with torch's SGD. A step with lr 0 changes nothing, which shows that the
    learning rate is used."""
    for name in sorted(schedules):
        schedule = SCHEDULES[name]
        rate = torch.tensor(0.05) if tensor else 0.05
        own, theirs = kind(parameters(), lr=rate), torch.optim.SGD(parameters(), lr=0.05)
        both = schedule(own), schedule(theirs)
        for _ in range(5):
            for optimizer, one in zip((own, theirs), both, strict=True):
                optimizer.step()  # without gradients
                one.step(1.0) if name == "ReduceLROnPlateau" else one.step()
            rates = [float(o.param_groups[0]["lr"]) for o in (own, theirs)]
            assert rates[0] == pytest.approx(rates[1], rel=1e-6), name
    fresh = kind(parameters(), lr=rates[0])
    own.param_groups[0].update({k: fresh.param_groups[0][k] for k in ("weight_decay",)})
    assert torch.allclose(train(own, 1)[0], train(fresh, 1)[0])
