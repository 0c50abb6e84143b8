"""A benchmark under torchrun: variants of the optimizer in one run."""

import json
import sys

import pytest

from scripts.bench.train import CONFIG
from tests.commands import output_of, torchrun
from tests.launch import environment

pytestmark = pytest.mark.slow
RANKS = 2


def test_variants_of_the_optimizer_are_measured_in_one_run(tmp_path):
    result = tmp_path / "result.json"
    small = ["layers=1", "hidden=32", "heads=2", "kv_heads=2", "ffn=48", "vocab_size=60"]
    owner, narrow = "optimizer.distributed.storage=owner", "train.precision=bf16"
    said = output_of(
        *(sys.executable, *torchrun(RANKS), "scripts/bench/distributed.py"),
        *("--config", "configs/tiny_sso.yaml", "--repeats", "2", "--json", str(result)),
        *("--variant", owner, "--variant", narrow),
        *(f"model.{size}" for size in small),
        "train.precision=fp32",
        variables=environment(),
    )
    content = json.loads(result.read_text())
    figures = content["variants"]
    assert content["ranks"] == RANKS and list(figures) == [CONFIG, owner, narrow]
    assert all(name in said and each["processor"] > 0 for name, each in figures.items())
    assert figures[CONFIG]["distance"] == 0
    # Owners step the same matrices: only sums in another order differ.
    assert figures[owner]["distance"] < 1e-5 < figures[narrow]["distance"]
    sent = figures[CONFIG]["sent"]
    padded = content["parameters"] * 4 * (RANKS - 1) / RANKS
    assert padded <= sent["reduce-scatter"] < 1.1 * padded
    assert sent["all-gather"] == sent["reduce-scatter"]
    assert figures[narrow]["sent"]["all-gather"] == sent["all-gather"] / 2
