"""Liger's kernels of the loss in Triton's interpreter: the run of the engine's own loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_on_ranks
from tests.token_files import write_token_set

STEPS = 20
SMALL = {
    "train__steps": STEPS,
    "train__global_batch": 2,
    "train__micro_batch": 1,
    "train__sequence_length": 16,
    "validation__samples": 1,
}


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, {}), (2, {"tensor": 2})], ids=["one", "tensor 2"]
)
def test_losses_and_weights_are_those_of_the_engines_own_loss(
    ranks: int, layout: dict[str, int], tmp_path: Path
) -> None:
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)

    def curves(fused: str) -> list[dict[str, Any]]:
        arguments = {
            "folder": str(tmp_path),
            "layout": layout,
            "overrides": SMALL | {"train__fused_loss": fused},
            "rules": ["adamw"],
        }
        return run_on_ranks(ranks, "tests.distributed.workers", "curves", arguments)

    for plain, fused in zip(curves("null"), curves("liger"), strict=True):
        expected, found = plain["adamw"], fused["adamw"]
        # float32 sums in another order.
        assert len(found["loss"]) == STEPS
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        assert found["norm"][0] == pytest.approx(expected["norm"][0], rel=1e-5)
        for name, weight in expected["units"].items():
            torch.testing.assert_close(found["units"][name], weight, rtol=1e-3, atol=1e-4)
