"""A run with all fused parts, with Liger's loss in Triton's interpreter, compared with a run
without them."""

from typing import Any

import pytest
import torch

from tests.launch import run_on_ranks
from tests.run_configs import MIXTURE
from tests.token_files import write_token_set

STEPS = 20
SMALL = {
    "train__steps": STEPS,
    "train__global_batch": 2,
    "train__micro_batch": 1,
    "train__sequence_length": 16,
    "validation__samples": 1,
    "monitors__interval": 0,
    # With 1e-8, AdamW turns the rounding of a gradient near zero into a whole step of that element.
    "optimizer__rules__adamw__epsilon": 1e-4,
}
PLAIN = {"train__fused_loss": "null", "train__compile": "null"}
FUSED = {"train__fused_loss": "liger", "train__compile": "aot_eager"}
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({}, {"train__z_loss": 0.01}),
    ({"tensor": 2}, {"train__z_loss": 0.01}),
    ({"pipeline": 2}, {"train__z_loss": 0.01}),
    ({"expert": 2}, MIXTURE),
    ({"expert": 2}, MIXTURE | {"train__z_loss": 0.01}),
]


@pytest.mark.parametrize(
    ("layout", "keys"), LAYOUTS, ids=["one", "tensor", "pipeline", "expert", "expert, z"]
)
def test_losses_and_weights_are_those_of_single_operations(layout, keys, tmp_path) -> None:
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)

    def followed(parts: dict[str, Any], *, products: bool) -> list[dict[str, Any]]:
        case = (layout, "adamw", SMALL | keys | parts)
        arguments = {"folder": str(tmp_path), "cases": {"run": case}, "products": products}
        ranks = 2 if layout else 1
        return run_on_ranks(ranks, "tests.distributed.workers", "runs", arguments)

    ranks = zip(followed(PLAIN, products=False), followed(FUSED, products=True), strict=True)
    for plain, fused in ranks:
        expected, found = plain["run"], fused["run"]
        # float32 sums in another order.
        assert len(found["loss"]) == STEPS
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert found["validation"] == pytest.approx(expected["validation"], rel=1e-5)
        assert found["norm"][0] == pytest.approx(expected["norm"][0], rel=1e-5)
        torch.testing.assert_close(found["units"], expected["units"], rtol=1e-5, atol=5e-6)
