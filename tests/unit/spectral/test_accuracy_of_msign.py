"""The accuracy of msign on momenta recorded during training, as given in docs/numerics.md."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spectral import msign, solve_multiplier
from tests.paths import ROOT

LEAST = 1e-3
"""Smallest singular value, for matrices of Frobenius norm 1, whose gain is compared."""
ROWS = json.loads((ROOT / "benchmarks/results/msign.json").read_text())["settings"]
pytestmark = pytest.mark.slow


def measured(schedule: str, steps: int, dtype: torch.dtype) -> dict[str, float]:
    """Return a row of the table: errors relative to the polar factor from a float64 SVD, gains of
    singular values, and the largest |<u v^T, direction>| of SSO after one evaluation."""
    stored = load_file(ROOT / "tests/data/momenta.safetensors")
    options: dict[str, Any] = {"schedule": schedule, "steps": steps, "dtype": dtype}
    errors, gains, residuals = [], [], []
    for name in (key.removeprefix("momentum.") for key in stored if key.startswith("momentum.")):
        matrix = stored[f"momentum.{name}"].float()[None]
        matrix /= matrix.norm()
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        factor = msign(matrix, **options).double()
        errors.append(float((factor - left @ right).norm() / values.shape[-1] ** 0.5))
        gains += (left.mT @ factor @ right.mT).diagonal(dim1=-2, dim2=-1)[values > LEAST].tolist()
        pair = (stored[f"{side}.{name}"][None] for side in "uv")
        tangent = solve_multiplier(matrix, *pair, tolerance=5e-3, **options)
        residuals.append(tangent.residual.abs().item())
    return {
        "error": sum(errors) / len(errors),
        "worst error": max(errors),
        "least gain": min(gains),
        "greatest gain": max(gains),
        "largest |f|": max(residuals),
    }


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['schedule']}-{row['steps']}-{row['dtype']}"
)
def test_the_table_is_what_msign_computes(row: dict[str, Any]) -> None:
    figures = measured(row["schedule"], row["steps"], getattr(torch, row["dtype"]))
    # CPUs round and sum 16-bit products in different orders, so figures agree to 5%.
    assert figures["error"] == pytest.approx(row["error"], rel=0.05)
    assert figures["worst error"] == pytest.approx(row["worst error"], rel=0.05)
    assert figures["least gain"] == pytest.approx(row["least gain"], abs=0.02)
    assert figures["greatest gain"] == pytest.approx(row["greatest gain"], abs=0.02)
    assert figures["largest |f|"] <= 1.1 * row["largest |f|"] + 1e-3
