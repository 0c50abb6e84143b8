"""Changes that other programs make to an optimizer: state entries, unusual gradients and groups."""

import copy
import io
import pickle
import sys
import weakref
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import Parameter

from spectral import AdamW, Muon, SpectralOptimizer, split_parameters
from spectral.device_values import constant
from spectral.parameter_state import MASTER
from spectral.polar import largest_value, restart_steps
from spectral.rules import RULES
from spectral.tangent_model import partial_fractions
from tests.slow_cases import slow_but

EVERY_RULE = pytest.mark.parametrize("rule", RULES)
DTYPES = [torch.bfloat16, torch.float32]
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def products(names: str, *values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrise a test with all combinations of values, dtypes and rules. `make test` runs all
    combinations only for an elementwise rule and for a rule with state for each matrix, and the
    last combination for all other rules."""
    cases = [*product(*values, DTYPES, RULES)]
    fast = [case for case in cases if case[-1] in ("adamw", "spectral_sphere")]
    last = cases[-1][:-1]
    fast += [case for case in cases if case[:-1] == last]
    return pytest.mark.parametrize(f"{names}, dtype, rule", slow_but(fast, cases))


class Note:
    """An object from another program."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Note)

    def __hash__(self) -> int:
        return 7


def made(rule: str, dtype: torch.dtype = torch.float32, **options: Any) -> SpectralOptimizer:
    """Return an optimizer for two parameters of different shapes, with gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters = [
        Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in ((6, 4), (4, 5))
    ]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
    return SpectralOptimizer(parameters, rule=rule, lr=1e-2, **options)


def stepped(optimizer: SpectralOptimizer, steps: int = 2) -> list[Tensor]:
    """Take `steps` steps, and return the parameters."""
    for _ in range(steps):
        optimizer.step()
    return [p.detach().clone() for p in parameters_of(optimizer)]


def parameters_of(optimizer: SpectralOptimizer) -> list[Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def within(parameter: Parameter) -> dict[str, Any]:
    """Return state entries of many types. The last entries have the parameter's shape or another
    dtype."""
    return {
        "count": 3,
        "note": "text",
        "nothing": None,
        "object": Note(),
        "pair": (torch.ones(2, dtype=torch.float64), [1, "x"]),
        "average": torch.full_like(parameter, 0.1, dtype=torch.float64),
        "mask": torch.ones(parameter.shape, dtype=torch.bool),
        "other": torch.ones(3, 7, dtype=torch.int64),
        "empty": torch.ones(0),
        5: {"nested": torch.ones(2)},
    }


def beside() -> dict[Any, Any]:
    """Return state entries whose keys are not parameters."""
    return {
        "ema": {"decay": 0.9},
        "counter": 4,
        None: "none",
        0: {"step": 1},
        1: "one",
        17: torch.ones(2),
        ("a", 1): [1],
        Note(): Note(),
        "foreign": {"decay": 0.9},
        torch.ones(2): {"momentum": torch.ones(2)},
    }


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal. Tensors must have equal dtypes and elements."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def by_value(state: dict[Any, Any], keys: dict[Any, Any]) -> bool:
    """Return whether a state has the given entries, comparing tensor keys by value because a copied
    tensor is a different key."""
    found = {k: v for k, v in state.items() if not isinstance(k, Tensor)}
    tensors = [(k, v) for k, v in keys.items() if isinstance(k, Tensor)]
    others = [(k, v) for k, v in state.items() if isinstance(k, Tensor) and k.shape == (2,)]
    plain = {k: v for k, v in keys.items() if not isinstance(k, Tensor)}
    return same({k: found.get(k) for k in plain}, plain) and same(tensors, others)


def by_state_dict(optimizer: SpectralOptimizer, rule: str, dtype: torch.dtype) -> SpectralOptimizer:
    other = made(rule, dtype)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as in torch, they share tensors
    return other


def by_file(optimizer: SpectralOptimizer, rule: str, dtype: torch.dtype) -> SpectralOptimizer:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    other = made(rule, dtype)
    other.load_state_dict(torch.load(buffer, weights_only=False))
    return other


COPIES: dict[str, Callable[[SpectralOptimizer, str, torch.dtype], SpectralOptimizer]] = {
    "state_dict": by_state_dict,
    "file": by_file,
    "deepcopy": lambda optimizer, rule, dtype: copy.deepcopy(optimizer),
    "pickle": lambda optimizer, rule, dtype: pickle.loads(pickle.dumps(optimizer)),
}


@products("how", COPIES)
def test_entries_of_other_programs_are_kept_and_change_no_step(how, rule, dtype) -> None:
    plain = stepped(made(rule, dtype), 3)
    optimizer = made(rule, dtype)
    stepped(optimizer, 1)
    optimizer.state.update(beside())
    own = {p: within(p) for p in parameters_of(optimizer)}
    for parameter, entries in own.items():
        optimizer.state[parameter].update(entries)
    stepped(optimizer, 1)
    copied = COPIES[how](optimizer, rule, dtype)
    for kept in (optimizer, copied):
        assert by_value(kept.state, beside())
        for parameter, entries in zip(parameters_of(kept), own.values(), strict=True):
            assert same({k: kept.state[parameter][k] for k in entries}, entries)
    for old, new in zip(parameters_of(optimizer), parameters_of(copied), strict=True):
        new.data, new.grad = old.detach().clone(), old.grad
    assert all(map(torch.equal, stepped(copied, 1), plain))
    assert all(map(torch.equal, stepped(optimizer, 1), plain))


@EVERY_RULE
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_keeps_entries_of_other_programs(rule, tmp_path) -> None:
    def model() -> tuple[nn.Module, SpectralOptimizer]:
        net = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 5, bias=False))
        return net, SpectralOptimizer(net.parameters(), rule=rule)

    def entries(value: float) -> dict[str, Any]:
        tensor = torch.full((4, 6), value, dtype=torch.float64)
        return {"average": tensor, "count": int(value), "note": f"at {value}"}

    net, optimizer = model()
    optimizer.state[net[0].weight].update(entries(3.0))
    saved = {"optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "by name")
    other, loaded = model()
    loaded.state[other[0].weight].update(entries(0.0))
    read = {"optimizer": get_optimizer_state_dict(other, loaded)}
    dcp.load(read, checkpoint_id=tmp_path / "by name")
    set_optimizer_state_dict(other, loaded, read["optimizer"])
    found = loaded.state[other[0].weight]
    assert same({k: found[k] for k in entries(3.0)}, entries(3.0))

    optimizer.state.update({"ema": 0.9, 0: torch.ones(2)})  # refused by torch's function above
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "as it is")
    loaded.state.update({"ema": 0.0, 0: torch.zeros(2)})
    whole = {"optimizer": loaded.state_dict()}
    dcp.load(whole, checkpoint_id=tmp_path / "as it is")
    loaded.load_state_dict(whole["optimizer"])
    assert loaded.state["ema"] == 0.9 and torch.equal(loaded.state[0], torch.ones(2))


NUMBERS = [5.0, 5, torch.tensor(5), torch.tensor([5.0]), True, torch.tensor(5.0).bfloat16()]


@pytest.mark.parametrize("value", NUMBERS)
@pytest.mark.parametrize("how", ["load", "write"])
@EVERY_DTYPE
def test_a_counter_may_be_any_number(value: Any, how: str, dtype: torch.dtype) -> None:
    """As in torch's optimizers, a float from another program's checkpoint is accepted."""
    reference, optimizer = made("adamw", dtype), made("adamw", dtype)
    for o in (reference, optimizer):
        o.step()
    for parameter in parameters_of(reference):
        reference.state[parameter]["step"].fill_(float(value))
    if how == "load":
        saved = copy.deepcopy(optimizer.state_dict())
        for state in saved["state"].values():
            state["step"] = copy.deepcopy(value)
        optimizer.load_state_dict(saved)
    else:
        for parameter in parameters_of(optimizer):
            optimizer.state[parameter]["step"] = copy.deepcopy(value)
    assert all(map(torch.equal, stepped(optimizer), stepped(reference)))
    for parameter in parameters_of(optimizer):
        step = optimizer.state[parameter]["step"]
        assert step.dtype == torch.float32 and step.shape == ()


@pytest.mark.parametrize("masters", [True, False])
@EVERY_RULE
def test_a_state_that_was_cast_to_16_bits_is_stepped_as_before(rule: str, masters: bool) -> None:
    """The values and the dtypes are the same as those of a state that was cast back."""
    optimizer = made(rule, torch.bfloat16, master_weights=masters)
    stepped(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    dtypes = {name: value.dtype for name, value in saved["state"][0].items()}
    results = []
    for back in (False, True):
        for state in saved["state"].values():
            for name, value in state.items():
                state[name] = value.to(dtypes[name] if back else torch.bfloat16)
        other = made(rule, torch.bfloat16, master_weights=masters)
        other.load_state_dict(copy.deepcopy(saved))
        results.append(stepped(other))
        for parameter in parameters_of(other):
            assert dtypes == {name: x.dtype for name, x in other.state[parameter].items()}
    assert all(map(torch.equal, *results))


@EVERY_RULE
def test_an_entry_that_is_lost_or_reset_begins_again(rule: str) -> None:
    """Clear the state of one parameter, the state of all parameters, or one entry."""
    fresh = stepped(made(rule), 1)
    for clear in (
        lambda o: o.state.clear(),
        lambda o: [state.clear() for state in o.state.values()],
        lambda o: [state.pop(name) for state in o.state.values() for name in [*state]],
    ):
        optimizer = made(rule)
        start = [p.detach().clone() for p in parameters_of(optimizer)]
        stepped(optimizer, 1)
        for parameter, value in zip(parameters_of(optimizer), start, strict=True):
            parameter.data.copy_(value)
        clear(optimizer)
        assert all(map(torch.equal, stepped(optimizer, 1), fresh))


def refuses(optimizer: SpectralOptimizer, said: str) -> None:
    """Check that a step raises an error before anything changes."""
    parameters = parameters_of(optimizer)
    before = [p.detach().clone() for p in parameters]
    state = copy.deepcopy([optimizer.state.get(p) for p in parameters])
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=said):
            optimizer.step()
    assert all(map(torch.equal, before, parameters))
    assert same([optimizer.state.get(p) for p in parameters], state)


@products("gradient, first", ["whole", "none", "cut too"], [False, True])
def test_a_parameter_that_is_cut_without_its_state_is_refused(rule, dtype, gradient, first) -> None:
    optimizer = made(rule, dtype)
    if not first:
        optimizer.step()
    cut = parameters_of(optimizer)[1]
    if not optimizer.state[cut]:  # spectral descent has no state that could be wrong
        return
    cut.data = cut.data[[0, 2]].clone()
    if gradient == "none":
        cut.grad = None
    elif gradient == "cut too":
        cut.grad = torch.ones_like(cut)
    refuses(optimizer, r"of parameter 1 must have shape \(\d.*was the parameter sharded")


@EVERY_RULE
@pytest.mark.parametrize("value", ["text", None, [1.0], torch.ones(2), torch.ones(9, 9)])
def test_an_entry_of_another_kind_is_refused(rule: str, value: object) -> None:
    """The error names the entry, both when a state is loaded and when a step finds it."""
    optimizer = made(rule)
    optimizer.step()
    first, second = (optimizer.state[p] for p in parameters_of(optimizer))
    for name, kept in [*first.items()]:
        said = "^{} of parameter {} must (be a tensor of|have) shape"
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][0][name] = value
        with pytest.raises(ValueError, match=said.format(name, 0)):
            optimizer.load_state_dict(saved)
        first[name] = value
        refuses(optimizer, said.format(name, 0))
        first[name] = kept
        replaced = parameters_of(optimizer)[1]
        optimizer.state[replaced] = {**second, name: value}
        refuses(optimizer, said.format(name, 1))
        optimizer.state[replaced] = second
        new = made(rule)
        new.state[parameters_of(new)[1]][name] = value
        refuses(new, said.format(name, 1))


def called_in(call: Callable[[], Any]) -> set[str]:
    """Return the qualified names of all functions that a call enters."""
    names = set()
    sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_qualname))
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@EVERY_DTYPE
@EVERY_RULE
def test_an_unchanged_step_checks_nothing_again(rule: str, dtype: torch.dtype) -> None:
    """Checks in every step would take longer than the step. A change is nevertheless detected
    immediately."""
    checks = {"check_entries", "Member.shapes", "SteppedUnit.of", "check_fields", "follow"}
    optimizer = made(rule, dtype)
    stepped(optimizer)
    assert checks.isdisjoint(called_in(optimizer.step))
    optimizer.state[parameters_of(optimizer)[0]]["note"] = "of another program"
    assert "check_entries" in called_in(optimizer.step)
    assert checks.isdisjoint(called_in(optimizer.step))
    optimizer.param_groups[0]["lr"] = 1e-3
    assert checks.isdisjoint(called_in(optimizer.step))


@products("change", ["state", "dtype", "list", "entries"])
def test_a_step_sees_what_others_replace(change: str, rule: str, dtype: torch.dtype) -> None:
    """Between steps, replace each entry, a whole state, the weights, or the parameter list of a
    group."""
    replaced, in_place = made(rule, dtype), made(rule, dtype)
    stepped(replaced), stepped(in_place)
    pairs = [*zip(parameters_of(replaced), parameters_of(in_place), strict=True)]
    for name in [*replaced.state[pairs[0][0]]] if change == "entries" else [change]:
        for one, other in pairs:
            state = replaced.state[one]
            if change == "entries":
                # A master that no longer rounds to its weight would follow the weight.
                state[name] = one.detach().float() if name == MASTER else state[name] / 2
                in_place.state[other][name].copy_(state[name])
            elif change == "state":
                replaced.state[one] = {key: value.clone() for key, value in state.items()}
            elif change == "dtype":
                one.data = one.data.double().to(dtype)
        if change == "list":
            replaced.param_groups[0]["params"] = [*parameters_of(replaced)]
        assert all(map(torch.equal, stepped(replaced), stepped(in_place))), name


@products("steps", [0, 1])
def test_the_state_follows_a_model_to_another_device(rule, dtype, steps) -> None:
    """This happens if `Muon(model.parameters())` comes before `model.to(device)`. Device "meta"
    stands for any device."""
    optimizer = made(rule, dtype, nonfinite="skip")  # which reads no value
    stepped(optimizer, steps)
    for parameter in parameters_of(optimizer):
        parameter.grad = None
        torch.utils.swap_tensors(parameter, Parameter(parameter.detach().to("meta")))
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {t.device.type for s in optimizer.state.values() for t in s.values()} <= {"meta"}


@EVERY_RULE
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_step_does_not_depend_on_the_default_device(rule: str, nonfinite: str) -> None:
    plain, optimizer = made(rule, nonfinite=nonfinite), made(rule)
    for cached in (largest_value, restart_steps, partial_fractions, constant):
        cached.cache_clear()
    with torch.device("meta"):
        optimizer = SpectralOptimizer(
            parameters_of(optimizer), rule=rule, lr=1e-2, nonfinite=nonfinite
        )
        found = stepped(optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(map(torch.equal, found, stepped(plain)))


@EVERY_RULE
def test_a_parameter_that_is_cut_with_its_state_goes_on(rule: str) -> None:
    """Test a parameter that is cut with its state, and one whose state is cleared."""
    optimizer = made(rule)
    optimizer.step()
    cut = parameters_of(optimizer)[0]
    cut.data, cut.grad = cut.data[:3].clone(), torch.ones(3, 4)
    elementwise = [k for k, v in optimizer.state[cut].items() if v.shape == (6, 4)]
    momenta = {k: optimizer.state[cut][k][:3].clone() for k in elementwise}
    count = {k: v for k, v in optimizer.state[cut].items() if k == "step"}
    optimizer.state[cut] = {**copy.deepcopy(momenta), **count}
    optimizer.step()
    if "momentum" in momenta:
        beta = 0.9 if rule == "adamw" else 0.95
        wanted = torch.lerp(torch.ones(3, 4), momenta["momentum"], beta)
        torch.testing.assert_close(optimizer.state[cut]["momentum"], wanted)


@EVERY_RULE
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_gradient_that_does_not_fit_is_refused(rule: str, nonfinite: str) -> None:
    optimizer = made(rule, nonfinite=nonfinite)
    parameter = parameters_of(optimizer)[1]
    parameter.grad = torch.ones(4, 5).to_sparse()
    refuses(optimizer, "gradients must be dense, got torch.sparse_coo")
    parameter.grad = None
    parameter.grad = torch.ones(4, 5)
    parameter.grad.data = torch.ones(5, 4)
    refuses(optimizer, r"parameter of shape \(4, 5\) must have the same shape, got \(5, 4\)")


ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "stride 0": lambda x: x[:1].expand(x.shape),
    "one number": lambda x: x[0, 0].expand(x.shape),
    "transposed": lambda x: x.T.contiguous().T,
    "a part": lambda x: torch.stack([x, x], -1)[..., 0],
    "with a graph": lambda x: x.requires_grad_() * 1,
}


@products("odd", ODD)
def test_a_gradient_of_any_strides_is_the_contiguous_one(odd, rule, dtype) -> None:
    plain, optimizer = made(rule, dtype), made(rule, dtype)
    kept = []
    for one, other in zip(parameters_of(plain), parameters_of(optimizer), strict=True):
        other.grad = ODD[odd](other.grad.clone())
        one.grad = other.grad.detach().clone(memory_format=torch.contiguous_format)
        kept.append(one.grad.clone())
    assert all(map(torch.equal, stepped(optimizer), stepped(plain)))
    assert all(map(torch.equal, kept, [p.grad for p in parameters_of(optimizer)]))


@EVERY_RULE
@pytest.mark.parametrize("odd", ["transposed", "a part"])
def test_a_parameter_of_any_strides_is_the_contiguous_one(odd: str, rule: str) -> None:
    plain, optimizer = made(rule), made(rule)
    for parameter in parameters_of(optimizer):
        parameter.data = ODD[odd](parameter.data)
    torch.testing.assert_close(stepped(optimizer), stepped(plain), rtol=1e-5, atol=1e-6)


@EVERY_RULE
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_gradient_of_another_dtype_is_cast(rule: str, dtype: torch.dtype) -> None:
    plain, optimizer = made(rule), made(rule)
    for one, other in zip(parameters_of(plain), parameters_of(optimizer), strict=True):
        grad = other.grad.to(dtype)
        other.grad_dtype = None
        other.grad = grad
        one.grad = grad.float()
    torch.testing.assert_close(stepped(optimizer), stepped(plain))


@pytest.mark.parametrize("new", [rule for rule in RULES if rule != "muon"])
def test_a_rule_that_is_written_into_a_group_in_mid_run_is_refused(new: str) -> None:
    optimizer = made("muon")
    optimizer.step()
    optimizer.param_groups[0]["rule"] = new
    refuses(optimizer, f"must not change from 'muon' .* to '{new}'|must contain")
    optimizer.param_groups[0]["rule"] = "muon"
    optimizer.param_groups[0]["units"] = {"rows": [2]}
    refuses(optimizer, r"must not change from .*'rows': \[\].* to 'muon' and .*'rows': .2.")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_knows_the_rule_of_its_state(copied: Callable[[Any], Any]) -> None:
    optimizer = copied(made("muon"))
    optimizer.param_groups[0]["rule"] = "normuon"
    refuses(optimizer, "must not change from 'muon'|must contain")


@EVERY_DTYPE
def test_a_parameter_that_leaves_takes_its_own_entries_alone(dtype: torch.dtype) -> None:
    optimizer = made("muon", dtype)
    optimizer.step()
    gone = optimizer.param_groups[0]["params"].pop()
    optimizer.state[gone]["average"] = 1
    optimizer.step()
    assert optimizer.state[gone] == {"average": 1}
    other = made("muon", dtype)
    other.param_groups[0]["params"].pop()
    other.load_state_dict(optimizer.state_dict())
    assert other.state[gone] == {"average": 1}


@pytest.mark.parametrize("copied", [lambda x: x, copy.deepcopy])
def test_names_follow_the_parameters_of_a_group(copied: Callable[[Any], Any]) -> None:
    """A parameter is removed, and an optimizer that never had this parameter loads the state."""
    first, second = (Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = Muon([("first", first), ("second", second)], lr=0.1)
    second.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer = copied(optimizer)
    del optimizer.param_groups[0]["params"][0]
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["param_names"] == ["second"]
    other = Muon([("second", second)], lr=0.1)
    other.load_state_dict(saved)
    assert other.state[second]["momentum"].any()
    optimizer.param_groups[0]["params"].append(Parameter(torch.ones(2, 3)))
    with pytest.raises(
        ValueError, match=r"must have a name, got an unnamed parameter of shape \(2, 3\)"
    ):
        optimizer.step()


def test_names_follow_parameters_that_change_places() -> None:
    """A parameter that is removed and appended again keeps its name. An unnamed parameter takes
    the name of the parameter it replaces, but no name of a parameter that is still in the group."""
    first, second = (Parameter(torch.ones(4, 4)) for _ in range(2))
    optimizer = Muon([("first", first), ("second", second)], lr=0.1)
    [group] = optimizer.param_groups
    group["params"].append(group["params"].pop(0))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["second", "first"]
    group["params"][1] = Parameter(torch.ones(4, 4))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["second", "first"]
    group["params"].reverse()
    with pytest.raises(ValueError, match="must have a name"):
        optimizer.state_dict()
    group["params"].reverse()
    group["param_names"] = ["renamed", "too"]
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == ["renamed", "too"]


def test_numbers_of_numpy_are_saved_as_plain_numbers() -> None:
    """A schedule computed with NumPy may write NumPy numbers into the groups."""
    optimizer, file = made("muon"), io.BytesIO()
    numbers = {"lr": np.float64(0.25), "momentum": np.float32(0.5), "warmup": np.int64(3)}
    numbers |= {"warm": np.bool_(True), "phase": np.str_("decay")}
    optimizer.param_groups[0].update(numbers)
    optimizer.step()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = made("muon")
    other.load_state_dict(torch.load(file, weights_only=True))
    assert numbers.items() <= other.param_groups[0].items()


def test_a_replaced_parameter_is_freed() -> None:
    """`prepare` in accelerate replaces the parameters of the whole model with sharded
    parameters."""
    optimizer = Muon([("first", Parameter(torch.ones(4, 4)))], lr=0.1)
    optimizer.step()
    [parameters] = [group["params"] for group in optimizer.param_groups]
    before = weakref.ref(parameters[0])
    parameters[0] = Parameter(torch.ones(4, 4))
    optimizer.step()
    assert before() is None


@pytest.mark.parametrize(
    ("rule", "name"),
    [("adamw", "step"), ("adamw", "variance"), ("normuon", "square"), ("adamuon", "square")],
)
def test_a_negative_count_or_square_is_not_loaded(rule: str, name: str) -> None:
    optimizer = made(rule)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][1][name].view(-1)[-1] = -1
    with pytest.raises(ValueError, match=f"{name} of parameter 1 must not be negative"):
        optimizer.load_state_dict(saved)


@EVERY_RULE
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_not_loaded(rule: str, bad: float) -> None:
    optimizer, other = made(rule), made(rule)
    optimizer.step()
    for name, value in optimizer.state[parameters_of(optimizer)[1]].items():
        saved = copy.deepcopy(optimizer.state_dict())
        saved["state"][1][name].view(-1)[-1] = bad
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match=f"{name} of parameter 1 must be finite"):
            other.load_state_dict(saved)
        assert same(other.state_dict(), before), value
    average = torch.tensor([bad])
    optimizer.state[parameters_of(optimizer)[0]]["average"] = average  # not an entry of the rule
    other.load_state_dict(optimizer.state_dict())


def test_hooks_of_a_load_see_and_change_what_is_loaded() -> None:
    """A pre-hook may replace the state, for example to rename entries. A post-hook receives the
    complete state."""
    optimizer, other = made("spectral_sphere"), made("spectral_sphere")
    optimizer.step()
    saved = optimizer.state_dict()
    renamed = {**saved, "state": {i: {"m": s["momentum"]} for i, s in saved["state"].items()}}
    seen: list[list[set[str]]] = []

    def before(_: object, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "state": {i: {"momentum": s["m"]} for i, s in state["state"].items()}}

    other.register_load_state_dict_pre_hook(before)

    def afterwards(changed: Any) -> None:
        seen.append([{*state} for state in changed.state.values()])

    other.register_load_state_dict_post_hook(afterwards)
    other.load_state_dict(renamed)
    first = parameters_of(other)[0]
    assert torch.equal(other.state[first]["momentum"], saved["state"][0]["momentum"])
    assert seen[0] == [{*state} for state in saved["state"].values()]
    assert len(other._optimizer_load_state_dict_pre_hooks) == 1


@EVERY_RULE
def test_a_group_without_names_says_what_to_call(rule: str) -> None:
    """Lightning's BaseFinetuning adds such a group. The remedy given in the message works."""
    model, head = nn.Linear(4, 6), nn.Linear(6, 4)
    optimizer = SpectralOptimizer(split_parameters(model), rule=rule)
    said = "must contain parameter names.* call optimizer.add_param_group for each group of split_"
    with pytest.raises(ValueError, match=said):
        optimizer.add_param_group({"params": head.parameters(), "lr": 1e-3})
    for group in split_parameters(head):
        optimizer.add_param_group({**group, "lr": 1e-3})
    head(model(torch.ones(2, 4))).sum().backward()
    before = head.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(head.weight, before)
    plain = AdamW(nn.Linear(4, 6).parameters())
    with pytest.raises(
        ValueError, match="must not contain .* create the optimizer with split_param"
    ):
        plain.add_param_group({"params": nn.Linear(4, 6).named_parameters()})


@EVERY_RULE
def test_a_rate_may_be_a_tensor_of_one_element(rule: str) -> None:
    """The optimizer keeps the tensor itself, so later writes to it take effect."""
    rate, plain, optimizer = torch.tensor([1e-2]), made(rule), made(rule)
    optimizer = SpectralOptimizer(parameters_of(optimizer), rule=rule, lr=rate)
    plain = SpectralOptimizer(parameters_of(plain), rule=rule, lr=torch.tensor(1e-2))
    for factor in (1.0, 0.5):
        rate.fill_(1e-2 * factor)
        plain.param_groups[0]["lr"].fill_(1e-2 * factor)
        assert all(map(torch.equal, stepped(optimizer, 1), stepped(plain, 1)))
    optimizer.param_groups[0]["lr"] = torch.full((1, 1), 0.1)
    plain.param_groups[0]["lr"] = torch.tensor(0.1)
    assert all(map(torch.equal, stepped(optimizer, 1), stepped(plain, 1)))


def test_a_parameter_without_elements_is_stepped_by_an_elementwise_rule() -> None:
    empty, full = Parameter(torch.ones(0)), Parameter(torch.ones(3))
    for nonfinite in ("raise", "skip"):
        for parameters in ([empty], [empty, full]):
            optimizer = AdamW(parameters, nonfinite=nonfinite)
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            stepped(optimizer)
            optimizer.load_state_dict(optimizer.state_dict())
            stepped(optimizer)
    assert full.detach().max() < 1


@pytest.mark.parametrize(("empty", "steps"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_parameters_replaced_by_assignment_are_named(empty: int, steps: int) -> None:
    """This also holds after steps without any gradients."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer = Muon(split_parameters(model, example=torch.ones(3, 4)))
    for _ in range(empty):
        optimizer.step()
    for _ in range(steps):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model(torch.ones(3, 4)).sum().backward()
    for _ in range(2):
        with pytest.raises(ValueError, match="0.weight was replaced after the optimizer was"):
            optimizer.step()
    for group in split_parameters(model, example=torch.ones(3, 4)):
        optimizer.add_param_group(group)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
