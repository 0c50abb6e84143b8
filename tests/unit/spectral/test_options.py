"""Arguments of the classes: signatures, aliases, defaults that depend on the dtype, and keys of
other libraries."""

import copy
import inspect
import math
import re
import tomllib
from collections import UserList
from collections.abc import Callable
from dataclasses import fields, make_dataclass
from functools import partial
from typing import Literal, get_type_hints

import pytest
import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR

import spectral
from spectral import AdamW, Muon, MuonSphere, SpectralSphere
from spectral.options import DEFAULTS
from spectral.rules import RULES
from tests.paths import ROOT
from tests.unit.spectral.test_torch_contract import CLASSES
from training.config.manual import meanings_of


def weight(*shape: int, dtype: torch.dtype = torch.float32) -> Parameter:
    """Return a parameter with a gradient."""
    generator = torch.Generator().manual_seed(sum(shape))
    parameter = Parameter(torch.randn(*shape, generator=generator).to(dtype))
    parameter.grad = torch.randn(*shape, generator=generator).to(dtype)
    return parameter


@pytest.mark.parametrize("kind", CLASSES)
def test_signature_and_docstring_have_every_field_of_the_rule(kind: type) -> None:
    """The signatures and docstrings, which are written out for `help` and type checkers, match the
    rule."""
    rule = RULES[kind.default_rule]  # type: ignore[attr-defined]
    parameters = inspect.signature(kind).parameters
    text = " ".join((inspect.getdoc(kind) or "").split())
    made = kind([weight(8, 12)])  # type: ignore[call-arg]
    (group,) = made.param_groups
    assert {"lr", "weight_decay", "nonfinite", "master_weights"} <= parameters.keys()
    types, meanings = get_type_hints(rule), meanings_of(rule)
    for field in fields(rule):
        assert parameters[field.name].default == group[field.name] == made.defaults[field.name]
        assert parameters[field.name].annotation == types[field.name]
        assert f"\n    {field.name} (default {group[field.name]!r}): " in inspect.getdoc(kind)
        meaning = re.sub(r"\bnull\b", "None", meanings[field.name])
        assert f" {field.name} (default {group[field.name]!r}): {meaning} " in text
    assert "options" not in parameters and "\n    options: " not in inspect.getdoc(kind)
    for name in parameters.keys() - {f.name for f in fields(rule)}:
        assert inspect.getdoc(kind).count(f"\n    {name}: ") == 1
    assert parameters["lr"].default == group["lr"] == made.defaults["lr"]


def test_every_rule_of_a_class_has_defaults() -> None:
    assert {kind.default_rule for kind in CLASSES} == DEFAULTS.keys()
    for rule, defaults in DEFAULTS.items():
        assert defaults.keys() - {"lr"} <= {field.name for field in fields(RULES[rule])}


@pytest.mark.parametrize("kind", CLASSES)
def test_float64_weights_keep_the_defaults_of_the_rule(kind: type) -> None:
    (group,) = kind([weight(8, 12, dtype=torch.float64)]).param_groups  # type: ignore[call-arg]
    for field in fields(RULES[kind.default_rule]):  # type: ignore[attr-defined]
        assert group[field.name] == field.default
    (asked,) = Muon([weight(8, 12, dtype=torch.float64)], steps=5).param_groups
    assert asked["steps"] == 5


@pytest.mark.parametrize("key", ["use_muon", "algorithm"])
def test_a_group_of_another_library_is_refused(key: str) -> None:
    """If the group were accepted, Muon would step it with the learning rate for AdamW."""
    group = {"params": [weight(2, 2)], key: False}
    with pytest.raises(TypeError, match=f"'{key}' is not supported; to select a rule, set rule="):
        Muon([group])


def test_names_of_torch_are_understood() -> None:
    assert Muon([weight(8, 12)], 0.1, ns_steps=3).param_groups[0]["steps"] == 3
    (group,) = AdamW([weight(8)], betas=(0.8, 0.99), eps=1e-6).param_groups
    assert (group["beta1"], group["beta2"], group["epsilon"]) == (0.8, 0.99, 1e-6)
    (group,) = SpectralSphere([weight(8, 12)], msign_dtype=torch.bfloat16).param_groups
    assert group["msign_dtype"] == "bfloat16"
    assert AdamW([weight(8)], momentum=0.8).param_groups[0]["beta1"] == 0.8
    optimizer = AdamW([weight(8)], betas=UserList([0.8, 0.99]))
    optimizer.param_groups[0]["betas"] = 0.5
    for _ in range(2):  # the second step does not continue from the earlier state either
        with pytest.raises(TypeError, match="betas must be two numbers, got 0.5"):
            optimizer.step()
    said = (
        "rule 'muon' has no field 'betas'; for AdamW, set it in the groups whose rule is 'adamw'$"
    )
    with pytest.raises(TypeError, match=said):
        Muon([weight(8, 12)], betas=(0.9, 0.95))
    groups = [{"params": [weight(8, 12)]}, {"params": [weight(8)], "rule": "adamw"}]
    optimizer = Muon(groups)
    optimizer.param_groups[1].update(betas=(0.9, 0.95), eps=1e-10)
    optimizer.step()
    group = optimizer.param_groups[1]
    assert (group["beta1"], group["beta2"], group["epsilon"]) == (0.9, 0.95, 1e-10)


