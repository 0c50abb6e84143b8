"""The same run on any layout: one process against data, tensor and pipeline parallelism."""

from typing import Any

import pytest
import torch

from tests.launch import run_on_ranks
from tests.token_files import write_token_set

WORKERS = "tests.distributed.workers"

# float32: sums over ranks have another order, and msign amplifies their rounding (about 1e-7) in
# directions that hardly occur in the momentum.
TOLERANCE = 1e-4

# The same for weights: a rounding that msign amplifies moves a weight by a share of its update.
WEIGHT_TOLERANCE = 1e-3

STEPS = 6
RULES = ["adamw", "spectral_sphere"]
# What must not change the run: the loss by chunks, and compiled norms, positions, activations.
UNLIKE = {"train__loss_chunk": 13, "train__compile": "aot_eager"}
Layout = tuple[int, dict[str, int], dict[str, Any]]
LAYOUTS: dict[str, Layout] = {
    "data 2": (2, {}, {}),
    "tensor 2 with sequence parallel": (2, {"tensor": 2}, UNLIKE),
    "pipeline 2": (2, {"pipeline": 2}, {}),
    "context 2": (2, {"context": 2}, {}),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}, {}),
}
DEEPSEEK = {
    "model__family": "deepseek",
    "model__kv_heads": "null",
    "model__norm_epsilon": 1e-6,
    "model__latent__query_rank": 32,
    "model__latent__kv_rank": 24,
    "model__latent__nope_head_dim": 12,
    "model__latent__rope_head_dim": 8,
    "model__latent__value_head_dim": 16,
    "model__layers": 3,
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__shared_experts": 1,
    "model__moe__dense_layers": 1,
    "optimizer__roles__router__rule": "adamw",
    "optimizer__roles__router__lr": 3e-3,
}
# Ranks, layout, and other options that must not change the run: recomputation, uneven stages.
EXPERT_LAYOUTS: dict[str, Layout] = {
    "expert 2": (2, {"expert": 2}, {"train__recompute": "selective"}),
    "tensor 2": (2, {"tensor": 2}, {"train__recompute": "full"}),
    "expert tensor 2": (2, {"expert_tensor": 2}, {"model__moe__backend": "grouped"}),
}
LARGER: dict[str, Layout] = {
    "context 2 x expert 2": (2, {"context": 2, "expert": 2}, {"train__compile": "aot_eager"}),
    "pipeline 2 x expert 2": (4, {"pipeline": 2, "expert": 2}, {"parallel__first_stage_layers": 2}),
    "tensor 2 x expert 2 x expert tensor 2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
        {"train__recompute": "full"},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the shared token set."""
    path = tmp_path_factory.mktemp("layouts")
    write_token_set(path / "tokens", tokens=20_000, vocab=120, seed=0)
    return str(path)


def curves(folder: str, ranks: int, layout: dict[str, int], keys: dict[str, Any]) -> list[Any]:
    """Losses, norms and weights of each rule on every rank."""
    overrides = {"train__steps": STEPS, **keys}
    arguments = {"folder": folder, "layout": layout, "overrides": overrides, "rules": RULES}
    return run_on_ranks(ranks, WORKERS, "curves", arguments)


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process."""
    return curves(folder, 1, {}, {})[0]


@pytest.fixture(scope="module")
def experts_alone(folder):
    """The run of one process with latent attention and a mixture of experts."""
    return curves(folder, 1, {}, DEEPSEEK)[0]


def compare(results, reference):
    """Check the curves and weights of every rank."""
    for result in results:
        for rule in RULES:
            curve, expected = result[rule], reference[rule]
            assert len(curve["loss"]) == STEPS
            for figure in ("loss", "validation"):
                assert curve[figure] == pytest.approx(expected[figure], rel=TOLERANCE), rule
            assert curve["norm"] == pytest.approx(expected["norm"], rel=1e-2), rule
            for unit, weight in curve["initial"].items():
                assert torch.equal(weight, expected["initial"][unit]), (rule, unit)
            for unit, weight in curve["units"].items():
                distance = (weight - expected["units"][unit]).norm()
                assert distance < WEIGHT_TOLERANCE * expected["units"][unit].norm(), (rule, unit)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_one_process_run(name, alone, folder):
    compare(curves(folder, *LAYOUTS[name]), alone)


@pytest.mark.slow
def test_interleaved_pipeline_gives_the_one_process_run(folder):
    more = {"model__layers": 4}
    reference = curves(folder, 1, {}, more)[0]
    compare(curves(folder, 2, {"pipeline": 2, "virtual_pipeline": 2}, more), reference)


@pytest.mark.parametrize(
    "name", [*EXPERT_LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGER)]
)
def test_experts_on_any_layout_give_the_one_process_run(name, experts_alone, folder):
    ranks, layout, changes = (EXPERT_LAYOUTS | LARGER)[name]
    compare(curves(folder, ranks, layout, DEEPSEEK | changes), experts_alone)
