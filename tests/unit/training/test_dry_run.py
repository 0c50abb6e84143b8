"""Every recipe fits its GPUs, and its plan fits on one screen. --fit writes a config that a run
accepts."""

import json
import re
from typing import Any

import pytest

import pretrain
from models.families import model_size
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.small_recipes import every_recipe
from training.config import load_config
from training.dry_run import rule_operands, step_shape
from training.planning.plan_commands import dry_run

SCREEN = 60

MEMORY = {
    "weights": "weights", "gradients": "gradients", "master weights": "master",
    "optimizer state": "state", "activations (estimate)": "activations",
    "optimizer buffers (estimate)": "buffers", "total": "total",
}  # fmt: skip
"""Maps the rows of the memory table to their keys in the JSON file."""


def sections(printed: str) -> dict[str, dict[str, list[str]]]:
    """Return the cells in the rows of a plan, by section and by the first cell of the row."""
    content: dict[str, dict[str, list[str]]] = {}
    for line in printed.splitlines():
        if line.startswith("== "):
            rows = content[line.removeprefix("== ")] = {}
        else:
            name, *cells = re.split(r"  +", line.strip())
            rows[name] = cells
    return content


def numbers(cells: list[str]) -> list[float]:
    """Return all numbers in the cells, without `%` and units."""
    texts = re.findall(r"[\d,]*\d(?:\.\d+)?(?:e[+-]\d+)?", " ".join(cells))
    return [float(text.replace(",", "")) for text in texts]


def check_figures(printed: str, planned: dict[str, Any], steps: int, context: int) -> None:
    """Compare every figure on the screen that concerns a rank or a step with the JSON file, in the
    unit shown."""
    shown = sections(printed)
    memory, sent = shown["memory per rank (GiB)"], next(
        rows for name, rows in shown.items() if name.startswith("sent per step (MiB)")
    )  # fmt: skip
    names = memory.pop("stage (* needs the most)", ["0"])
    stages = [planned["stages"][int(name.rstrip("*"))] for name in names]
    sent.pop("stage (* needs the most)", None)
    assert {"weights", "total"} <= memory.keys()
    for name, cells in memory.items():
        sizes = [each["memory"][MEMORY[name]] / 2**30 for each in stages]
        assert numbers(cells) == pytest.approx(sizes, abs=0.0051), name
    ratios = sent.pop("optimizer traffic / AdamW's with ZeRO-1")
    expected = [each["sent_max"] / max(1, each["sent_adamw"]) for each in stages]
    assert numbers(ratios) == pytest.approx(expected, abs=1e-4)
    sums = {"all": "sent", "all to other nodes": "sent_across_nodes"}
    for name, cells in sent.items():
        if name in sums:
            sizes = [sum(each[sums[name]].values()) for each in stages]
        elif name == "other kinds":
            sizes = [sum(v for k, v in each["sent"].items() if k not in sent) for each in stages]
        else:
            sizes = [each["sent"].get(name, 0) for each in stages]
        assert numbers(cells) == pytest.approx([size / 2**20 for size in sizes], abs=0.051), name
    run, batch = shown["run"], planned["tokens"]
    sequences, length, passes, micro_batch, tokens = numbers(run["batch"])
    assert sequences * length == tokens == batch
    copies = planned["data"] / context
    assert passes * micro_batch * copies == sequences
    steps, all_tokens, each, all_flops = numbers(run["whole run"])
    assert all_flops == pytest.approx(all_tokens * each, rel=2e-3) and all_tokens <= steps * batch
    assert each == pytest.approx(planned["model_flops"] * planned["gpus"] / batch, rel=1e-3)
    balance = shown["balance: maximum over ranks divided by the mean"]
    step = shown["step, modelled"]
    for name, kind in {"load of the rules": "load", "masters and state": "state"}.items():
        expected = [each[f"{kind}_max"] / max(1, each[f"{kind}_mean"]) for each in stages]
        assert numbers(balance[name]) == pytest.approx([x or 1 for x in expected], abs=1e-3), name
    total, *parts = numbers(step["seconds"])
    assert total == pytest.approx(planned["step_seconds"], rel=1e-3)
    assert sum(parts) == pytest.approx(sum(planned["time"].values()), rel=5e-3)
    rate, mfu, peak = numbers(step["rate"])
    assert rate == pytest.approx(planned["tokens"] / planned["step_seconds"], abs=1)
    top = planned["device"]["peak"][planned["operands"]]
    assert peak == pytest.approx(top / 1e12, abs=1)
    flops = planned["model_flops"] / planned["step_seconds"]
    assert mfu == pytest.approx(100 * flops / top, abs=0.051)
    days, hours, *_ = numbers(step["time of the run"])
    assert hours == pytest.approx(planned["gpu_hours"], abs=0.51)
    assert days == pytest.approx(planned["gpu_hours"] / planned["gpus"] / 24, abs=0.0051)
    monitors = planned["monitors"]
    if not monitors["interval"]:
        assert step["monitors"] == ["off"]
        return
    if monitors["interval"] > steps:
        assert numbers(step["monitors"]) == [monitors["interval"], steps]
        return
    interval, share, each, next_to, *_ = numbers(step["monitors"])
    assert (interval, each) == (monitors["interval"], pytest.approx(monitors["seconds"], rel=5e-3))
    assert share == pytest.approx(100 * monitors["share"], abs=0.051)
    assert next_to == pytest.approx(planned["step_seconds"], rel=5e-3)


