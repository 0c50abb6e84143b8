"""Wherever it stops, a run with a batch ramp equals a run that is restarted by hand at each change
of batch size."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from math import ceil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import pretrain
from models.families import model_size
from scripts.plots.run_data import read_run
from tests.minimal_config import problems
from tests.run_configs import RULES, read_config, tiny_config
from tests.run_results import metrics_of, same_state, state_of
from training import step as training_step
from training.checkpoint import checkpoints
from training.config import InvalidConfigError, check, load_config
from training.config.schedule import (
    RampStage,
    ScheduleConfig,
    TrainConfig,
    learning_rate_factor,
    step_factor,
)
from training.data.order import TrainingData
from training.dry_run import batch_seconds, gpu_hours, plan_run
from training.report.log_lines import read_metrics
from training.run import check_start, train

LENGTH = 32
RAMP = "[{batch: 2, until_steps: 3}, {batch: 4, until_tokens: 700}]"
"""The run takes 3 steps (192 tokens), then 4 steps (512 tokens, the last of which reaches 700),
then steps of 8 sequences."""
BATCHES = [2] * 3 + [4] * 4 + [8] * 5
COMMON: dict[str, Any] = {
    "train__steps": 12,
    "train__batch_ramp": RAMP,
    "log__interval": 1,
    "checkpoint__interval": 100,
    "checkpoint__keep_last": "null",
    "validation__interval": 1,
    "validation__samples": 2,
    "monitors__interval": 3,
    "monitors__groups": "[weights]",
}
TOKENS = {"schedule__unit": "tokens", "schedule__kind": "wsd", "schedule__cooldown_fraction": 0.5}


def trained(folder: str, name: str, world: Any, exit_step: int = 12, **keys: Any) -> None:
    """Train the run FOLDER/NAME up to `exit_step`."""
    keys = {**COMMON, **keys, "run__dir": f"{folder}/{name}", "train__exit_step": exit_step}
    train(read_config(folder, **keys), world)


@pytest.fixture
def config_folder(folder: str) -> str:
    """A folder with a token set and the config of a run."""
    tiny_config(folder, "muon")
    return folder


def equal(folder: str, one: str, other: str, steps: int = 12) -> None:
    """Check that two runs have the same metrics and the same last checkpoint."""
    lines, others = (metrics_of(Path(folder) / name) for name in (one, other))
    assert [line["step"] for line in lines] == list(range(1, steps + 1))
    for line in (*lines, *others):
        del line["progress/pct"]  # this depends on `train.steps`, which manually cut runs change
    assert lines == others
    states = [state_of(Path(folder) / name, steps) for name in (one, other)]
    assert same_state(*states) == []


@pytest.mark.slow
def test_it_is_a_run_cut_by_hand(config_folder: str, world, capsys, counted: list[int]) -> None:
    trained(config_folder, "ramp", world)
    assert sum(counted) == sum(BATCHES)
    printed = capsys.readouterr().out
    assert "batch: 4 sequences per step from step 4 on, after 192 tokens" in printed
    assert "batch: 8 sequences per step from step 8 on, after 704 tokens" in printed
    change = {"checkpoint__allow_change": "[train]", "train__batch_ramp": "[]"}
    trained(config_folder, "cut", world, 3, **change, train__global_batch=2)
    trained(config_folder, "cut", world, 7, **change, train__global_batch=4)
    trained(config_folder, "cut", world, **change)
    equal(config_folder, "ramp", "cut")
    tokens = [line["progress/tokens"] for line in metrics_of(Path(config_folder) / "ramp")]
    assert tokens == [sum(BATCHES[: i + 1]) * LENGTH for i in range(12)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which runs add the number of sequences in each micro-batch."""
    read: list[int] = []
    batches = training_step.training_batches

    def noted(*arguments: Any) -> Any:
        for batch in batches(*arguments):
            read.append(batch.shape[0])
            yield batch

    monkeypatch.setattr(training_step, "training_batches", noted)
    return read


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{"data__workers": 1}, TOKENS], ids=["workers", "tokens"])
def test_three_stops_inside_change_nothing(keys, config_folder, world, counted) -> None:
    trained(config_folder, "ramp", world, **keys)
    counted.clear()
    for until in (2, 3, 5, 12):
        trained(config_folder, "stopped", world, until, **keys)
        stated = checkpoints.read_checkpoint(f"{config_folder}/stopped").meta["progress"]
        used = sum(BATCHES[:until])
        assert sum(counted) == used == stated["sample"]
        assert used * LENGTH == stated["tokens"] == stated["read"]["walk"]["tokens"]
    equal(config_folder, "ramp", "stopped")
    stated = json.loads((Path(config_folder) / "stopped" / "data.json").read_text())
    assert stated["tokens"] == sum(BATCHES) * LENGTH == stated["sets"][0]["tokens"]
    run = read_run(Path(config_folder) / "stopped")
    assert [run.tokens(line) for line in run.monitors] == [line["tokens"] for line in run.monitors]


