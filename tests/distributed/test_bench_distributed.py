"""The schemes of the benchmark are one optimizer: equal results, and bytes as formulas say."""

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.size import all_units
from parallel.comm import groups as process_groups
from scripts.bench.distributed import LAYER_WISE, OURS, REPLICATED, build_schemes, fill_gradients
from tests.launch import environment, run_on_ranks

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)
PARAMETERS = sum(unit.numel for unit in all_units(TINY))
RULES = ["adamw", "muon", "spectral_sphere"]
SCRIPT = [sys.executable, "scripts/bench/distributed.py"]
RANKS, STEPS = 2, 3


def take_steps(runs: list[tuple[str, str]]) -> list[dict[str, dict[str, Any]]]:
    """Run the steps of each rule, dtype and scheme on a rank.

    Returns the weights before and after, the bytes sent in the last step, and the bytes kept.
    """
    groups = process_groups.initialize()
    found = []
    for rule, dtype in runs:
        # Small buckets, so that shard borders cut matrices.
        schemes = build_schemes(TINY, rule, groups, dtype=getattr(torch, dtype), bucket_numel=9000)
        first = {name: copied(scheme.parameters) for name, scheme in schemes.items()}
        for step in range(STEPS):
            fill_gradients(schemes, step, groups.rank)
            for scheme in schemes.values():
                scheme.comm_volume.sent.clear()
                scheme.update()
        found.append(
            {
                name: {
                    "first": first[name],
                    "weights": copied(scheme.parameters),
                    "sent": dict(scheme.comm_volume.sent),
                    "kept": scheme.memory(),
                }
                for name, scheme in schemes.items()
            }
        )
    process_groups.shutdown()
    return found


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of the tensors."""
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.fixture(scope="module")
def runs():
    """Runs by rank: every rule in float64, where only the order of sums differs.

    The last one has bfloat16 weights with float32 gradients, as in the benchmark.
    """
    arguments = {"runs": [*((rule, "float64") for rule in RULES), ("muon", "bfloat16")]}
    return run_on_ranks(RANKS, take_steps.__module__, "take_steps", arguments)


@pytest.fixture(scope="module")
def mixed(runs):
    """The bfloat16 run of each rank."""
    return [rank[-1] for rank in runs]


@pytest.mark.parametrize("rule", RULES)
def test_all_schemes_end_with_the_same_weights(runs, rule):
    results = [rank[RULES.index(rule)] for rank in runs]
    reference = results[0][REPLICATED]
    assert sum(weight.numel() for weight in reference["weights"].values()) == PARAMETERS
    for name, expected in reference["weights"].items():
        assert (expected != reference["first"][name]).any(), name
        for result in results:
            for scheme, found in result.items():
                # Ten thousand roundings of 1e-16, amplified by msign.
                torch.testing.assert_close(
                    found["weights"][name], expected, rtol=1e-10, atol=1e-10,
                    msg=f"{scheme} {name}",
                )  # fmt: skip


def test_baselines_send_what_the_formulas_say(mixed):
    others = (RANKS - 1) / RANKS
    for rank in mixed:
        assert rank[REPLICATED]["sent"] == {"all-reduce": 2 * others * PARAMETERS * 4}
        assert rank[LAYER_WISE]["sent"]["all-reduce"] == 2 * others * PARAMETERS * 4
    gathered = sum(rank[LAYER_WISE]["sent"]["uneven all-gather"] for rank in mixed)
    assert gathered == (RANKS - 1) * PARAMETERS * 2


def test_ours_sends_two_shards_and_what_is_cut(mixed):
    others = (RANKS - 1) / RANKS
    for rank in mixed:
        sent, kept = rank[OURS]["sent"], rank[OURS]["kept"]
        elements = kept["weights"] // 2
        assert PARAMETERS <= elements <= 1.01 * PARAMETERS
        assert sent["reduce-scatter"] == others * elements * 4
        assert sent["all-gather"] == others * elements * 2
    inward, outward = (
        sum(rank[OURS]["sent"][f"exchange {way}"] for rank in mixed) for way in ("in", "out")
    )
    assert inward == outward > 0


def test_state_is_kept_once_or_everywhere(mixed):
    whole = mixed[0][REPLICATED]["kept"]["masters and state"]
    # Masters and at least a momentum in float32.
    assert whole > 2 * PARAMETERS * 4
    dealt = [rank[LAYER_WISE]["kept"]["masters and state"] for rank in mixed]
    assert sum(dealt) == whole
    even = [rank[OURS]["kept"]["masters and state"] for rank in mixed]
    assert sum(even) == pytest.approx(whole, rel=0.01)
    # Whole parameters cannot be dealt as evenly as elements.
    assert max(even) < max(dealt)


def test_script_measures_all_schemes_in_one_run(root, tmp_path):
    result = tmp_path / "result.json"
    small = {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab": 60, "repeats": 2}
    command = [
        *SCRIPT,
        "--ranks",
        str(RANKS),
        *(f"--{k}={v}" for k, v in small.items()),
        "--json",
        str(result),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    figures = json.loads(result.read_text())["schemes"]
    assert list(figures) == [OURS, REPLICATED, LAYER_WISE]
    for name, each in figures.items():
        assert name in done.stdout
        assert len(each["turns"]) == 2 and each["milliseconds"] > 0
        assert each["peak_most"] >= each["scratch_most"] > 0
        # Two nearly equal masters may round to neighbouring bfloat16 values, 2^-9 apart.
        assert each["distance"] < 2**-9
    assert figures[LAYER_WISE]["sent_mean"] > figures[REPLICATED]["sent_mean"]
    assert figures[REPLICATED]["sent_mean"] > figures[OURS]["sent_mean"]


def test_placement_is_compared_from_a_config(root, tmp_path):
    result = tmp_path / "result.json"
    command = [
        *SCRIPT,
        "--placement",
        "--config",
        "configs/llama271m_sso.yaml",
        "--json",
        str(result),
    ]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    rows = json.loads(result.read_text())["rows"]
    assert {row["ranks"] for row in rows} == {2**k for k in range(3, 11)}
    for row in rows:
        assert row["max_over_mean"] >= row["max_over_bound"] >= 1 - 1e-9
    for ranks in (8, 1024):
        loads = {row["strategy"]: row["max_over_mean"] for row in rows if row["ranks"] == ranks}
        # `auto` may give up 2% of load to keep matrices where they are.
        assert loads["auto"] <= 1.02 * min(loads.values()) + 1e-9