def test_rules_of_others_keep_their_defaults_and_types() -> None:
    own = [("limit", float, math.inf), ("every", int | Literal["auto"], 3)]
    for more in ([], [("folder", "Unknown", None)]):  # a name that only type checkers import
        kind = make_dataclass("Own", own + more, bases=(RULES["muon"],), frozen=True, kw_only=True)
        assert kind(every=4).limit == math.inf


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean 'momentum'"):
        Muon([{"params": [weight(8, 12)], "momentun": 0.9}])
    for wrong, right in (
        *(("momentun", "momentum"), ("weight_decy", "weight_decay"), ("nonfinit", "nonfinite")),
        *(("master_weight", "master_weights"), ("exchange_type", "exchange_dtype")),
    ):
        with pytest.raises(TypeError, match=f"did you mean '{right}'"):
            Muon([weight(8, 12)], **{wrong: 0.9})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="has no field 'lookahead'$"):
        Muon([weight(8, 12)], lookahead=True)


@pytest.mark.parametrize("where", ["optimizer", "group"])
@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("fused", [True, False, None], []),
        ("foreach", [True, False, None], []),
        ("decoupled_weight_decay", [True], [False]),
        *((name, [False, None], [True]) for name in ("capturable", "differentiable", "maximize")),
        ("amsgrad", [False, None], [True]),
    ],
)
def test_options_of_torch_that_are_fixed_here(kind, where, name, accepted, refused) -> None:
    def step(value: object) -> Parameter:
        parameter = weight(8, 12)
        group, options = {"params": [parameter]}, {name: value}
        if where == "group":
            group, options = {**group, **options}, {}
        kind([group], **options).step()  # type: ignore[call-arg]
        return parameter

    plain = weight(8, 12)
    kind([plain]).step()  # type: ignore[call-arg]
    assert all(torch.equal(step(value), plain) for value in accepted)
    for value in refused:
        with pytest.raises(TypeError, match=f"{name} must be .*, got {value}: ..."):
            step(value)


@pytest.mark.parametrize("where", ["optimizer", "group"])
@pytest.mark.parametrize(
    ("option", "value", "hint"),
    [
        ("adjust_lr_fn", "match_rms_adamw", "scale='align_adam_rms' replaces 'match_rms_adamw'"),
        ("ns_coefficients", (3.4445, -4.775, 2.0315), "schedule='simple' uses torch's"),
        ("eps", 1e-7, "no epsilon is needed"),
        ("beta1", 0.9, "pass momentum; for AdamW, set it in the groups"),
        ("learning_rate", 0.1, "pass lr"),
        ("wd", 0.1, "pass weight_decay"),
        ("wdecay", 0.1, "pass weight_decay"),
        ("mu", 0.9, "pass momentum"),
        ("adjust_lr", "rms_norm", "scale='align_adam_rms' replaces 'rms_norm'"),
    ],
)
def test_options_of_other_optimizers_have_a_hint(where, option, value, hint) -> None:
    if (where, option) == ("group", "eps"):  # written into the groups of Adam by other programs
        return
    group, options = {"params": [weight(8, 12)]}, {option: value}
    with pytest.raises(TypeError, match=f"rule 'muon' has no field '{option}'; .*{hint}"):
        Muon([{**group, **options}]) if where == "group" else Muon([group], **options)


def test_groups_keep_the_keys_of_other_programs() -> None:
    keys = {"fused": True, "foreach": False, "wd_mult": 1.0, "lr_mult": 1.0, "min_lr": 0.0}
    keys |= {"max_lr": 1.0, "is_expert_parallel": False, "default_config": True, "eps": 1e-8}
    keys |= {"base_momentum": 0.85, "max_momentum": 0.95}
    keys |= {"lr_scale": 0.5, "group_name": "layer_0", "names": ["a"], "layer_name": "a"}  # timm
    keys |= {"weight_decay_mult": 1.0, "lr_decay": 0.9, "momentum_decay": 0.9, "module": "a"}
    keys |= {"base_lr": 0.1, "layer_decay": 0.9, "master_weights_path": "a", "role": "gate"}
    keys |= {"name": "a", "group": 1, "decay": True, "num_steps": 9, "scale_lr": True}
    optimizer = Muon([{"params": [weight(8, 12)], **keys}])
    optimizer.step()
    assert keys.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        *(("lrs", "lr"), ("lr_", "lr"), ("lr1", "lr"), ("n_steps", "steps"), ("stesp", "steps")),
        *(("unit", "units"), ("rules", "rule"), ("scael", "scale"), ("momemtum", "momentum")),
        *(("weigth_deacy", "weight_decay"), ("weightdecay", "weight_decay")),
        *(("scale_facter", "scale_factor"), ("radius_scalar", "radius_scaler")),
    ],
)
def test_groups_refuse_misspelled_fields(name: str, field: str) -> None:
    with pytest.raises(TypeError, match=f"no field '{name}'; did you mean '{field}'"):
        MuonSphere([{"params": [weight(8, 12)], name: 1}])