def test_a_rewind_returns_to_the_batch_of_its_step(config_folder, world, monkeypatch, poisoned):
    """Steps 4 and 5 are not finite. The run rewinds to step 2 and leaves out their samples, 6 to
    13. The next steps have the batch sizes that belong to their step numbers."""
    read, get = [], TrainingData.__getitem__
    monkeypatch.setattr(TrainingData, "__getitem__", lambda d, k: read.append(k) or get(d, k))
    poisoned(3)
    keys = {"train__max_skipped_steps": 1, "spikes__rewinds": 1, "checkpoint__interval": 2}
    keys |= {"monitors__interval": 0, "log__interval": 5, "validation__interval": 2}
    trained(config_folder, "rewound", world, **TOKENS, **keys)
    taken = [*range(2), *range(2, 4), *range(4, 6), *range(6, 10), *range(10, 14)]
    again = [*range(4, 6), *range(14, 30), *range(30, 70)]
    assert read == taken + again
    progress = checkpoints.read_checkpoint(f"{config_folder}/rewound").meta["progress"]
    assert progress["left_out"] == [[6, 14]] and progress["sample"] == 62 + 8
    assert progress["tokens"] == sum(BATCHES) * LENGTH
    tokens = {step: sum(BATCHES[:step]) * LENGTH for step in (2, 4, 5, 6, 8, 10, 12)}
    for line in read_metrics(Path(config_folder) / "rewound"):
        left = sum(BATCHES) * LENGTH - line["progress/tokens"]
        if "progress/eta_s" in line:
            assert line["progress/eta_s"] == pytest.approx(left / line["perf/tokens_per_sec"])
    lines = metrics_of(Path(config_folder) / "rewound")
    assert {line["step"]: line["progress/tokens"] for line in lines} == tokens
    # Warm-up takes 512 tokens; wsd decays to a tenth over the last 1,024 of 1,984.
    factors = {5: 448 / 512, 10: 1 - 0.9 * 256 / 1024, 12: 1 - 0.9 * 768 / 1024}
    rates = {line["step"]: line["lr/matrix"] for line in lines if "lr/matrix" in line}
    assert rates == pytest.approx({step: RULES["muon"] * f for step, f in factors.items()})


def test_the_rate_by_tokens_is_that_by_steps_without_a_ramp() -> None:
    train_ = TrainConfig(steps=100, global_batch=8, micro_batch=2, sequence_length=32)
    for kind in ("cosine", "linear", "wsd", "constant"):
        by_steps = ScheduleConfig(kind=kind, warmup_steps=7)
        by_tokens = ScheduleConfig(kind=kind, warmup_steps=7, unit="tokens")
        for step in range(100):
            factor = step_factor(step, step * 8 * 32, train_, by_tokens)
            assert factor == step_factor(step, step * 8 * 32, train_, by_steps)
            assert factor == learning_rate_factor(step, 100, by_steps)


TRAIN = TrainConfig(steps=20, global_batch=8, micro_batch=2, sequence_length=32)


