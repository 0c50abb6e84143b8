"""Mixture-of-experts layers shared by ranks equal those of one process."""

import pytest
import torch

from tests.launch import run_on_ranks

WORKERS = "tests.distributed.moe_workers"
MOE = {"shared_gate": True, "sequence_aux_loss": 1e-2, "global_aux_loss": 1e-2, "z_loss": 1e-3}

# Weights and sums are float64, but the engine computes scores and cross-entropy in float32: 3e-8 of
# a gradient's norm was measured.
TOLERANCE = 1e-6

LAYOUTS = {
    "expert 2": (2, {"expert": 2}),
    "tensor 2 with sequence parallel": (2, {"tensor": 2}),
    "tensor 2 x expert 2": (2, {"tensor": 2, "expert": 2}),
    "context 2 x expert 2": (2, {"context": 2, "expert": 2}),
    "expert tensor 2": (2, {"expert_tensor": 2}),
    "tensor 2 x expert 2 x expert tensor 2": (
        4,
        {"tensor": 2, "expert": 2, "expert_tensor": 2},
    ),
}


@pytest.fixture(scope="module")
def alone():
    """The result of one process."""
    return run_on_ranks(1, WORKERS, "loss_and_gradients", {"layout": {}, "moe": MOE})[0]


def whole(results, name):
    """A unit's gradient, joined from the ranks that hold it."""
    pieces = {r["place_of"][name]: r["gradients"][name] for r in results if name in r["gradients"]}
    axis = next((r["cut"][name] for r in results if name in r["cut"]), None)
    if axis is None:
        return next(iter(pieces.values()))
    return torch.cat([pieces[rank] for rank in sorted(pieces)], axis)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_gives_the_loss_and_gradients_of_one_process(name, alone):
    ranks, layout = LAYOUTS[name]
    results = run_on_ranks(ranks, WORKERS, "loss_and_gradients", {"layout": layout, "moe": MOE})
    held = {unit for result in results for unit in result["gradients"]}
    assert held == set(alone["gradients"])
    for result in results:
        torch.testing.assert_close(result["loss"], alone["loss"], rtol=TOLERANCE, atol=0)
        assert torch.equal(result["counts"], alone["counts"])
        assert torch.equal(result["max_violation"], alone["max_violation"])
        for ours, theirs in zip(result["bias"], alone["bias"], strict=True):
            assert torch.equal(ours, theirs)
    for unit, gradient in alone["gradients"].items():
        error = (whole(results, unit) - gradient).norm() / gradient.norm()
        assert error < TOLERANCE, unit


def test_every_token_reaches_its_experts(alone):
    assert alone["counts"].sum(1).tolist() == [4 * 16 * 2] * 2
