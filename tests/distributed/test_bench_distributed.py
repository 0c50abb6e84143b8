"""The schemes of the benchmark are one optimizer: equal results, and bytes as formulas say."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import ModelConfig
from models.engine import engine_version
from models.size import all_units
from models.units import Unit
from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from parallel.model import ParallelModel, build_model
from parallel.optimizer.build import build_optimizer
from parallel.optimizer.routing import Assignment
from scripts.bench.distributed import (
    LAYER_WISE,
    MEGATRON,
    OURS,
    REPLICATED,
    Scheme,
    build_schemes,
    fill_gradients,
)
from scripts.bench.megatron_peer import MegatronLayerWise, why_absent
from spectral.rules import RULES
from tests.launch import environment, run_on_ranks
from tests.run_configs import tiny_config
from training.config import group_of

TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)
PARAMETERS = sum(unit.numel for unit in all_units(TINY))
pytestmark = pytest.mark.slow

CHOSEN = ["adamw", "muon", "spectral_sphere"]
RANKS, STEPS = 2, 3


def schemes_of(
    rule: str, dtype: torch.dtype, groups: Groups, *, peer: bool = False
) -> dict[str, Scheme]:
    """The three schemes on a tiny model, with buckets so small that shard borders cut matrices.

    With `peer` that of megatron-core too, on its units.
    """

    def assign(unit: Unit) -> Assignment:
        group = group_of(unit.role)
        name = rule if group == "matrix" else "adamw"
        return Assignment(group, name, RULES[name](), 5e-3, 0.1)

    def build() -> ParallelModel:
        return build_model(
            TINY,
            groups,
            seed=0,
            sequence_length=8,
            dtype=dtype,
            elementwise=lambda unit: not assign(unit).whole_matrix,
            bucket_numel=9000,
            **({"qkv_units": "component", "split_gate_up": False} if peer else {}),
        )

    model = build()
    schemes = build_schemes(model, build_optimizer(model, assign), assign, groups)
    return schemes | ({MEGATRON: MegatronLayerWise(build(), assign)} if peer else {})


def take_steps(runs: list[tuple[str, str]], peer: bool = False) -> list[dict[str, dict[str, Any]]]:
    """Run on every rank: for each rule and dtype and each scheme, weights before and after some
    steps, bytes sent in the first step, and bytes kept."""
    groups = process_groups.initialize()
    found = []
    for rule, dtype in runs:
        schemes = schemes_of(rule, getattr(torch, dtype), groups, peer=peer)
        first = {name: copied(scheme.parameters) for name, scheme in schemes.items()}
        sent: dict[str, dict[str, int]] = {}
        for step in range(STEPS):
            fill_gradients(schemes, step, groups.rank)
            for name, scheme in schemes.items():
                scheme.comm_volume.sent.clear()
                scheme.update()
                sent.setdefault(name, dict(scheme.comm_volume.sent))
        found.append(
            {
                name: {
                    "first": first[name],
                    "weights": copied(scheme.parameters),
                    "sent": sent[name],
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
    """By rank and run: in float64, where only sums in another order differ, every rule; and, last,
    bfloat16 weights with float32 gradients, as the benchmark has them."""
    arguments = {"runs": [*((rule, "float64") for rule in CHOSEN), ("muon", "bfloat16")]}
    return run_on_ranks(RANKS, take_steps.__module__, "take_steps", arguments)


@pytest.fixture(scope="module")
def mixed(runs):
    """The bfloat16 run of each rank."""
    return [rank[-1] for rank in runs]


@pytest.mark.parametrize("rule", CHOSEN)
def test_all_schemes_end_with_the_same_weights(runs, rule):
    results = [rank[CHOSEN.index(rule)] for rank in runs]
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
    # An owner also keeps the float32 weights of matrices that are not whole in its shard.
    assert whole <= sum(even) < 1.05 * whole
    # Whole parameters cannot be dealt as evenly as elements.
    assert max(even) < max(dealt)


def test_the_engines_own_optimizer_is_the_same_muon():
    """Where it is installed: weights, bytes and state are those of our baselines."""
    muon = [Assignment("matrix", "muon", RULES["muon"](), 5e-3, 0.1)]
    absent = why_absent(muon, torch.bfloat16)
    if absent is not None:
        pytest.skip(absent)
    arguments = {"runs": [("muon", "bfloat16")], "peer": True}
    results = [
        rank[0] for rank in run_on_ranks(RANKS, take_steps.__module__, "take_steps", arguments)
    ]
    others = (RANKS - 1) / RANKS
    for result in results:
        found, ours = result[MEGATRON], result[OURS]
        for name, expected in result[REPLICATED]["weights"].items():
            assert (found["first"][name] == ours["first"][name]).all(), name
            # Masters in float32, whose sums differ, may round to neighbouring bfloat16 values.
            torch.testing.assert_close(found["weights"][name], expected, rtol=2**-7, atol=1e-6)
        elements = found["kept"]["weights"] // 2
        assert PARAMETERS <= elements < 1.1 * PARAMETERS  # shards are padded
        assert found["sent"] == {
            "reduce-scatter": int(others * elements * 4),
            "all-gather": int(others * elements * 2),
        }
    kept = [result[MEGATRON]["kept"]["masters and state"] for result in results]
    whole = results[0][REPLICATED]["kept"]["masters and state"]
    # A float32 master and a momentum of every matrix, three numbers of every other element; Adam's
    # step counts and padding are small.
    assert whole <= sum(kept) < 1.1 * whole


@pytest.mark.parametrize(
    ("group", "rule", "dtype", "text"),
    [
        ("matrix", "spectral_sphere", torch.bfloat16, "it has Muon for matrices"),
        ("embedding", "muon", torch.bfloat16, "it has Adam beside Muon"),
        ("matrix", "muon", torch.float32, "masters of bfloat16 weights alone"),
    ],
)
def test_peer_says_why_it_is_left_out(group, rule, dtype, text):
    assigned = [Assignment(group, rule, RULES[rule](), 5e-3, 0.1)]
    assert text in why_absent(assigned, dtype, parts=())


def test_peer_that_is_not_installed_is_named():
    assert why_absent([], torch.bfloat16, parts=("torch.nn.Linear", "torch.nn.Nowhere")) == (
        f"megatron-core {engine_version()} is installed without torch.nn.Nowhere"
    )


def run_script(root: Path, script: str, *arguments: str) -> str:
    """What a benchmark prints on two ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), f"scripts/bench/{script}.py", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_script_measures_all_schemes_in_one_run(root, tmp_path):
    result = tmp_path / "result.json"
    small = ["layers=1", "hidden=32", "heads=2", "kv_heads=2", "ffn=48", "vocab_size=60"]
    said = run_script(
        root,
        "distributed",
        *("--config", "configs/tiny_sso.yaml", "--repeats", "2", "--json", str(result)),
        *(f"model.{each}" for each in small),
        "train.precision=bf16",
    )
    content = json.loads(result.read_text())
    figures = content["schemes"]
    assert content["ranks"] == RANKS and list(figures) == [OURS, REPLICATED, LAYER_WISE]
    assert f"{MEGATRON} left out: " in said  # its matrices have another rule than Muon
    for name, each in figures.items():
        assert name in said
        assert len(each["turns"]) == 2 and each["milliseconds"] > 0
        assert each["peak_most"] >= each["scratch_most"] > 0
        # Two nearly equal masters may round to neighbouring bfloat16 values, 2^-9 apart.
        assert each["distance"] < 2**-9
    assert figures[LAYER_WISE]["sent_mean"] > figures[REPLICATED]["sent_mean"]
    assert figures[REPLICATED]["sent_mean"] > figures[OURS]["sent_mean"]


def test_training_is_measured_on_the_layout_of_the_config(root, tmp_path):
    tiny_config(str(tmp_path))
    result = tmp_path / "result.json"
    moe = ["family=moe", "moe.experts=4", "moe.top_k=2", "moe.expert_ffn=32"]
    run_script(
        root,
        "train",
        *("--config", f"{tmp_path}/config.yaml", "--synthetic", "--json", str(result)),
        *("--steps", "1", "--warmup", "1"),
        *(f"model.{each}" for each in moe),
        "parallel.expert_tensor=2",
    )
    layout = json.loads(result.read_text())["layout"]
    assert layout["expert_tensor"] == 2 and layout["data"] == 2
