"""The estimate of a monitored step's memory against what such a step allocates."""

import pytest

from scripts.bench.live_bytes import peak_bytes
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.build import build_data, build_trainer
from training.dry_run import plan_run
from training.planning.report import describe

# Short sequences, so that inspection needs more memory than forward and backward.
SMALL = {"train__sequence_length": 16, "train__micro_batch": 1, "train__global_batch": 4}
NOISE = {
    "monitors__groups": "[weights,gradients,updates,noise,activations,attention]",
    "monitors__noise_samples": 4,
}
MOE = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 64,
    "model__moe__dense_layers": 1,
}


@pytest.fixture
def folder(tmp_path):
    """A folder with a token set."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


@pytest.mark.parametrize(
    "keys",
    [{}, NOISE, {"pc__level": 2}, MOE, {"model__vocab_size": 2048}],
    ids=["dense", "noise", "preconditioned", "experts", "vocabulary"],
)
def test_a_monitored_step_allocates_what_the_plan_says(folder, world, keys):
    config = tiny_config(folder, "muon", monitors__interval=4, **SMALL, **keys)
    trainer = build_trainer(config, world, *build_data(config))
    peak = peak_bytes(lambda: [trainer.advance() for _ in range(4)])
    # Five copies in float64 is a rounded number, and shapes differ within a bucket.
    assert plan_run(config, 1).memory.monitors == pytest.approx(peak, rel=0.15)


def test_the_plan_counts_monitored_steps_if_there_are_any(folder):
    config = tiny_config(folder, "muon")
    planned = plan_run(config, 1)
    assert planned.memory.monitors > 0
    assert "a monitored step (estimate)" in describe(config, planned)
    without = plan_run(tiny_config(folder, "muon", monitors__interval=0), 1).memory
    assert without.monitors == 0
    kept = without.weights + without.gradients + without.master + without.state
    assert planned.memory.total == kept + planned.memory.monitors > without.total
    spread = plan_run(config, 4).memory
    assert spread.monitors < 0.7 * planned.memory.monitors
    # One layer per monitored step, with hardly any room.
    sampled = tiny_config(folder, "muon", monitors__activation_gib=1e-9)
    assert plan_run(sampled, 1).memory.monitors < planned.memory.monitors
    choosing = tiny_config(folder, "muon", monitors__interval=0, optimizer__auto_rule__lr=1e-3)
    assert 0 < plan_run(choosing, 1).memory.monitors < planned.memory.monitors
