"""Documents packed into one sequence have the same logits and gradients as separate documents."""

from typing import Any

import pytest
import torch

from models.layout import context_part
from tests.launch import run_on_ranks
from tests.tiny_families import SETTINGS, settings

WORKERS = "tests.distributed.document_workers"
MIXTURES = ["moe", "deepseek"]
DENSE = [*(family for family in SETTINGS if family not in MIXTURES), "PC layers"]
ALL = [*DENSE, *MIXTURES]
FEW = ["qwen3", "gemma2", "deepseek"]
"""Models in the fast tests on several ranks, one for each kind of attention."""
LAYOUTS: dict[str, tuple[int, dict[str, int], list[str], dict[str, Any]]] = {
    "one process": (1, {}, ALL, {}),
    "compiled": (1, {}, DENSE, {"compile_backend": "aot_eager"}),
    "recomputed": (1, {}, ALL, {"recompute": "full"}),
    "data 2": (2, {}, ["llama"], {}),
    "tensor 2": (2, {"tensor": 2}, FEW, {}),
    "pipeline 2": (2, {"pipeline": 2}, FEW, {}),
    "context 2": (2, {"context": 2}, FEW, {}),
    "tensor 2, every model": (2, {"tensor": 2}, ALL, {}),
    "pipeline 2, every model": (2, {"pipeline": 2}, ALL, {}),
    "context 2, every model": (2, {"context": 2}, ALL, {}),
    "expert 2": (2, {"expert": 2}, MIXTURES, {}),
    "tensor 2, context 2": (4, {"tensor": 2, "context": 2}, ALL, {}),
    "context 4": (4, {"context": 4}, DENSE, {}),
}
FAST = ["one process", "tensor 2", "pipeline 2", "context 2"]
# float64, but the engine computes the scores of experts in float32: 3e-8 was measured.
TOLERANCE = {name: 1e-6 if name in MIXTURES else 1e-10 for name in ALL}


def on_ranks(name: str, *, packed: bool) -> list[dict[str, Any]]:
    """Return the results of all ranks by model."""
    ranks, layout, models, options = LAYOUTS[name]
    arguments = {"layout": layout, "models": {each: model(each) for each in models}}
    return run_on_ranks(ranks, WORKERS, "results", arguments | {"packed": packed} | options)


def model(name: str) -> dict[str, Any]:
    """Return the settings of a tiny model without losses that depend on other documents."""
    if name not in SETTINGS:
        return settings("llama")
    found = settings(name)
    if name in MIXTURES:
        found["moe"] = found["moe"] | {"sequence_aux_loss": 0.0}
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Results for separate documents, in one process."""
    return on_ranks("one process", packed=False)[0]


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_documents_do_not_see_each_other(name: str, alone: dict[str, Any]) -> None:
    _, layout, models, _ = LAYOUTS[name]
    results = on_ranks(name, packed=True)
    for each in models:
        compare([result[each] for result in results], alone[each], layout, each)


def compare(
    results: list[dict[str, Any]], alone: dict[str, Any], layout: dict[str, int], model: str
) -> None:
    """Check the results of all ranks for one model."""
    data = 1 + max(result["place"][0] for result in results)
    seen, logits, scores = set(), 0, {}
    for result in results:
        scores |= result["scores"]
        rank, context, tensor = result["place"]
        rows = alone["logits"].chunk(data)[rank]
        part = context_part(rows, 1, rank=context, size=layout.get("context", 1))
        own = part.chunk(layout.get("tensor", 1), 2)[tensor]
        for found in result["logits"]:
            torch.testing.assert_close(found, own, rtol=0, atol=TOLERANCE[model])
            logits += found.numel()
        for name, gradient in result["gradients"].items():
            expected = alone["gradients"][name]
            error = (gradient - expected).norm() / expected.norm()
            assert error < TOLERANCE[model], (model, name)
            seen.add(name)
    assert seen == alone["gradients"].keys()
    for layer, largest in alone["scores"].items():
        assert scores[layer] == pytest.approx(largest, rel=TOLERANCE[model]), (model, layer)
    assert logits >= alone["logits"].numel()
