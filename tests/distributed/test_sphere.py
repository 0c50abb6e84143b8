"""Weights stay on their spheres, and a cut or fused matrix is updated as the whole, unfused one."""

import pytest
import torch

from spectral.rules import RULES
from tests.launch import run_on_ranks
from tests.token_files import write_token_set

WORKERS = "tests.distributed.workers"
MATRIX_RULES = [name for name, rule in RULES.items() if rule.whole_matrix]


@pytest.mark.parametrize("tensor", [1, 2])
def test_every_unit_stays_on_its_sphere(tensor, tmp_path):
    write_token_set(tmp_path / "tokens", tokens=20_000, vocab=120, seed=0)
    arguments = {
        "folder": str(tmp_path),
        "layout": {"tensor": tensor},
        "rules": ["muon_sphere", "spectral_sphere"],
        # MuonSphere's update may lie along the normal: its norm then moves by lr, half the bound.
        "lr": 5e-3,
    }
    for results in run_on_ranks(tensor, WORKERS, "radius_errors", arguments):
        for rule, errors in results.items():
            assert len(errors) == 2 * ((4 + 2 + 2) // tensor + 4), rule
            assert max(errors.values()) < 1e-2, errors


@pytest.mark.parametrize("qkv_units, split", [("head", True), ("component", False)])
def test_tensor_parallel_update_is_the_one_process_update(qkv_units, split):
    options = {"qkv_units": qkv_units, "split_gate_up": split}
    arguments = {"rules": MATRIX_RULES, "steps": 3, **options}
    alone = run_on_ranks(1, WORKERS, "optimizer_steps", {"layout": {}, **arguments})[0]
    ranks = run_on_ranks(2, WORKERS, "optimizer_steps", {"layout": {"tensor": 2}, **arguments})
    for rule in MATRIX_RULES:
        first, second = (each[rule] for each in ranks)
        found = {**first, **second}
        assert found.keys() == alone[rule].keys()
        for name, whole in alone[rule].items():
            # float64 leaves only the order of sums inside products of other batch sizes.
            torch.testing.assert_close(found[name], whole, rtol=1e-10, atol=1e-12)
        for name in first.keys() & second.keys():
            assert torch.equal(first[name], second[name]), name