def test_a_group_of_another_rule_has_the_rate_of_that_rule() -> None:
    for lr in (0.3, torch.tensor(0.3)):
        groups = [
            {"params": [weight(8, 12)]},
            {"params": [weight(6, 4)], "rule": "spectral_sphere"},
        ]
        first, second = Muon(groups, lr=lr).param_groups
        assert first["lr"] == lr and second["lr"] == DEFAULTS["spectral_sphere"]["lr"]
        assert type(second["lr"]) is type(lr)


def test_a_copy_gives_its_options_to_later_groups() -> None:
    twin = copy.deepcopy(Muon([weight(8, 12)], lr=0.3, steps=3))
    twin.add_param_group({"params": [weight(6, 4)]})
    assert twin.param_groups[1]["steps"] == 3 and twin.param_groups[1]["lr"] == 0.3


def test_options_that_a_state_lacks_stay_as_they_are() -> None:
    given = {"momentum": 0.5, "krylov_steps": 6, "radius_scaler": 2.0, "retraction": "dynamic"}
    units = {"rows": [4]}
    groups = [{"params": [weight(8, 12)], "units": units}]
    optimizer = SpectralSphere(groups, weight_decay=0.0, **given)
    saved = optimizer.state_dict()
    for name in (*given, "units"):
        del saved["param_groups"][0][name]
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].items() >= {**given, "units": units}.items()


def test_a_state_of_momenta_alone_is_enough() -> None:
    optimizer = SpectralSphere([weight(8, 12)])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"] = {0: {"momentum": saved["state"][0]["momentum"]}}
    (old,) = optimizer.param_groups[0]["params"]
    parameter = Parameter(old.detach().clone())
    other = SpectralSphere([parameter])
    other.load_state_dict(saved)
    for p in (old, parameter):
        p.grad = torch.ones_like(p)
    optimizer.step()
    other.step()
    assert torch.equal(other.state[parameter]["momentum"], optimizer.state[old]["momentum"])
    # The pair is found from a cold start instead of the last step's pair.
    torch.testing.assert_close(parameter, old, rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", [Muon, MuonSphere, SpectralSphere, AdamW])
@pytest.mark.parametrize("master_weights", [True, False])
def test_a_wrapper_may_put_float32_in_place_of_16_bits(kind: type, master_weights: bool) -> None:
    """megatron-core's mixed-precision optimizer does this, with the existing state."""
    narrow = weight(8, 12, dtype=torch.bfloat16)
    optimizer = kind([narrow], master_weights=master_weights)  # type: ignore[call-arg]
    wide = Parameter(narrow.detach().float())
    wide.grad = narrow.grad.float()  # type: ignore[union-attr]
    reference = Parameter(wide.detach().clone())
    reference.grad = wide.grad.clone()
    optimizer.param_groups[0]["params"][0] = wide
    optimizer.state[wide] = optimizer.state.pop(narrow)
    optimizer.step()
    kind([reference]).step()  # type: ignore[call-arg]
    assert {v.dtype for v in optimizer.state[wide].values()} == {torch.float32}
    assert "master" not in optimizer.state[wide]
    torch.testing.assert_close(wide, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [
        partial(OneCycleLR, max_lr=0.1, total_steps=8, three_phase=True),
        partial(CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=2),
    ],
)
def test_schedulers_cycle_the_momentum_of_all_groups(kind: Callable[..., LRScheduler]) -> None:
    """AdamW steps like torch's AdamW, with a beta set by a scheduler or a loop."""
    ours, theirs, options = weight(8), weight(8), {"betas": (0.8, 0.9), "weight_decay": 0.1}
    both = AdamW([ours], **options), torch.optim.AdamW([theirs], **options)  # type: ignore[arg-type]
    schedules = [kind(optimizer) for optimizer in both]
    for step in range(8):
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            schedule.step() if step < 7 else None
            if step == 4:
                optimizer.param_groups[0].update(betas=(0.5, 0.6), eps=1e-3)
        torch.testing.assert_close(ours, theirs)

    optimizer = Muon([{"params": [weight(8, 12)]}, {"params": [weight(8)], "rule": "adamw"}])
    schedule = kind(optimizer)
    for _ in range(2):
        optimizer.step()
        schedule.step()
    optimizer.step()
    matrices, others = optimizer.param_groups
    assert matrices["momentum"] == others["beta1"] != 0.95


def test_version_and_public_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert spectral.__version__ == project["version"]
    assert set(dir(spectral)) == {*spectral.__all__, "__version__"}


def test_a_scaler_of_gradients_steps_and_skips() -> None:
    layer, scaler = torch.nn.Linear(4, 4, bias=False), torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = Muon(layer.parameters())
    for factor, moves in ((1.0, True), (float("inf"), False)):
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(factor * layer(torch.ones(2, 4)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layer.weight, before) is not moves