def test_the_rate_by_tokens_is_a_function_of_the_share_of_the_tokens() -> None:
    """Warm-up ends after the number of tokens in its full steps, and decay ends with the last
    token."""
    ramp = (RampStage(batch=2, until_steps=6), RampStage(batch=4, until_steps=10))
    config = replace(TRAIN, batch_ramp=ramp)
    schedule = ScheduleConfig(kind="linear", warmup_steps=2, min_ratio=0.0, unit="tokens")
    batches = [2] * 6 + [4] * 4 + [8] * 10
    tokens = 0
    for step, batch in enumerate(batches):
        end = tokens + batch * 32
        warm, total = 2 * 8 * 32, sum(batches) * 32
        expected = min(1.0, end / warm) if tokens < warm else 1 - (tokens - warm) / (total - warm)
        assert step_factor(step, tokens, config, schedule) == pytest.approx(expected, rel=1e-12)
        tokens = end


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.5, 0.6, 0.75, 0.8, 0.9, 0.95])
def test_decay_begins_after_the_first_step_that_reaches_its_tokens(fraction: float) -> None:
    """Decay starts in different parts of the run, both at the borders between stages of the ramp
    and elsewhere."""
    ramp = (RampStage(batch=3, until_steps=6), RampStage(batch=5, until_steps=11))
    config = replace(TRAIN, micro_batch=1, batch_ramp=ramp)
    schedule = ScheduleConfig(kind="wsd", cooldown_fraction=fraction, unit="tokens")
    before = [0, *accumulate([3] * 6 + [5] * 5 + [8] * 9)]
    left = before[-1] - round(fraction * before[-1] / 8) * 8
    start = next(step for step, samples in enumerate(before) if samples >= left)
    assert schedule.decay_start(config) == start
    factors = [step_factor(i, n * 32, config, schedule) for i, n in enumerate(before[:-1])]
    assert {*factors[:start]} == {1.0} and all(factor < 1 for factor in factors[start + 1 :])
    by_steps = ScheduleConfig(kind="wsd", cooldown_fraction=fraction)
    assert by_steps.decay_start(config) == 20 - round(20 * fraction)


def test_a_run_that_only_decays_begins_at_the_peak(minimal: Path) -> None:
    """The run has 18.75 full steps, which is less than the next integer, 19."""
    keys = ["train.steps=20", "schedule.kind=wsd", "schedule.unit=tokens"]
    keys += ["schedule.cooldown_fraction=1", "schedule.min_ratio=0", "train.global_batch=8"]
    config = load_config(minimal, [*keys, "train.batch_ramp=[{batch: 3, until_steps: 2}]"])
    train, schedule = config.train, config.schedule
    assert schedule.decay_start(train) == 0
    factors = [step_factor(i, 3 * i * 32, train, schedule) for i in (0, 1, 2)]
    assert factors == pytest.approx([1, 147 / 150, 144 / 150])


def test_the_plan_adds_up_the_stages(minimal, capsys) -> None:
    """Steps with a batch size take as long as in a run that has this batch size from the start."""
    ramp = "train.batch_ramp=[{batch: 4, until_steps: 30}, {batch: 8, until_tokens: 15000}]"
    keys = ["model.vocab_size=512", "train.global_batch=32", "train.micro_batch=2"]
    keys += ["parallel.tensor=2"]
    config = load_config(minimal, [*keys, ramp])
    planned = plan_run(config, 4)
    second = ceil((15_000 - 30 * 4 * 32) / (8 * 32))
    counts = {4: 30, 8: second, 32: 70 - second}
    hours = 0.0
    parts = batch_seconds(config, planned)
    for (part, seconds), (batch, steps) in zip(parts, counts.items(), strict=True):
        alone = load_config(minimal, [*keys, f"train.global_batch={batch}"])
        assert (part.batch, part.steps) == (batch, steps)
        assert seconds == plan_run(alone, 4).time.total
        hours += steps * seconds * 4 / 3600
    assert gpu_hours(config, planned) == pytest.approx(hours, rel=1e-12)
    assert pretrain.main(["--config", str(minimal), *keys, ramp, "--dry-run", "--gpus", "4"]) == 0
    printed = capsys.readouterr().out
    tokens = sum(batch * steps for batch, steps in counts.items()) * 32
    flops = model_size(config.model, 32).flops_per_token * tokens
    assert f"100 steps, {tokens:,} tokens" in printed and f"{flops:.4g} in all" in printed
    assert re.search("\nbatch ramp +4 sequences in the 30 steps after step 0, ", printed)
    assert f"8 sequences in the {second} steps after step 30, " in printed


