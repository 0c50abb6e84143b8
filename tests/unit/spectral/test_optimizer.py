"""The optimizer classes, compared with torch's optimizers, and the contract of an optimizer."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from spectral import (
    AdamW,
    Muon,
    SpectralOptimizer,
    SpectralSphere,
    merge_,
    preconditioned,
    split_parameters,
)
from spectral.options import WHOLE, fields_of
from spectral.rules import RULES


def small_net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(20, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 20)
    )


def backward(net: nn.Module, seed: int) -> Tensor:
    tokens = torch.randint(0, 20, (64,), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(net(tokens), tokens)
    loss.backward()
    return loss.detach()


def optimizer_for(net: nn.Sequential, name: str, **options: object) -> SpectralOptimizer:
    split = split_parameters(net, elementwise=[net[-1]])
    groups = [{"params": split.matrices}, {"params": split.others, "rule": "adamw", "lr": 1e-2}]
    return SpectralOptimizer(groups, rule=name, lr=1e-2, **options)  # type: ignore[arg-type]


def train(net: nn.Sequential, optimizer: SpectralOptimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        optimizer.zero_grad()
        losses.append(backward(net, step).item())
        optimizer.step()
    return losses


def weights(net: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (32, 32)])
def test_muon_equals_torch(nesterov: bool, shape: tuple[int, int]) -> None:
    """The coefficients, steps, dtype and scale are the same. torch divides by the norm in bfloat16,
    but this library in float32. Over five steps, entries therefore differ by bfloat16 rounding,
    2^-8 of their size."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    a = Muon(
        [ours], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, schedule="simple",
        steps=5, msign_dtype="bfloat16", scale="spectral_kaiming",
    )  # fmt: skip
    b = torch.optim.Muon(
        [theirs], lr=0.02, weight_decay=0.1, momentum=0.9, nesterov=nesterov, ns_steps=5,
        adjust_lr_fn="original",
    )  # fmt: skip
    for _ in range(12):
        grad = torch.randn(shape, generator=generator)
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        a.step()
        b.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
    momentum = b.state[theirs]["momentum_buffer"]
    torch.testing.assert_close(a.state[ours]["momentum"], momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["numbers", "tensors", "both"])
@pytest.mark.parametrize("name", RULES)
def test_groups_that_differ_in_their_rate_are_stepped_each_with_its_own(name, kind) -> None:
    """Compare learning rates that differ by layer and are changed by a scheduler with one optimizer
    per layer."""
    shape, count = (6, 10), 3
    start = [torch.randn(shape, dtype=torch.float64) for _ in range(count)]
    grads = [[torch.randn_like(x) for x in start] for _ in range(2)]
    together = [nn.Parameter(x.clone()) for x in start]
    apart = [nn.Parameter(x.clone()) for x in start]
    rates: list[float | Tensor] = [0.02, 0.01, 0.02]
    if kind != "numbers":
        tensors = [torch.tensor(float(r), dtype=torch.float64) for r in rates]
        rates = [*tensors[:2], rates[2] if kind == "both" else tensors[2]]
    groups = [{"params": [p], "lr": r} for p, r in zip(together, rates, strict=True)]
    one = SpectralOptimizer(groups, rule=name)
    each = [SpectralOptimizer([p], rule=name, lr=r) for p, r in zip(apart, rates, strict=True)]
    for step in range(2):
        for i in range(count):
            together[i].grad, apart[i].grad = grads[step][i].clone(), grads[step][i].clone()
        one.step()
        # Matrices of one rate form a stack; an elementwise rule takes parameters unchanged.
        joins = kind == "numbers" and RULES[name].whole_matrix
        sizes = [2, 1] if joins else count * [1]
        assert [len(parameters) for parameters, _ in one.last_reports] == sizes
        for optimizer in each:
            optimizer.step()
        for group in [*one.param_groups, *(o.param_groups[0] for o in each)]:
            group["lr"] = group["lr"] * 0.7
    for i, (x, y) in enumerate(zip(together, apart, strict=True)):
        # float64: products of a batch and of a single matrix differ by rounding alone.
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)
        assert x.grad is not None and torch.equal(x.grad, grads[1][i])  # unchanged


def test_groups_that_differ_in_more_than_their_rate_do_not() -> None:
    parameters = [nn.Parameter(torch.randn(4, 6)) for _ in range(3)]
    options: list[dict[str, object]] = [{}, {"weight_decay": 0.3}, {"momentum": 0.5}]
    optimizer = Muon(
        [{"params": [p], **more} for p, more in zip(parameters, options, strict=True)], lr=0.1
    )
    for parameter in parameters:
        parameter.grad = torch.randn(4, 6)
    optimizer.step()
    assert [len(chunk) for chunk, _ in optimizer.last_reports] == [1, 1, 1]


