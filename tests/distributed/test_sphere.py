"""Weights stay on their spheres, whole or cut."""

from tests.launch import run_on_ranks
from tests.token_files import write_token_set

WORKERS = "tests.distributed.workers"


def test_every_unit_stays_on_its_sphere(tmp_path):
    tensor = 2
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