WRONG = [
    (
        ["[{batch: 8, until_steps: 3}]"],
        None,
        "[0].batch must be below global_batch = 8, got 8: batch sizes must grow",
    ),
    (
        ["[{batch: 4, until_steps: 9}, {batch: 2, until_steps: 12}]"],
        None,
        "below the next batch = 2",
    ),
    (
        ["[{batch: 2, until_steps: 9}, {batch: 4, until_steps: 9}]"],
        None,
        "must be above the start of the stage (step 9",
    ),
    (["[{batch: 2, until_steps: 9}, {batch: 4, until_tokens: 500}]"], None, ", 576 tokens)"),
    (["[{batch: 2, until_steps: 100}]"], None, "must end the stage before steps = 100"),
    (
        ["[{batch: 2, until_tokens: 6369}]"],
        None,
        "got 6,369, which ends the stage after step 100; for a shorter run",
    ),
    (["[{batch: 2}]"], None, "[0].until_steps or until_tokens must be set"),
    (["[{batch: 2, until_steps: 3, until_tokens: 9}]"], None, "got 2"),
    (["[{batch: 2, until_steps: 3.5}]"], None, "[0].until_steps must be an integer"),
    (["[{batch: 2, until_step: 3}]"], None, "until_step; did you mean train.batch_ramp[0].until_s"),
    (["{batch: 2, until_steps: 3}"], None, "must be a list (each item a section)"),
    (["[{batch: 2, until_steps: 3}]"], 2, "[0].batch must be divisible by train.micro_batch times"),
    (["[{batch: 3, until_steps: 3}]"], 1, "train.micro_batch times the data-parallel size = 2 * 1"),
    (
        ["[{batch: 2, until_steps: 3}]", "schedule.unit=tokens", "schedule.warmup_steps=98"],
        None,
        "schedule.warmup_steps must be below the run's 97.75 full steps, got 98",
    ),
]


@pytest.mark.parametrize("end", ["until_steps: 3", "until_tokens: 192"])
def test_stages_that_are_over_limit_no_layout(end, minimal, monkeypatch) -> None:
    """A run that started on one rank can resume on more ranks after the stage whose batch would be
    too small."""
    config = load_config(minimal, [f"train.batch_ramp=[{{batch: 2, {end}}}]"])
    check(config, 2, step=3, tokens=192)
    check(config, 2, step=config.train.steps, tokens=1_000_000)
    with pytest.raises(InvalidConfigError, match=r"train.batch_ramp\[0\].batch must be divisible"):
        check(config, 2, step=2, tokens=128)
    with pytest.raises(InvalidConfigError, match="train.global_batch must be divisible"):
        check(config, 8, step=3, tokens=192)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    check_start(config, SimpleNamespace(meta={"progress": {"step": 3, "tokens": 192}}))
    with pytest.raises(InvalidConfigError, match=r"train.batch_ramp\[0\].batch must be divisible"):
        check_start(config, None)


@pytest.mark.parametrize(("keys", "ranks", "text"), WRONG)
def test_a_ramp_that_makes_no_sense_is_refused(keys, ranks, text, minimal) -> None:
    found = problems(minimal, f"train.batch_ramp={keys[0]}", *keys[1:], world_size=ranks)
    assert len(found) == 1 and text in found[0]


def test_a_missing_limit_hides_no_batch_that_does_not_grow(minimal) -> None:
    found = problems(minimal, "train.batch_ramp=[{batch: 8}, {batch: 4, until_steps: 3}]")
    assert len(found) == 2
    assert any("[0].until_steps or until_tokens must be set" in line for line in found)
    assert any("[0].batch must be below the next batch = 4, got 8" in line for line in found)
