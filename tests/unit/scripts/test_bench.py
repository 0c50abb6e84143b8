"""Single-process benchmarks run on small models, and their figures are consistent."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from models.families import model_size
from scripts.bench import steps, train
from scripts.bench.measure import in_turn
from tests.commands import output_of, torchrun
from tests.launch import environment
from tests.paths import ROOT
from tests.run_configs import tiny_config

SET = "2x16x24,1x32x16"


@pytest.mark.slow
def test_every_optimizer_has_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps.json"
    options = ["--sets", SET, "--repeats", "1", "--device", "cpu", "--json", str(file)]
    assert steps.main(options) == 0
    times = json.loads(file.read_text())["figures"][SET]
    assert set(times) == {*steps.library_options(), *steps.torch_optimizers(5)}
    assert min(row["ms"] for row in times.values()) > 0
    monkeypatch.setenv("WORLD_SIZE", "2")  # ranks exchange over gloo
    assert steps.main(["--device", "cuda"]) == 2


@pytest.mark.slow
def test_matrices_of_a_recipe_are_stepped_by_its_settings(tmp_path: Path) -> None:
    recipe, file = ROOT / "configs/tiny_sso.yaml", tmp_path / "steps.json"
    options = ["--config", str(recipe), "--shares", "1", "2", "--repeats", "1", "--device", "cpu"]
    options += ["--rules", "muon", "spectral_sphere", "--json", str(file)]
    assert steps.main([*options, "optimizer.rules.spectral_sphere.steps=2"]) == 0
    figures = json.loads(file.read_text())["figures"]
    names = ["muon", "spectral_sphere", "torch AdamW, fused", "torch Muon"]
    assert [list(times) for times in figures.values()] == 2 * [names]


@pytest.mark.slow
def test_ranks_that_share_weights_send_what_the_exchange_needs(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    command = [sys.executable, *torchrun(2), "scripts/bench/steps.py", "--device", "cpu"]
    command += ["--sets", "4x16x24", "--repeats", "1", "--json", str(file)]
    output_of(*command, variables=environment())
    content = json.loads(file.read_text())
    times = content["figures"]["4x16x24"]
    elements = 4 * 16 * 24
    # Each half is sent to its owner, and the update back.
    assert content["ranks"] == 2 and times["adamw"]["bytes"] == 0
    assert times["muon"]["bytes"] == elements * 4
    assert times["muon, equal"]["bytes"] == elements * 2


@pytest.mark.slow
def test_the_speed_of_training_is_that_of_its_phases(folder: str, tmp_path: Path) -> None:
    config, out = tiny_config(folder), tmp_path / "out.json"
    steps = ["--steps", "2", "--peak-flops", "1e9", "--json", str(out)]
    assert train.main(["--config", f"{tmp_path}/config.yaml", *steps]) == 0
    result = json.loads(out.read_text())
    speed = result["tokens_per_second"]
    assert speed == pytest.approx(8 * 32 / result["seconds_per_step"])
    flops = model_size(config.model, 32).flops_per_token
    assert result["mfu"] == pytest.approx(speed * flops / 1e9)
    assert set(result["phase_shares"]) == set(train.PHASES)
    assert sum(result["phase_shares"].values()) == pytest.approx(1)
    for phase in ("data", "forward", "backward", "clip", "optimizer"):
        assert result["phase_seconds"][phase] > 0, phase
    assert sum(result["phase_seconds"].values()) <= 1.01 * result["seconds_per_step"]
    assert not (tmp_path / "run").exists()


def test_measured_steps_have_the_full_batch_and_no_report(folder: str, tmp_path: Path) -> None:
    ramp = "train.batch_ramp=[{batch: 4, until_steps: 3}]"
    few = ["train.steps=5", "train.exit_step=4", "schedule.warmup_steps=0", ramp]
    options = ["--steps", "9", "--variant", "train.z_loss=0.1 train.exit_step=3"]
    tiny_config(folder)
    options = ["--config", f"{tmp_path}/config.yaml", *few, *options]
    read, made = (train.variants(train.parse([*options, *more])) for more in ([], ["--synthetic"]))
    assert [config.train.z_loss for config in read.values()] == [0, 0.1]
    mock = [config.data.mock for config in (*read.values(), *made.values())]
    assert mock == [False, False, True, True]
    for config in read.values():
        assert {*map(config.train.batch, range(99), [0] * 99)} == {8}
        assert config.train.last > train.WARM_UP + 9


def test_figures_over_ranks_are_those_of_the_slowest_and_fullest(folder: str) -> None:
    """The phases are means, so the mean over two ranks equals the phase of neither rank."""
    config = tiny_config(folder)
    trainer = SimpleNamespace(config=config, data=SimpleNamespace(attended_length=lambda: 32))
    sides = {}
    for side, slower in ((train.CONFIG, 1), ("variant", 1.5)):
        ranks = [
            dict.fromkeys(train.PHASES, 0.0)
            | {"forward": 0.25 * rank, "optimizer": 0.5 * slower, "step": rank * slower}
            | {"peak_bytes": 70 // rank, "optimizer_bytes": rank << 20}
            for rank in (1, 2)
        ]
        sides[side] = train.summary(trainer, ranks, 1e9)
    found = sides[train.CONFIG]
    flops = model_size(config.model, 32).flops_per_token
    assert found["seconds_per_step"] == 2 and found["tokens_per_step"] == 8 * 32
    assert found["tokens_per_second"] == 128 and found["tokens_per_second_per_device"] == 64
    assert found["mfu"] == pytest.approx(64 * flops / 1e9) and found["flops_per_token"] == flops
    assert (found["peak_memory_bytes"], found["optimizer_bytes"]) == (70, 2 << 20)
    assert found["phase_seconds"]["forward"] == 0.375
    assert found["phase_shares"]["optimizer"] == pytest.approx(0.5 / 0.875)
    # The update is 0.5 s of a step of 0.875 s, and 0.75 s in the variant.
    first, other = train.compared(sides)
    assert (first["x"], first["x by update"], first["step (ms)"]) == (1, 1, 875)
    assert other["update (ms)"] == 750 and other["masters and state (MiB)"] == 2
    assert [other["x"], other["x by update"]] == pytest.approx([1.125 / 0.875] * 2)


def test_time_counts_for_the_innermost_phase() -> None:
    """Test nested and consecutive phases. Times before a restart do not count."""
    times = iter([0, 100, 101, 103, 107, 115, 131, 163, 227])
    phases = train.Phases(torch.device("cpu"), clock=lambda: next(times))
    phases.restart()
    phases.restart()  # at 100
    with phases.phase("backward"):  # at 101
        with phases.phase("forward"):  # from 103 to 107
            pass
        with phases.phase("wait for weights"):  # from 115 to 131
            pass
    spent = {name: seconds for name, seconds in phases.seconds().items() if seconds}
    assert spent == {"other": 1 + 64, "backward": 2 + 8 + 32, "forward": 4, "wait for weights": 16}


def test_a_recipe_is_stepped_with_its_overrides() -> None:
    recipe = [f"{ROOT}/configs/tiny_sso.yaml", "optimizer.rules.spectral_sphere.steps=2"]
    options = steps.parse(["--config", *recipe, "--shares", "1", "2"])
    shares, configs = zip(*steps.cases(options).values(), strict=True)
    for config in configs:
        assert {each.get("steps", 2) for each in steps.recipe_options(config).values()} == {2}
    whole, half = (sum(rows * cols for rows, cols in share) for share in shares)
    assert whole / 2 <= half < 0.6 * whole


def test_peak_memory_is_in_bytes() -> None:
    """The peak is compared with the kernel's value, which is in KiB."""
    (stated,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert train.peak_bytes(torch.device("cpu")) == pytest.approx(1024 * int(stated), rel=0.1)


def test_sides_take_turns_after_the_warm_up() -> None:
    calls: list[str] = []
    sides = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert in_turn(sides, rounds=2, warm_up=1) == {"a": [3, 5], "b": [4, 6]}
    assert calls == [*"ababab"]