def test_convolution_weights_are_flattened() -> None:
    torch.manual_seed(0)
    for layout in (torch.contiguous_format, torch.channels_last):
        convolution = nn.Parameter(torch.randn(8, 4, 3, 3).to(memory_format=layout))
        matrix = nn.Parameter(convolution.detach().flatten(1).clone())
        grad = torch.randn(8, 4, 3, 3)
        convolution.grad, matrix.grad = grad.to(memory_format=layout), grad.flatten(1)
        for p in (convolution, matrix):
            SpectralSphere([p]).step()
        torch.testing.assert_close(convolution.flatten(1), matrix)


def test_a_weight_with_three_axes_needs_units() -> None:
    values, grad = torch.randn(2, 6, 4), torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match=r"experts of shape \(2, 6, 4\) may be a stack of "):
        Muon([("experts", nn.Parameter(values))])

    def stepped(value: Tensor, grad: Tensor, units: dict[str, bool] | None = None) -> Tensor:
        parameter = nn.Parameter(value.clone())
        parameter.grad = grad.clone()
        Muon([{"params": [parameter], "units": units}]).step()
        return parameter.detach()

    parts = [*map(stepped, values, grad)]
    torch.testing.assert_close([*stepped(values, grad, {"stacked": True})], parts)
    whole = stepped(values.flatten(1), grad.flatten(1))
    torch.testing.assert_close(stepped(values, grad, {}).flatten(1), whole)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", ["gradient", "rate"])
def test_what_is_no_number_raises_before_anything_moves(place: str, bad: float) -> None:
    net = small_net()
    optimizer = optimizer_for(net, "spectral_sphere")
    train(net, optimizer, 0, 2)
    before, state = weights(net), copy.deepcopy(optimizer.state_dict()["state"])
    backward(net, 2)
    if place == "rate":
        optimizer.param_groups[1]["lr"] = bad
    else:
        next(net[3].parameters()).grad[0, 0] = bad  # type: ignore[index]
    said = "lr must be finite" if place == "rate" else r"of shape \(16, 32\) is not finite"
    with pytest.raises((FloatingPointError, ValueError), match=said):
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(before, net.parameters(), strict=True))
    now = optimizer.state_dict()["state"]
    assert all(torch.equal(v, now[i][k]) for i, s in state.items() for k, v in s.items())


def test_splitting_parameters() -> None:
    net = small_net()
    net[1].bias.requires_grad_(False)
    split = split_parameters(net, elementwise=[net[-1]])
    assert [p.shape for p in split.matrices] == [(32, 16), (16, 32)]
    assert [tuple(p.shape) for p in split.others] == [(20, 16), (20, 16), (16,), (20,)]
    assert [group.get("weight_decay") for group in split] == [None, None, 0.0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rule": "sgd"}, ValueError, "rule must be one of"),
        ({"lr": -1}, ValueError, "lr must not be negative, got -1"),
        ({"lr": "0.1"}, TypeError, "lr must be a number or a 0-d tensor, got '0.1'"),
        (
            {"lr": torch.ones(2)},
            ValueError,
            r"lr must be a number or a 0-d tensor, got shape \(2,\)",
        ),
        ({"momentum": 1.5}, ValueError, "momentum must be in"),
        ({"nonfinite": "rais"}, ValueError, "nonfinite must be .*; did you mean 'raise'"),
        ({"master_weights": 1}, TypeError, "master_weights must be True or False, got 1"),
        ({"replicas": 3}, TypeError, "replicas must be a process group or None, got 3"),
        ({"exchange_dtype": "bfloat16"}, TypeError, "exchange_dtype .* mean torch.bfloat16"),
        ({"steps": 2.5}, TypeError, "steps must be an integer, got 2.5"),
        ({"steps": True}, TypeError, "steps must be an integer, got True"),
        ({"momentum": "0.9"}, TypeError, "momentum must be a number, got '0.9'"),
        ({"schedule": 3}, TypeError, "schedule must be a string, got 3"),
        ({"scale": "spectral_mu"}, ValueError, "scale must .*; did you mean 'spectral_mup'"),
        ({"scale_factor": math.inf}, ValueError, "scale_factor must be finite, got inf"),
        ({"rule": "adamw", "betas": 0.9}, TypeError, "betas must be two numbers, got 0.9"),
        ({"units": 8}, TypeError, "units must be a mapping such as .* got 8"),
        ({"units": {"rows": 8}}, ValueError, "units\\['rows'\\] must be a list .* got 8"),
    ],
)
@pytest.mark.parametrize("where", ["optimizer", "group"])
def test_mistakes_are_errors(options, error, message, where) -> None:
    weight, of = nn.Parameter(torch.ones(3, 3)), {"rule": "muon", **options}
    if where == "group" and not {*WHOLE}.isdisjoint(of):
        error, message = TypeError, "is not a group option; pass it to the optimizer"
    with pytest.raises(error, match=message):
        if where == "group":
            SpectralOptimizer([{"params": [weight], **of}])
        else:
            SpectralOptimizer([weight], **of)
    if where == "optimizer" and error is TypeError and "units" not in of:  # in no group
        with pytest.raises(error, match=message):
            SpectralOptimizer([{"params": [weight], "rule": "adamw", "lr": 0.1}], **of)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda net: AdamW(net.named_parameters()), "must have rule 'muon' .* got 'adamw'"),
        (lambda net: torch.optim.AdamW(net.parameters()), "must have rule 'muon', got none"),
        (lambda net: Muon([{"params": net.parameters(), "units": {"rows": [2]}}]), "units None"),
        (lambda net: Muon([*net.named_parameters()][::-1]), "parameter 0 of the state is 1.weight"),
        (lambda net: Muon(net[::-1].parameters()), r"momentum of parameter 0 .* \(6, 4\), got"),
    ],
)
def test_a_state_of_other_parameters_is_refused(other: Any, message: str) -> None:
    net = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False))
    saved = other(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    saved.step()
    optimizer = Muon(net.named_parameters())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved.state_dict())


