"""Absurd numbers are refused at once, by name, before anything loops or allocates as they ask."""

import time
from pathlib import Path

import pytest

from tests.minimal_config import problems

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
    "stop.slurm_margin_seconds": 1e300,
    "spikes.window": 10**12,
    "optimizer.rules.muon.steps": 10**8,
    "optimizer.rules.spectral_sphere.krylov_steps": 10**8,
    "optimizer.rules.spectral_sphere.max_evaluations": 10**8,
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


def test_many_matrices_in_all_layers_together_are_too_many(minimal: Path) -> None:
    (line,) = problems(minimal, "model.layers=10000", "model.heads=8192", "model.hidden=1048576")
    assert line == "model.heads times model.layers must be at most 262144, got 8192 times 10000"
