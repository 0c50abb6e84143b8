"""The identity of a run does not depend on new keys in the config schema."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from parallel.checkpoint.state import sharded_state
from parallel.comm.groups import Groups
from spectral.rules import RULES
from tests.run_configs import tiny_config
from tests.tiny_families import tiny_model
from training.build import build_distributed_optimizer, build_parallel_model
from training.checkpoint.changes import differences, refusal
from training.checkpoint.identity import identity, model_facts, settings
from training.config import Config, InvalidConfigError, load_saved_config, to_yaml
from training.config.binding import bind

EVERY_SECTION: dict[str, dict[str, Any]] = {
    "pc": {},
    "gram_penalty": {},
    "model": {"family": "moe"},
    "model__moe": {"experts": 4, "top_k": 2, "expert_ffn": 32, "dense_layers": 1},
}
"""Overrides that enable every section except latent attention."""


def without(content: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return `content` as a version without the key at `path` would have written it."""
    first, *rest = path
    if not rest:
        return {key: value for key, value in content.items() if key != first}
    return {**content, first: without(content[first], tuple(rest))}


def test_a_key_at_another_value_than_its_default_is_a_difference(tmp_path: Path) -> None:
    now = tiny_config(str(tmp_path), "muon", model__rope_base=5e4, optimizer__qkv_units="group")
    content = yaml.safe_load(to_yaml(now))
    older = without(without(content, ("model", "rope_base")), ("optimizer", "qkv_units"))
    (tmp_path / "saved.yaml").write_text(yaml.safe_dump(older))
    before = load_saved_config(tmp_path / "saved.yaml")
    assert differences(settings(before), settings(now), ()) == {
        "model": [("rope_base", 10000.0, 50000.0)],
        "optimizer": [("qkv_units", "head", "group")],
    }


def test_a_section_that_was_not_there_is_a_difference(tmp_path: Path) -> None:
    """A new section counts as a difference even if all of its keys have their defaults."""
    before, now = (tiny_config(str(tmp_path), "muon", **keys) for keys in ({}, {"pc": {}}))
    found = differences(settings(before), settings(now), ())
    assert list(found) == ["model"] and ("pc.level", "absent", 2) in found["model"]


