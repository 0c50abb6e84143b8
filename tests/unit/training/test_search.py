"""The search finds the fastest layout, and its lower bounds are below the plans."""

import random
from dataclasses import replace

import pytest

from parallel.plan.devices import DEVICES
from tests.paths import ROOT
from tests.slow_cases import slow_but
from training.config import check, load_config
from training.dry_run import plan_run
from training.errors import ConfigError
from training.planning import layout_search
from training.planning.layout_search import (
    Layouts,
    best_layouts,
    changed,
    fits_at_best,
    least_seconds,
    legal_layouts,
)
from training.planning.plan_commands import combined, fit, remedies, remedy_table

KEYS = ["model.vocab_size=4096", "train.precision=bf16", "train.sequence_length=1024"]
SMALL = ["model.hidden=256", "model.heads=8", "model.kv_heads=4"]


def layouts_of(recipe, gpus, *overrides, **device):
    """Return the layouts of a tiny recipe on H100s with some properties replaced."""
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", [*KEYS, *SMALL, *overrides])
    machine = replace(DEVICES["h100"], **device)
    return Layouts(config, gpus, machine)


@pytest.mark.parametrize(
    ("recipe", "memory"),
    slow_but(
        [("tiny_sso", 8e8)], [("tiny_sso", 8e8), ("tiny_moe_muon", 5e8), ("tiny_qwen2.5_sso", 8e8)]
    ),
)
def test_no_random_layout_is_faster_than_the_best(recipe, memory, monkeypatch):
    layouts = layouts_of(recipe, 16, memory_bytes=int(memory))
    options = list(legal_layouts(layouts))
    monkeypatch.setattr(layout_search, "BEST", 3)
    best = best_layouts(layouts)
    assert best and all(each.plan.fits for each in best)
    assert [each.seconds for each in best] == sorted(each.seconds for each in best)
    flops = layouts.owned_flops()
    chosen = random.Random(0).sample(options, min(len(options), 60))
    fitting = 0
    for changes in chosen:
        check(changed(layouts.config, changes), 16)  # legal by the run's own checks
        planned, shape = layouts.plan(changes), layouts.shape(changes)
        assert planned.tokens == layouts.config.train.global_batch * 1024
        assert least_seconds(shape, flops) <= planned.time.total * (1 + 1e-9)
        assert fits_at_best(shape, planned.memory.total)
        if planned.fits:
            fitting += 1
            assert planned.time.total >= best[0].seconds
    assert fitting >= 20


def test_bounds_include_gradients_in_bfloat16():
    """On slow links, the time to reduce gradients is not hidden by the backward pass."""
    keys = ["optimizer.distributed.gradient_dtype=bf16", "train.micro_batch=1"]
    layouts = layouts_of("tiny_muon", 16, *keys, node_rate=1e6, network_rate=1e6)
    planned, shape = layouts.plan({}), layouts.shape({})
    assert fits_at_best(shape, planned.memory.total)
    assert least_seconds(shape, layouts.owned_flops()) <= planned.time.total


@pytest.mark.parametrize(
    ("recipe", "override"),
    [("tiny_sso", "model.layers=8"), ("tiny_muon_pc", "model.tie_embeddings=true"),
     ("tiny_moe_muon", "model.moe.dense_layers=2")],
)  # fmt: skip
def test_plans_that_share_stages_are_those_of_each_layout(recipe, override):
    """Stages and layouts with the same units share the plan of a stage."""
    layouts = layouts_of(recipe, 8, override)
    for sizes in ((4, 1, 1), (4, 1, 2), (2, 2, 1), (1, 1, 1), (2, 1, 1)):
        names = ("pipeline", "virtual_pipeline", "context")
        changes = {f"parallel.{name}": size for name, size in zip(names, sizes, strict=True)}
        alone = plan_run(changed(layouts.config, changes), 8, layouts.device)
        assert layouts.plan(changes) == alone, changes
        assert layouts.fitting_plan(changes) == alone, changes


def test_remedies_say_what_fits():
    layouts = layouts_of("tiny_sso", 2, "monitors.interval=0", memory_bytes=int(3e8))
    before = layouts.plan({})
    assert not before.fits
    found = remedies(layouts)
    assert {"train.recompute": "full"} in [each.changes for each in found]
    assert all(each.plan.memory.total < before.memory.total for each in found)
    seconds = [each.plan.time.total for each in found]
    assert seconds == sorted(seconds)
    # Every change saves memory; times are relative to the run as it is.
    rows = {line.split()[0]: line.split() for line in remedy_table(layouts, before).splitlines()}
    for each in found:
        name = " ".join(f"{key}={value}" for key, value in each.changes.items())
        saved = (each.plan.memory.total - before.memory.total) / 2**30
        slower = 100 * (each.plan.time.total / before.time.total - 1)
        figures = [float(text.rstrip("%")) for text in rows[name][1:3]]
        assert rows[name][1].startswith("-")
        assert figures == pytest.approx([saved, slower], abs=0.051)
        assert rows[name][3:] == ["fits"] * each.plan.fits
    together = combined(layouts, found)
    assert together is not None and together.plan.fits
    assert combined(layouts_of("tiny_sso", 4, memory_bytes=1000), found[:0]) is None


def test_a_number_of_gpus_without_a_legal_layout_names_those_nearby():
    config = load_config(ROOT / "configs" / "llama1b_sso.yaml", [])
    with pytest.raises(ConfigError, match=r"nearest valid values: numbers of ranks 5 and 8"):
        fit(config, 7, None, "configs/llama1b_sso.yaml", [], None)
