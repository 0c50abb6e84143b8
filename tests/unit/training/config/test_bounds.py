"""Absurd numbers are refused at once, by name, before anything loops or allocates as they ask."""

import time
from pathlib import Path

import pytest

import pretrain
from tests.minimal_config import problems
from tests.run_configs import tiny_config
from tests.token_files import write_token_set

ABSURD = {
    "model.layers": 10**9,
    "model.hidden": 10**12,
    "model.heads": 10**9,
    "model.vocab_size": 10**18,
    "train.steps": 10**30,
    "train.global_batch": 10**15,
    "train.micro_batch": 10**15,
    "train.sequence_length": 10**12,
    "data.workers": 10**6,
    "parallel.timeout_seconds": 1e300,
    "parallel.tensor": 10**9,
    "watchdog.hang_seconds": 1e300,
    "watchdog.heartbeat_seconds": 1e300,
    "stop.slurm_margin_seconds": 1e300,
    "spikes.window": 10**12,
    "optimizer.rules.muon.steps": 10**8,
    "optimizer.rules.spectral_sphere.krylov_steps": 10**8,
    "optimizer.rules.spectral_sphere.max_evaluations": 10**8,
    "optimizer.distributed.bucket_elements": 10**15,
    "monitors.noise_samples": 10**9,
    "log.interval": 10**30,
    "seed": 10**30,
    "optimizer.matrix.lr": 1e200,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("key", ABSURD)
def test_an_absurd_number_is_named(key: str, minimal: Path) -> None:
    start = time.process_time()
    assert problems(minimal, f"{key}={ABSURD[key]}") == [
        line for line in problems(minimal, f"{key}={ABSURD[key]}") if line.startswith(f"{key} must")
    ]
    assert time.process_time() - start < 5


def test_other_problems_are_reported_beside_it(minimal: Path) -> None:
    found = problems(minimal, "model.layers=1000000000", "train.stepz=3", "seed=x")
    assert len(found) == 3 and "model.layers must be at most 10000, got 1000000000" in found


def test_many_matrices_in_all_layers_together_are_too_many(minimal: Path) -> None:
    (line,) = problems(minimal, "model.layers=10000", "model.heads=8192", "model.hidden=1048576")
    assert line == "model.heads times model.layers must be at most 262144, got 8192 times 10000"


@pytest.mark.parametrize(
    "override",
    ["model.init.radius_scaler=0", "model.init.std=-1", "model.init.std=0",
     "model.init.embedding_std=0", "model.init.head_std=-1"],
)  # fmt: skip
def test_an_initialisation_without_spread_is_refused(override: str, minimal: Path) -> None:
    key, _ = override.split("=")
    assert any(line.startswith(f"{key} must be a") for line in problems(minimal, override))


def test_a_plan_for_a_folder_that_is_not_there_is_refused(tmp_path, capsys) -> None:
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)
    tiny_config(str(tmp_path))
    command = ["--config", f"{tmp_path}/config.yaml", "--dry-run", "--json"]
    assert pretrain.main([*command, f"{tmp_path}/nowhere/plan.json"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: --json must be in a folder that exists") and not said.out
