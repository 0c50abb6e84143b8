"""Runs with backward-pass kernels in Triton's interpreter, compared with runs without these
kernels."""

from typing import Any

import pytest
import torch

from tests.kernels.interpreted_loss import PLAIN, SMALL, STEPS
from tests.launch import run_on_ranks
from tests.run_configs import MIXTURE
from tests.token_files import write_token_set

FUSED = {"train__fused_backward": "triton", "train__compile": "aot_eager"}
GROUPED = MIXTURE | {"model__moe__backend": "grouped", "model__qk_norm": "true"}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tensor": 2}, {}),
    ({"pipeline": 2}, {"train__recompute": "full"}),
    ({"expert": 2}, MIXTURE),
    ({"expert": 2}, GROUPED),
]


@pytest.mark.parametrize(
    ("layout", "keys"), LAYOUTS, ids=["tensor", "pipeline", "expert", "grouped experts"]
)
def test_losses_and_weights_are_those_of_autograd(layout, keys, tmp_path) -> None:
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)

    def followed(parts: dict[str, Any]) -> list[dict[str, Any]]:
        case = (layout, "adamw", SMALL | keys | parts)
        arguments = {"folder": str(tmp_path), "cases": {"run": case}}
        return run_on_ranks(2, "tests.distributed.workers", "runs", arguments)

    without = PLAIN | {"train__fused_backward": "null"}
    for plain, fused in zip(followed(without), followed(FUSED), strict=True):
        expected, found = plain["run"], fused["run"]
        # float32 sums in another order.
        assert len(found["loss"]) == STEPS
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["norm"][0] == pytest.approx(expected["norm"][0], rel=1e-5)
        torch.testing.assert_close(found["units"], expected["units"], rtol=1e-5, atol=5e-6)
