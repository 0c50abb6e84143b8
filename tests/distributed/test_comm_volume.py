"""The planner's byte counts equal the bytes sent by collectives and the bytes of the optimizer
state."""

import pytest

from tests.launch import run_on_ranks
from tests.run_configs import MIXTURE, tiny_config
from training.dry_run import plan_run

RUNS = [
    {},
    {
        "optimizer__distributed__placement": "ping_pong",
        "optimizer__distributed__momentum_dtype": "bf16",
    },
    {
        "train__precision": "bf16",
        "optimizer__qkv_units": "component",
        "optimizer__distributed__gradient_dtype": "bf16",
    },
    {
        "pc__level": 4,
        "optimizer__distributed__exchange_dtype": "bf16",
        "optimizer__distributed__momentum_dtype": "bf16",
    },
    {
        "gram_penalty__roles": "[q,o,down]",
        "optimizer__matrix__rule": "adamw",
        "train__precision": "bf16",
    },
    {"gram_penalty__power": 1, "pc__level": 2, "train__precision": "bf16"},
    {"optimizer__distributed__tensor_mode": "shardwise"},
]
TIED = {"model__tie_embeddings": "true", "optimizer__distributed__gradient_dtype": "bf16"}
PENALTY = ("penalty weights", "penalty out", "penalty figures")
LAYOUTS: dict[str, tuple[int, dict[str, int], list[dict[str, str]]]] = {
    "data 2 x tensor 2": (4, {"tensor": 2}, RUNS),
    "data 2 x pipeline 2": (4, {"pipeline": 2}, [*RUNS[:2], TIED]),
    "expert tensor 2": (4, {"expert_tensor": 2}, [MIXTURE | RUNS[0]]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_bytes_are_sent_and_held(name, folder):
    ranks, layout, runs = LAYOUTS[name]
    arguments = {"folder": folder, "layout": layout, "runs": runs}
    results = run_on_ranks(ranks, "tests.distributed.workers", "sent_in_one_step", arguments)
    for i, overrides in enumerate(runs):
        config = tiny_config(
            folder, **{f"parallel__{key}": value for key, value in layout.items()}, **overrides
        )
        for stage in plan_run(config, ranks).stages:
            counted = [rank[i] for rank in results if rank[i]["stage"] == stage.stage]
            for kind, planned in stage.sent.items():
                assert max(rank.get(kind, 0) for rank in counted) == planned, (overrides, kind)
            # Collectives of the training loop and the Gram penalty; all others are planned.
            others = {"stage", "held", "gradients", "mean loss", "tokens per expert", *PENALTY}
            assert set().union(*counted) - stage.sent.keys() <= others
            total = max(sum(rank.get(kind, 0) for kind in stage.sent) for rank in counted)
            assert total == stage.sent_max
            held = max(rank["held"] for rank in counted)
            assert held == stage.memory.master + stage.memory.state, overrides
            assert {rank["gradients"] for rank in counted} == {stage.memory.gradients}
        if config.optimizer.matrix.rule != "adamw" or config.pc is not None:
            assert any(rank[i].get("exchange in", 0) for rank in results)