def test_what_is_no_whole_state_is_refused() -> None:
    optimizer = Muon([nn.Parameter(torch.ones(3, 3))])
    optimizer.state[optimizer.param_groups[0]["params"][0]]["momentum"].fill_(2)
    saved = {
        "keys state and param_groups, got .'weight', 'bias'": nn.Linear(2, 2).state_dict(),
        "parameter 0 of .* must have entries, got none": {**optimizer.state_dict(), "state": {}},
    }
    for message, state in saved.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
    with pytest.raises(TypeError, match="state_dict must be a mapping, got NoneType"):
        optimizer.load_state_dict(None)  # type: ignore[arg-type]
    assert optimizer.state_dict()["state"][0]["momentum"].eq(2).all()


def test_arguments_of_other_kinds_are_refused() -> None:
    for params in (None, 3, "weights", {"params": []}):
        with pytest.raises(TypeError, match="params must be parameters, a list of groups or"):
            Muon(params)
    with pytest.raises(TypeError, match=r"closure must be a function or None, got tensor"):
        Muon([nn.Parameter(torch.ones(3, 3))]).step(torch.ones(()))  # type: ignore[arg-type]


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = Muon([nn.Parameter(torch.ones(3, 3))])
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("rule", ["muon", "muon_plus_plus", "adamw"])
def test_master_weights_keep_what_16_bits_lose(rule: str) -> None:
    """bfloat16 parameters equal the rounded weights after the same float32 steps, for rules that
    read weights and rules that do not. Checkpoints contain the master weights."""
    start = [
        torch.randn(6, 8).bfloat16(),
        torch.randn(6, 8).bfloat16(),
        torch.randn(4, 8).bfloat16(),
    ]
    gradients = [torch.randn(4, *x.shape).bfloat16() for x in start]

    def run(dtype: torch.dtype, first: int, saved: Any = None, **options: object) -> tuple:  # type: ignore[type-arg]
        fresh = [nn.Parameter(x.to(dtype)) for x in start]
        parameters, loaded = (fresh, None) if saved is None else saved
        optimizer = SpectralOptimizer(parameters, rule=rule, lr=1e-4, **options)  # type: ignore[arg-type]
        if loaded is not None:
            optimizer.load_state_dict(loaded)
        for step in range(first, 4):
            for parameter, g in zip(parameters, gradients, strict=True):
                parameter.grad = g[step].to(dtype)
            optimizer.step()
            if step == 1:
                halfway = copy.deepcopy((parameters, optimizer.state_dict()))
        return parameters, optimizer, halfway if first < 2 else None

    exact, _, _ = run(torch.float32, 0)
    ours, optimizer, halfway = run(torch.bfloat16, 0, master_weights=True)
    for parameter, reference in zip(ours, exact, strict=True):
        torch.testing.assert_close(optimizer.state[parameter]["master"], reference.detach())
        assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16())
    for masters in (True, False):  # saved masters are kept in either case
        saved = copy.deepcopy(halfway)
        again, resumed, _ = run(torch.bfloat16, 2, saved, master_weights=masters)
        for i, (parameter, other) in enumerate(zip(again, ours, strict=True)):
            master = resumed.state[parameter]["master"]
            assert torch.equal(master, optimizer.state[other]["master"])
            assert not torch.equal(master, saved[1]["state"][i]["master"])  # unchanged
            assert torch.equal(parameter, other)


