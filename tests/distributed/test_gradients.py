"""On any layout, the losses and gradients of every family are the same as in one process."""

from typing import Any

import pytest
import torch

from tests.launch import run_on_ranks
from tests.slow_cases import slow_but
from tests.tiny_families import SETTINGS, settings

WORKERS = "tests.distributed.gradient_workers"
MIXTURES = ["moe", "deepseek"]
DENSE = [family for family in SETTINGS if family not in MIXTURES]
BALANCING = {"moe": {"sequence_aux_loss": 1e-2, "global_aux_loss": 1e-2, "z_loss": 1e-3}}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"family": "llama", "tie_embeddings": True, "attention_bias": "qkv"},
    "biases": settings("qwen3")
    | {
        "attention_bias": "all",
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
    },
    "tied gemma2": settings("gemma2") | {"tie_embeddings": True},
}
"""Additional model sections, with other settings than the tiny model of their family."""
ALL = [*SETTINGS, *VARIANTS]
LAYOUTS: dict[str, tuple[int, dict[str, int], list[str]]] = {
    "data 2": (2, {}, ALL),
    "tensor 2 with sequence parallel": (2, {"tensor": 2}, ALL),
    # The engine refuses experts there.
    "tensor 2 without": (2, {"tensor": 2, "sequence": False}, [*DENSE, *VARIANTS]),
    "pipeline 2": (2, {"pipeline": 2}, ALL),
    "context 2": (2, {"context": 2}, ALL),
    "expert 2": (2, {"expert": 2}, MIXTURES),
    "tensor 2 x expert 2": (2, {"tensor": 2, "expert": 2}, MIXTURES),
    "context 2 x expert 2": (2, {"context": 2, "expert": 2}, MIXTURES),
    "expert tensor 2": (2, {"expert_tensor": 2}, MIXTURES),
    "tensor 2 x context 2": (4, {"tensor": 2, "context": 2}, list(SETTINGS)),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}, [*VARIANTS]),
    "tensor 2, expert 2 x expert tensor 2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
        MIXTURES,
    ),
}
# Weights and sums are float64, but the engine computes token losses and the scores of experts in
# float32: 3e-8 of a gradient's norm was measured.
TOLERANCE = 1e-6


def changed(family: str) -> dict[str, Any]:
    """Return the settings of a tiny model. Mixtures of experts have all balancing losses."""
    if family in VARIANTS:
        return VARIANTS[family]
    model = settings(family)
    return model | {"moe": model["moe"] | BALANCING["moe"]} if family in MIXTURES else model


def on_ranks(ranks: int, layout: dict[str, int], families: list[str]) -> list[dict[str, Any]]:
    """Return the results of all ranks by family."""
    arguments = {"layout": layout, "models": {family: changed(family) for family in families}}
    return run_on_ranks(ranks, WORKERS, "losses_and_gradients", arguments)


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Results in one process."""
    return on_ranks(1, {}, ALL)[0]


FAST = [name for name in LAYOUTS if name != "tensor 2 x pipeline 2"]


@pytest.mark.parametrize("name", slow_but(FAST, [*LAYOUTS]))
def test_layout_gives_the_losses_and_gradients_of_one_process(name, alone):
    ranks, layout, families = LAYOUTS[name]
    results = on_ranks(ranks, layout, families)
    for family in families:
        compare([result[family] for result in results], alone[family], family)


def compare(results: list[dict[str, Any]], alone: dict[str, Any], family: str) -> None:
    """Check the results of all ranks for one family."""
    seen = set()
    norm = sum(gradient.square().sum() for gradient in alone["gradients"].values()) ** 0.5
    counts: dict[int, torch.Tensor] = {}
    for result in results:
        assert result["loss"] == pytest.approx(alone["loss"], rel=TOLERANCE), family
        assert result["norm"] == pytest.approx(norm.item(), rel=TOLERANCE), family
        for name, gradient in result["gradients"].items():
            expected = alone["gradients"][name]
            error = (gradient - expected).norm() / expected.norm()
            assert error < TOLERANCE, (family, name)
            seen.add(name)
        counts |= result["counts"]
        for layer, bias in result["bias"].items():
            assert torch.equal(bias, alone["bias"][layer]), (family, layer)
    assert seen == alone["gradients"].keys()
    torch.testing.assert_close(counts, alone["counts"], rtol=0, atol=0)


def test_every_token_reaches_its_experts(alone):
    for family in MIXTURES:
        assert [load.sum() for load in alone[family]["counts"].values()] == [4 * 16 * 2]
