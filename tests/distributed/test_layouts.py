"""The same run on any layout: one process against data, tensor and pipeline parallelism."""

import pytest
import torch

from tests.launch import run_on_ranks
from tests.run_configs import RULES
from tests.token_files import write_token_set

WORKERS = "tests.distributed.workers"

# float32: sums over ranks have another order, and msign amplifies their rounding (about 1e-7) in
# directions that hardly occur in the momentum. Twenty steps stay well under this.
TOLERANCE = 1e-4

# The same for weights: a rounding that msign amplifies moves a weight by a share of its update.
WEIGHT_TOLERANCE = 1e-3

# What must not change the run: the loss by chunks, and compiled norms, positions, activations.
UNLIKE = {"train__loss_chunk": 13, "train__compile": "aot_eager"}
LAYOUTS = {
    "data 2": (2, {}, 20),
    "tensor 2 with sequence parallel": (2, {"tensor": 2}, 20, UNLIKE),
    "pipeline 2": (2, {"pipeline": 2}, 20),
    "context 2": (2, {"context": 2}, 10),
    "tensor 2 x pipeline 2": (4, {"tensor": 2, "pipeline": 2}, 10),
    "data 2 x tensor 2": (4, {"tensor": 2}, 10),
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
    "train__exit_step": 6,
}
DEEPSEEK_RULES = ["adamw", "spectral_sphere"]
UNEVEN = {"parallel__first_stage_layers": 2}
# Ranks, layout, and other options that must not change the run: recomputation, uneven stages.
EXPERT_LAYOUTS = {
    "expert 2": (2, {"expert": 2}, {"train__recompute": "selective"}),
    "tensor 2": (2, {"tensor": 2}, {"train__recompute": "full"}),
    "pipeline 2 x expert 2": (4, {"pipeline": 2, "expert": 2}, UNEVEN),
    "context 2 x expert 2": (2, {"context": 2, "expert": 2}, {"train__compile": "aot_eager"}),
    "expert tensor 2": (2, {"expert_tensor": 2}, {"model__moe__backend": "grouped"}),
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


@pytest.fixture(scope="module")
def alone(folder):
    """The run of one process."""
    return run_on_ranks(1, WORKERS, "curves", {"folder": folder, "layout": {}, "overrides": {}})[0]


def compare(results, reference, steps, rules=tuple(RULES)):
    """Check the curves of every rank, and the weights if the runs are equally long."""
    for result in results:
        for rule in rules:
            ours, other = result[rule], reference[rule]
            assert len(ours["loss"]) == steps
            assert ours["loss"] == pytest.approx(other["loss"][:steps], rel=TOLERANCE), rule
            for unit, weight in ours["initial"].items():
                assert torch.equal(weight, other["initial"][unit]), (rule, unit)
            assert ours["norm"] == pytest.approx(other["norm"][:steps], rel=1e-2), rule
            if len(other["loss"]) > steps:
                continue
            assert ours["validation"] == pytest.approx(other["validation"], rel=TOLERANCE)
            for unit, weight in ours["units"].items():
                distance = (weight - other["units"][unit]).norm() / other["units"][unit].norm()
                assert distance < WEIGHT_TOLERANCE, (rule, unit)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_one_process_run(name, alone, folder):
    ranks, layout, steps, *more = LAYOUTS[name]
    overrides = ({"train__exit_step": steps} if steps < 20 else {}) | (more[0] if more else {})
    arguments = {"folder": folder, "layout": layout, "overrides": overrides}
    compare(run_on_ranks(ranks, WORKERS, "curves", arguments), alone, steps)


def test_loss_falls_under_every_rule(alone):
    for rule in RULES:
        assert alone[rule]["loss"][-1] < alone[rule]["loss"][0] - 0.5, rule


def test_interleaved_pipeline_gives_the_one_process_run(folder):
    overrides = {"model__layers": 4, "train__exit_step": 5}
    arguments = {"folder": folder, "layout": {}, "overrides": overrides}
    reference = run_on_ranks(1, WORKERS, "curves", arguments)[0]
    arguments["layout"] = {"pipeline": 2, "virtual_pipeline": 2}
    compare(run_on_ranks(2, WORKERS, "curves", arguments), reference, 5)


@pytest.fixture(scope="module")
def experts_alone(folder):
    """The run of one process with latent attention and a mixture of experts."""
    arguments = {"folder": folder, "layout": {}, "overrides": DEEPSEEK, "rules": DEEPSEEK_RULES}
    return run_on_ranks(1, WORKERS, "curves", arguments)[0]


@pytest.mark.parametrize("name", EXPERT_LAYOUTS)
def test_experts_on_any_layout_give_the_one_process_run(name, experts_alone, folder):
    ranks, layout, changes = EXPERT_LAYOUTS[name]
    arguments = {"folder": folder, "overrides": DEEPSEEK | changes, "rules": DEEPSEEK_RULES}
    results = run_on_ranks(ranks, WORKERS, "curves", {**arguments, "layout": layout})
    compare(results, experts_alone, 6, DEEPSEEK_RULES)