@pytest.mark.parametrize("name", every_recipe())
def test_a_recipe_fits_the_gpus_it_names(name, capsys, tmp_path):
    path = ROOT / "configs" / f"{name}.yaml"
    config = load_config(path)
    overrides = [] if config.model.vocab_size else ["model.vocab_size=4096"]
    written = tmp_path / "plan.json"
    command = ["--config", str(path), *overrides, "--dry-run", "--json", str(written)]
    assert pretrain.main(command) == 0
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= SCREEN
    assert max(map(len, printed.splitlines())) <= 200
    planned = json.loads(written.read_text())
    assert planned["gpus"] == config.plan.gpus
    assert planned["fits"] is True and "\nfits: " in printed
    check_figures(printed, planned, config.train.steps, config.parallel.context)
    room = 0.95 * planned["device_memory_bytes"]
    assert all(stage["memory"]["total"] <= room for stage in planned["stages"])
    # Steps of a ramp are shorter in proportion to their batches, except for the optimizer.
    full = config.train.samples() / config.train.global_batch
    monitors = planned["monitors"]
    monitored = config.train.steps // monitors["interval"] if monitors["interval"] else 0
    seconds = full * planned["step_seconds"] + monitored * (monitors["seconds"] or 0.0)
    hours = seconds * planned["gpus"] / 3600
    ramp = bool(config.train.batch_ramp)
    assert planned["gpu_hours"] == pytest.approx(hours, rel=0.01 if ramp else 1e-6)
    assert f"{planned['gpu_hours']:,.0f} GPU-hours" in printed
    # A rank has three or four of its largest matrices.
    assert ("for the busiest rank, which has 1.42 times" in printed) == (name == "llama70b_sso")
    for word in ("== units", "== run", "== memory per rank", "== step, modelled"):
        assert word in printed
    sized = load_config(path, overrides)
    size = model_size(sized.model, sized.train.sequence_length)
    assert f"{size.parameters:,}, {size.active_parameters:,} per token" in printed
    assert sum(stage["parameters"] for stage in planned["stages"]) <= size.parameters
    assert config.optimizer.matrix.rule in printed


@pytest.mark.parametrize("context", [1, 2])
def test_ranks_that_share_sequences_have_their_micro_batches(context, capsys, tmp_path):
    written = tmp_path / "plan.json"
    recipe = ["--config", str(ROOT / "configs" / "tiny_sso.yaml"), "--gpus", "8"]
    keys = ["model.vocab_size=512", f"parallel.context={context}", "parallel.tensor=2"]
    keys += ["train.micro_batch=2"]
    assert pretrain.main([*recipe, *keys, "--dry-run", "--json", str(written)]) == 0
    check_figures(capsys.readouterr().out, json.loads(written.read_text()), 300, context)