def test_what_is_said_in_another_way_is_no_difference(tmp_path: Path) -> None:
    """Test a dtype and sizes that are given explicitly or by default, and a set with a modification
    time or with new hashes."""
    for precision in ("fp32", "bf16"):
        names = [{"optimizer__distributed__exchange_dtype": name} for name in ("null", precision)]
        keys = {"train__precision": precision}
        before, now = (settings(tiny_config(str(tmp_path), "muon", **keys, **x)) for x in names)
        assert differences(before, now, ()) == {}
    assert differences(before | {"data": {"walk.modified": "2001"}}, now | {"data": {}}, ()) == {}
    model = tiny_config(str(tmp_path), "muon").model
    sizes = {"kv_heads": model.heads, "head_dim": model.hidden // model.heads}
    before, now = (
        tiny_config(str(tmp_path), "muon", **{f"model__{k}": v for k, v in values.items()})
        for values in (dict.fromkeys(sizes, "null"), sizes)
    )
    assert differences(settings(before), settings(now), ()) == {}
    gemma = tiny_model("gemma2")
    scalars = (
        model_facts(replace(gemma, query_pre_attn_scalar=x)) for x in (None, gemma.head_size)
    )
    assert next(scalars) == next(scalars)


def test_another_rule_is_one_difference(tmp_path: Path) -> None:
    """Settings of a rule that only one of the runs uses are not listed."""
    before, now = (
        settings(tiny_config(str(tmp_path), "muon", optimizer__matrix__rule=rule))
        for rule in ("muon", "normuon")
    )
    assert differences(before, now, ()) == {"optimizer": [("matrix.rule", "muon", "normuon")]}


@pytest.mark.parametrize("beginning", ["after_share: 0.5", "with_decay: true"])
def test_a_phase_that_begins_at_another_step_is_other_data(beginning, tmp_path: Path) -> None:
    """The key that sets the start of the phase has the same value."""
    keys = {"schedule__kind": "wsd", "schedule__cooldown_fraction": 0.5}
    keys |= {"data__phases": f"[{{{beginning}, weights: {{walk: 1}}}}]", "train__exit_step": 5}
    facts: dict[str, Any] = {"data": {}, "tokenizer": {}}
    before, now = (
        identity(tiny_config(str(tmp_path), "muon", **keys, train__steps=steps), facts)
        for steps in (20, 40)
    )
    assert differences(before, now, ["schedule"]) == {"data": [("phases[0].start", 10, 20)]}


ALLOW, BEGIN = "set checkpoint.allow_change=[optimizer];", "checkpoint.initialize_from=step_1 to"


@pytest.mark.parametrize(
    ("before", "now", "offer"),
    [
        ({}, {"optimizer__matrix__rule": "muon"}, BEGIN),
        ({}, {"optimizer__head__rule": "muon"}, BEGIN),
        ({}, {"optimizer__roles__q__rule": "adamw"}, BEGIN),
        ({}, {"optimizer__qkv_units": "group"}, BEGIN),
        ({}, {"optimizer__distributed__momentum_dtype": "bf16"}, BEGIN),
        ({"pc": {}}, {}, BEGIN),
        ({}, {"pc": {}}, "cannot be loaded: set another run.dir;"),
        ({}, {"model__ffn": 64}, "weights do not fit this model: set another run.dir;"),
        ({}, {"optimizer__roles__q__lr": 0.1}, ALLOW),
        ({}, {"optimizer__rules__spectral_sphere__momentum": 0.5}, ALLOW),
        ({}, {"optimizer__rules__muon__momentum": 0.5}, None),
        ({}, {"optimizer__roles": {"q": {"rule": "spectral_sphere"}}}, None),
        ({}, {"optimizer__distributed__momentum_dtype": "fp32"}, None),
        ({}, {"optimizer__distributed__gradient_dtype": "fp32"}, None),
    ],
    ids=str,
)
def test_what_is_offered_can_be_done(before, now, offer, tmp_path):
    """Neither a setting of an unused rule nor an override that sets a role's current rule is a
    difference."""
    ours, theirs = (tiny_config(str(tmp_path), "spectral_sphere", **keys) for keys in (now, before))
    different = differences(settings(theirs), settings(ours), ())
    said = refusal("step_1", different, ours.pc is not None)
    assert bool(different) == (offer is not None) and (offer or "") in said
    assert offer == ALLOW or not different or "allow_change" not in said


EVERY_RULE: dict[str, Any] = {
    f"optimizer__roles__{role}__rule": rule
    for role, rule in zip(
        ("q", "k", "v", "o", "gate", "up", "down"), sorted(RULES.keys() - {"adamw"}), strict=True
    )
} | {"optimizer__rules__muon_plus_plus__algorithm": "dual"}
"""Overrides with which every rule is used: AdamW in the other groups, and every other rule by a
role."""

ELSEWHERE = re.compile(
    r"(run|plan|parallel|stop|watchdog|log|monitors)\..*"  # no result depends on them
    r"|(checkpoint|validation|tasks|spikes)\..*"
    r"|seed|data\..*|train\.sequence_length"  # of the data, in `data_facts`
    r"|train\.(exit_step|micro_batch|recompute|loss_chunk|fused_\w+|compile|max_\w+)"
    r"|model\.(attention_backend|attention_kernel|moe\.backend)|pc\.evaluator"
    r"|optimizer\.distributed\.(placement|step_groups|overlap_\w+|cuda_graph)"
)
"""Matches keys that are compared elsewhere or never."""


MAY_CHANGE_STATE = re.compile(
    r"(model|pc|optimizer)\.(?!family|moe\.score|init|rules|roles|.*(lr|weight_decay)$).*"
)
"""Matches keys that may change the contents of a checkpoint, with values for which a model can be
built."""

SECTIONS: list[Any] = [
    [{"batch": 1, "until_steps": 2}],
    {"kind": "linear", "factor": 2},
    dict.fromkeys(("kv_rank", "nope_head_dim", "rope_head_dim", "value_head_dim"), 8),
]
"""Possible values of sections: a batch ramp, a change of rotary frequencies, and latent
attention."""


def leaves(content: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the path and the value of every leaf key."""
    if not isinstance(content, dict):
        yield path, content
        return
    for key, value in content.items():
        yield from leaves(value, (*path, key))


@cache
def schema() -> list[dict[str, Any]]:
    """Return the JSON schema of every section."""
    return [*TypeAdapter(Config).json_schema()["$defs"].values()]


def others(name: str, value: Any) -> list[Any]:
    """Return possible replacements for the value of a key."""
    named = json.dumps([part.get("properties", {}).get(name) for part in schema()])
    words = [json.loads(word) for word in re.findall(r'"const": ("\w+")', named)]
    for listed in re.findall(r'"enum": (\[.*?\])', named):
        words += json.loads(listed)
    numbers = [value + 1, value / 2] if isinstance(value, int | float) else []
    return [not value, *numbers, *words, 0.5, 2, [], ["o"], "llama", "simple", *SECTIONS]


def entries(config: Config, world: Groups) -> dict[str, Any]:
    """Return the shape and the dtype of every tensor in a checkpoint of a run with this config."""
    model = build_parallel_model(config, world)
    state = sharded_state(model, build_distributed_optimizer(config, model))
    return {name: (part.shape, part.value.dtype) for name, part in state.items()}


def test_every_key_is_part_of_the_identity_or_listed(tmp_path: Path, world: Groups) -> None:
    """A change is only offered if the checkpoint can be loaded after the change."""
    config = tiny_config(str(tmp_path), **EVERY_SECTION, **EVERY_RULE)
    content, before, met = json.loads(json.dumps(asdict(config))), settings(config), 0
    saved = entries(config, world)
    for path, value in leaves(content):
        key = ".".join(path)
        elsewhere = ELSEWHERE.fullmatch(key) is not None
        *sections, name = path
        section = reduce(getitem, sections, content)
        for other in others(name, value):
            section[name] = other
            try:
                now = bind(Config, content, check=False)
            except InvalidConfigError:
                continue
            if now != config:
                break
        else:
            assert elsewhere, f"no other value of {key} = {value}"
            now = config
        section[name] = value
        different = differences(before, settings(now), ())
        assert bool(different) is not elsewhere, f"{key} = {other!r}"
        if elsewhere:
            continue
        offered = "allow_change" in refusal("step_1", different, pc=True)
        if offered and MAY_CHANGE_STATE.match(key):
            assert entries(now, world) == saved, f"{key} = {other!r}"
        met += 1
    assert met > 100
