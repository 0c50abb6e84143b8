"""Sequences shared by ranks: the loss and every gradient are those of one rank."""

import pytest

from models.families import FAMILIES as ALL
from tests.families import MIXTURE, settings
from tests.launch import run_on_ranks

WORKERS = "tests.distributed.context_workers"
FAMILIES = {name: settings(name) for name, family in ALL.items() if not family.mixture}
# Latent attention with dense blocks: experts need sequence parallelism with tensor ranks.
FAMILIES["deepseek"] = {**settings("deepseek"), "moe": {**MIXTURE, "dense_layers": 2}}
LAYOUTS = {
    "context 2": (2, {"context": 2}),
    "tensor 2": (2, {"tensor": 2}),
    "tensor 2 with sequence parallel": (2, {"tensor": 2, "sequence": True}),
    "tensor 2 with sequence parallel x context 2": (
        4,
        {"tensor": 2, "sequence": True, "context": 2},
    ),
}


# Megatron computes the token losses in float32, everything else is float64 here.
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def alone():
    """Losses and gradients of all families on one rank."""
    return run_on_ranks(1, WORKERS, "losses_and_gradients", {"models": FAMILIES})[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_losses_and_gradients_of_one_rank(layout, alone):
    ranks, arguments = LAYOUTS[layout]
    arguments = {"models": FAMILIES, **arguments}
    seen = {family: set() for family in FAMILIES}
    for result in run_on_ranks(ranks, WORKERS, "losses_and_gradients", arguments):
        for family, reference in alone.items():
            ours = result[family]
            assert ours["loss"].item() == pytest.approx(reference["loss"].item(), rel=TOLERANCE)
            for name, gradient in ours["gradients"].items():
                theirs = reference["gradients"][name]
                error = (gradient - theirs).norm() / theirs.norm()
                assert error < TOLERANCE, (family, name)
                seen[family].add(name)
    assert seen == {family: set(found["gradients"]) for family, found in alone.items()}