def test_a_fitted_layout_is_a_config(tmp_path, capsys):
    written = str(tmp_path / "1e5.yaml")
    (tmp_path / "a: b").symlink_to(ROOT / "configs")
    recipe = str(tmp_path / "a: b" / "tiny_moe_muon.yaml")
    keys = ["model.vocab_size=512", "train.precision=bf16", "train.global_batch=8"]
    keys += ["train.micro_batch=4"]
    fit = ["--config", recipe, *keys, "--fit", "--gpus", "4", "--device", "a100"]
    assert pretrain.main([*fit, "--write", written]) == 0
    header, *layouts, _, _ = capsys.readouterr().out.splitlines()
    assert "limited by" in header and layouts
    columns = [cell.start() for cell in re.finditer(r"\S+( \S+)*", header)]
    assert len(columns) == 13
    for line in layouts:
        assert all(line[start - 1] == " " != line[start] for start in columns[1:])
    plan = tmp_path / "plan.json"
    assert pretrain.main(["--config", written, "--dry-run", "--json", str(plan)]) == 0
    printed, planned = capsys.readouterr().out, json.loads(plan.read_text())
    best = dict(zip(re.split(r"  +", header), re.split(r"  +", layouts[0]), strict=True))
    total = max(stage["memory"]["total"] for stage in planned["stages"])
    found = [float(best[name].rstrip("%")) for name in ("step s", "MFU", "GiB")]
    expected = [planned["step_seconds"], 100 * planned["mfu"], total / 2**30]
    assert found == [pytest.approx(value, abs=0.051) for value in expected]
    assert "NVIDIA A100" in printed and "4 ranks (" in printed and "fits: " in printed
    mine = load_config(written)
    assert mine.run.name == "1e5" and mine.model.vocab_size == 512
    assert (mine.plan.gpus, mine.plan.device) == (4, "a100")
    seconds, tokens = planned["step_seconds"], 8 * mine.train.sequence_length
    assert planned["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert planned["mfu"] == pytest.approx(planned["model_flops"] / seconds / 312e12)


def test_the_config_of_a_layout_keeps_references(tmp_path, monkeypatch, capsys):
    """References in an override are resolved again when the written file is read."""
    monkeypatch.setenv("TOKENS", "here")
    written = tmp_path / "mine.yaml"
    arguments = ["--config", str(ROOT / "configs" / "tiny_muon.yaml"), "--fit", "--gpus", "2"]
    arguments += ["model.vocab_size=512", "optimizer.head.lr=${optimizer.matrix.lr}"]
    arguments += ["data.train.kjv.path=${oc.env:TOKENS}/kjv", "--write", str(written)]
    arguments += ["run.name=r", "run.dir=runs/r/x", "parallel.tensor=2"]
    assert pretrain.main(arguments) == 0
    said = "the search replaces override parallel.tensor=2 with parallel.tensor=1"
    assert said in capsys.readouterr().err
    monkeypatch.setenv("TOKENS", "there")
    mine = load_config(written, ["optimizer.matrix.lr=0.5"])
    assert mine.optimizer.head.lr == 0.5
    assert mine.data.train["kjv"].path == "there/kjv"
    assert (mine.run.dir, mine.parallel.tensor) == ("runs/mine/x", 1)


@pytest.mark.parametrize(
    ("rule", "dtype", "operands"),
    [
        ("muon", "bfloat16", "bf16"),
        ("muon", "float16", "bf16"),  # as fast as bfloat16
        ("muon", "float32", "fp32"),
        ("muon", "null", "fp32"),  # of the master weights
        ("adamw", "bfloat16", "fp32"),
    ],
)
def test_a_rules_time_is_that_of_its_dtype(rule, dtype, operands, tmp_path):
    keys = {"optimizer__rules__muon__msign_dtype": dtype}
    assert rule_operands(tiny_config(str(tmp_path), rule, **keys)) == operands


def test_a_run_that_ends_early_is_planned_up_to_its_last_step(tmp_path, capsys):
    """Tokens, times and checkpoints are those of a run with as many steps."""
    keys = {"train__batch_ramp": "[{batch: 4, until_steps: 5}]", "monitors__interval": 5}
    keys |= {"data__train__more__path": "more", "data__train__more__weight": 3}
    later = ", ".join(f"{{after_steps: {n}, weights: {{more: 1}}}}" for n in (8, 12))
    keys["data__phases"] = f"[{later}]"
    early = tiny_config(str(tmp_path), "muon", **keys, train__exit_step=11)
    keys["data__phases"] = "[{after_steps: 8, weights: {more: 1}}]"
    short = tiny_config(str(tmp_path), "muon", **keys, train__steps=11)
    content = {}
    for name, config in {"early": early, "short": short}.items():
        dry_run(config, 2, "h100", str(tmp_path / f"{name}.json"))
        printed = capsys.readouterr().out
        content[name] = sections(printed), json.loads((tmp_path / f"{name}.json").read_text())
    (shown, planned), (expected, whole) = content["early"], content["short"]
    end = shown["run"].pop("early end")
    assert end[0].startswith("after step 11 of 20 (train.exit_step): tokens, FLOPs, times")
    assert "11 steps" in shown["run"]["whole run"][0] and whole["gpu_hours"] > 0
    assert (shown, planned) == (expected, whole)


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4), ("null", 4)])
def test_gradients_and_momentum_are_planned_in_their_dtypes(dtype, size, tmp_path):
    keys = {f"optimizer__distributed__{name}_dtype": dtype for name in ("gradient", "momentum")}
    inputs = step_shape(tiny_config(str(tmp_path), "muon", **keys), 1).inputs
    assert (inputs.gradient_bytes, inputs.momentum_bytes) == (size, size)