@pytest.mark.parametrize("rule", ["muon", "adamw"])
@pytest.mark.parametrize("how", ["load", "data", "cast", "merge", "state"])
def test_what_others_write_into_16_bits_is_stepped(how: str, rule: str) -> None:
    """A step with learning rate 0 changes nothing. Master weights of elements that were not written
    keep all bits."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 6, bias=False))
    if how == "merge":
        preconditioned(net, blocks=["0"])
    net = net if how == "cast" else net.bfloat16()
    optimizer = SpectralOptimizer(split_parameters(net), rule=rule, lr=1e-3)
    net(torch.randn(4, 8, dtype=next(net.parameters()).dtype)).sum().backward()
    optimizer.step()
    before = net[0].weight.detach().clone() if how in ("load", "data") else None
    kept = [state["master"].clone() for state in optimizer.state.values() if "master" in state]
    if how == "load":
        net.load_state_dict(nn.Sequential(nn.Linear(8, 6, bias=False)).state_dict())
    elif how == "data":
        net[0].weight.data[0].mul_(2)
    elif how == "cast":
        net.bfloat16()
    elif how == "state":  # the state of an optimizer without masters
        alone = SpectralOptimizer(split_parameters(net), rule=rule, master_weights=False)
        optimizer.load_state_dict(alone.state_dict())
    else:
        merge_(net)
    written = net[0].weight.detach().clone()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(net[0].weight, written)
    parameter = optimizer.param_groups[0]["params"][0]
    master = optimizer.state[parameter]["master"]
    assert torch.equal(master.bfloat16(), written)
    if before is not None:
        assert torch.equal(master, torch.where(written == before, kept[0], written))
        assert how == "load" or not torch.equal(master, written.float())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    ("before", "after", "atol"),  # rounding errors of weights below 8
    [("float32", "float64", 2e-6), ("float64", "float32", 2e-6), ("float32", "bfloat16", 0.1)],
)
def test_the_state_follows_weights_that_are_cast(name, before, after, atol) -> None:
    """Between steps, weights are cast to the dtype that the reference has from the start."""
    start, grads = torch.randn(8, 6), torch.randn(3, 8, 6)
    cast, reference = (nn.Parameter(start.to(getattr(torch, x))) for x in (before, after))
    own = fields_of(name, exact=True)
    optimizers = [
        SpectralOptimizer([p], rule=name, master_weights=False, **own) for p in (cast, reference)
    ]
    for i, grad in enumerate(grads):
        if i == 1:
            cast.data = cast.data.to(reference.dtype)
        for parameter, optimizer in zip((cast, reference), optimizers, strict=True):
            parameter.grad = grad.to(parameter.dtype)
            optimizer.step()
    torch.testing.assert_close(cast, reference, rtol=0, atol=atol)
    states = [o.state_dict()["state"][0] for o in optimizers]
    assert [x.dtype for x in states[0].values()] == [x.dtype for x in states[1].values()]


@pytest.mark.parametrize("rule", ["adamw", "spectral_sphere"])
def test_a_compiled_step_is_the_plain_one(rule: str) -> None:
    """The step is not compiled, because compilation fails for SSO and the fused step."""
    plain, compiled = (nn.Parameter(torch.eye(4, 6)) for _ in range(2))
    optimizers = [SpectralOptimizer([p], rule=rule) for p in (plain, compiled)]
    steps = optimizers[0].step, torch.compile(optimizers[1].step, backend="aot_eager")
    for _ in range(2):
        for parameter, step in zip((plain, compiled), steps, strict=True):
            parameter.grad = torch.ones(4, 6)
            step()
    assert torch.equal(plain, compiled)


def test_a_matrix_without_elements_is_stepped_by_no_matrix_rule() -> None:
    with pytest.raises(ValueError, match=r"a parameter must not be empty, got shape \(0, 4\)"):
        Muon([nn.Parameter(torch.ones(0, 4))])
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 1), nn.Linear(1, 4))
    model[1].weight = nn.Parameter(torch.ones(0, 4))
    optimizer = Muon(split_parameters(model))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_a_copy_sends_in_the_same_dtype() -> None:
    optimizer = Muon([nn.Parameter(torch.eye(4))], exchange_dtype=torch.bfloat16)
    assert copy.deepcopy(optimizer)._exchange_dtype is torch.bfloat16
