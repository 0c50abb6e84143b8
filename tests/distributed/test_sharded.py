"""The optimizers on parameters of FSDP2, HSDP, tensor parallelism and DDP, beside one process."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launch import run_on_ranks

RULES = ["adamw", "muon", "muon_sphere", "spectral_sphere", "muon_plus_plus"]
WORKERS = "tests.distributed.sharded_workers"
TOLERANCE = 1e-10
"""Of weights of size 1 in float64 after four steps, whose sums run in another order."""


@pytest.fixture(scope="module")
def one() -> dict[tuple[bool, bool], dict[str, Any]]:
    """One process by (fused projections, PC layers)."""
    results = {}
    for fused, pc in product((True, False), repeat=2):
        arguments = {"how": "one", "rules": RULES, "fused": fused, "pc": pc}
        results[fused, pc] = run_on_ranks(1, WORKERS, "curves", arguments)[0]
    return results


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize(
    ("ranks", "how", "rules", "pc"),
    [
        (2, "fsdp", RULES, False),
        (2, "tp", ["adamw", "spectral_sphere"], False),
        (2, "ddp", ["muon"], False),
        (4, "hsdp", ["spectral_sphere"], False),  # one shard is empty
        (2, "fsdp", ["adamw", "spectral_sphere"], True),
        (4, "tp_fsdp", ["muon_plus_plus"], True),
        pytest.param(4, "fsdp", RULES, False, marks=pytest.mark.slow),
        pytest.param(4, "tp_fsdp", RULES, False, marks=pytest.mark.slow),
        pytest.param(4, "hsdp", RULES, True, marks=pytest.mark.slow),
        pytest.param(2, "tp", RULES, True, marks=pytest.mark.slow),
    ],
)
def test_ranks_together_equal_one_process(
    one: dict[tuple[bool, bool], dict[str, Any]], ranks: int, how: str, rules: list[str], pc: bool
) -> None:
    fused = not how.startswith("tp")
    arguments = {"how": how, "rules": rules, "fused": fused, "pc": pc}
    results = run_on_ranks(ranks, WORKERS, "curves", arguments)
    for rule in rules:
        expected = one[fused, pc][rule]
        for result in results:
            assert_equal(result[rule]["weights"], expected["weights"])
            assert any(name.endswith(".gamma") for name in result[rule]["weights"]) is pc
        stepped = Counter[tuple[int, ...]]()
        for result in results:
            stepped.update({tuple(shape): n for *shape, n in result[rule]["stepped"]})
        alone = {tuple(shape): n for *shape, n in expected["stepped"]}
        assert stepped == alone, "each matrix is stepped once in the whole world"


def test_pc_layers_of_tensor_parallel_ranks_are_merged() -> None:
    for left, change in run_on_ranks(2, WORKERS, "merged", {"how": "tp"}):
        assert left == [] and change < 1e-12  # float64
    for said, _ in run_on_ranks(2, WORKERS, "merged", {"how": "fsdp"}):
        assert said == "merge_ needs a model before fully_shard: load the state into one"


@pytest.mark.parametrize("rule", ["adamw", "spectral_sphere"])
def test_a_checkpoint_continues_on_another_mesh(
    one: dict[tuple[bool, bool], dict[str, Any]], tmp_path: Path, rule: str
) -> None:
    folder = str(tmp_path / "state")
    shared = {"rule": rule, "folder": folder}
    run_on_ranks(4, WORKERS, "save", {"how": "hsdp", **shared})
    for ranks, how in ((2, "fsdp"), (1, "one")):
        for result in run_on_ranks(ranks, WORKERS, "resume", {"how": how, **shared}):
            assert_equal(result, one[True, False][rule]["weights"])


def test_wrong_use_is_one_clear_error() -> None:
    for said in run_on_ranks(2, WORKERS, "refusals", {}):
        meshes, placement, vector, gradients = said
        assert "must lie on one device mesh" in meshes
        assert "must be sharded or replicated, got P" in placement
        assert "at least 2 dimensions, got shape (4,)" in vector
        assert gradients == "all ranks must have gradients of the same parameters"


@pytest.mark.parametrize(("rule", "share"), [("muon", 0.25), ("spectral_sphere", 0.81)])
def test_momenta_are_sent_in_16_bits(rule: str, share: float) -> None:
    """Instead of 64: a quarter of Muon's bytes. SSO sends weights and vectors besides, exactly."""
    for distance, part in run_on_ranks(2, WORKERS, "rounded", {"rule": rule}):
        # bfloat16 rounds by 2^-9; msign may enlarge that of small singular values.
        assert 0 < distance < 0.1
        assert abs(part - share) < 0.02


def test_all_ranks_skip_a_step_that_one_cannot_take() -> None:
    assert run_on_ranks(2, WORKERS, "skipped", {}) == [[True, 1], [True, 1]]
