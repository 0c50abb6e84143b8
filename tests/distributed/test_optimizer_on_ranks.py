"""The distributed optimizer compared with one process, for layouts, placements and rules."""

import pytest
import torch

from models.families import all_units
from models.initialize import initialize_
from spectral.rules import MuonRule, take_step
from tests.distributed.workers import named_gradient
from tests.launch import run_on_ranks
from tests.slow_cases import slow_but
from tests.stepped_models import TINY

WORKERS = "tests.distributed.workers"
STEPS = 2
COMPONENT = {"qkv_units": "component"}
AT_ONCE = {"overlap_gather": False, "step_groups": 100}
VARIANTS = [
    {"rule": "adamw", "pc_level": 4, "tied": True},
    {"rule": "muon", "refused": True, "tied": True},
    {"rule": "muon", "model": {"qkv_units": "group"}, "stepped": {"placement": "ping_pong"}},
    {"rule": "muon", "penalised": ["v", "o", "gate"], "model": COMPONENT},
    {"rule": "adamuon"},
    {"rule": "muon_sphere", "model": {"overlap_reduce": False}, "stepped": AT_ONCE, "tied": True},
    {"rule": "muon_plus_plus", "pc_level": 3, "model": COMPONENT, "stepped": {"step_groups": 1}},
    {"rule": "muon_plus_plus", "pc_level": 3, "tied": True},
    {"rule": "spectral_sphere", "tied": True},
    {"rule": "spectral_sphere", "layer_factors": [0.37, 2.1], "refused": True},
    {"rule": "spectral_sphere", "pc_level": 2, "penalised": ["q", "o", "down"]},
    {"rule": "adamw", "layer_factors": [0.4, 1.7], "penalised": ["v", "o", "down"]},
]
LAYOUTS = {
    "data 2": (2, {}),
    "tensor 2": (2, {"tensor": 2}),
    "pipeline 2": (2, {"pipeline": 2}),
    "data 2 x tensor 2": (4, {"tensor": 2}),
}
LARGER = {"data 4": (4, {}), "data 2 x pipeline 2": (4, {"pipeline": 2})}


@pytest.fixture(scope="module")
def alone():
    """Results of every variant in one process."""
    arguments = {"layout": {}, "variants": VARIANTS, "steps": STEPS}
    return run_on_ranks(1, WORKERS, "optimizer_steps", arguments)[0]


@pytest.mark.parametrize("name", slow_but(LAYOUTS, [*LAYOUTS, *LARGER]))
def test_updates_are_those_of_one_process(name, alone):
    ranks, layout = (LAYOUTS | LARGER)[name]
    arguments = {"layout": layout, "variants": VARIANTS, "steps": STEPS}
    results = run_on_ranks(ranks, WORKERS, "optimizer_steps", arguments)
    for i, expected in enumerate(alone):
        for rank in results:
            wanted = {unit: expected[unit] for unit in rank[i]}
            # float64: only the order of sums differs. msign amplifies the 1e-16.
            torch.testing.assert_close(
                rank[i], wanted, rtol=1e-10, atol=1e-10, msg=f"variant {i}: {{}}".format
            )
        assert set().union(*(rank[i] for rank in results)) == expected.keys()


def slow_shards(name: str, steps: int) -> list[torch.Tensor]:
    """Return both halves of a gate after `steps` steps of torch.optim's Muon, applied to each half
    separately."""
    (unit,) = [u for u in all_units(TINY) if u.name == name]
    parameters = {unit.parameter: torch.zeros(2 * 48 * 32, dtype=torch.float64)}
    initialize_(parameters, [unit], TINY.init, seed=3, layers=2)
    whole = unit.view(parameters[unit.parameter]).reshape(unit.shape)
    pieces = [half.clone()[None] for half in whole.chunk(2)]
    states = [MuonRule().init_state(piece) for piece in pieces]
    for step in range(steps):
        total = sum(named_gradient(u, step).square().sum() for u in all_units(TINY)).sqrt()
        gradient = named_gradient(unit, step) * min(1.0, 1.0 / (total.item() + 1e-6))
        for piece, half, state in zip(pieces, gradient.chunk(2), states, strict=True):
            take_step(MuonRule(), piece, half.clone()[None], state, lr=0.02, weight_decay=0.1)
    return [piece[0] for piece in pieces]


def test_shardwise_steps_each_piece_as_a_matrix_by_itself():
    steps = 2
    variants = [{"rule": "muon", "stepped": {"tensor_mode": "shardwise"}}]
    arguments = {"layout": {"tensor": 2}, "variants": variants, "steps": steps}
    ranks = [rank[0] for rank in run_on_ranks(2, WORKERS, "optimizer_steps", arguments)]
    pieces = slow_shards("layers.0.gate", steps)
    local = 48 // 2
    for rank, piece in enumerate(pieces):
        name = f"layers.0.gate.shard.{rank}"
        assert name in ranks[rank] and "layers.0.gate" not in ranks[rank]
        assert ranks[rank][name].shape == (local, 32)
        torch.testing.assert_close(ranks[rank][name], piece, rtol=1e-10, atol=1e-10)


def test_ranks_with_different_plans_are_refused():
    first, second = run_on_ranks(2, WORKERS, "disagree", {})
    assert "differs between rank 0 and ranks 1" in first
    assert "differs between rank 1 and ranks 0" in second
