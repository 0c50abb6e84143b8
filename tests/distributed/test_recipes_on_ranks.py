"""A recipe for every model, and all recipes for one model, train at a small size in their own
precision, are saved, and resume on another layout."""

from statistics import mean

import pytest

from tests.distributed.recipe_workers import ENDED, SAVED
from tests.launch import run_on_ranks
from tests.run_results import metrics_of
from tests.small_recipes import recipes, write_bytes

WORKERS = "tests.distributed.recipe_workers"
RECIPES = {model: names if model == "llama1b" else names[-1:] for model, names in recipes().items()}


@pytest.mark.slow
@pytest.mark.parametrize("model", RECIPES)
def test_recipes_learn_and_continue(model, tmp_path):
    write_bytes(tmp_path)
    arguments = {"folder": str(tmp_path), "names": RECIPES[model]}
    run_on_ranks(2, WORKERS, "saved_and_resumed", arguments)
    for name in RECIPES[model]:
        lines = metrics_of(tmp_path / name)
        losses = [line["train/loss"] for line in lines]
        assert len(losses) == ENDED
        # The smallest learning rate, 3e-4 for AdamW, gives 0.14 nats; most give more than 1.
        assert mean(losses[SAVED - 5 : SAVED]) < mean(losses[:5]) - 0.1, (name, losses)
        # The loaded weights equal the learnt ones, up to a few steps of noise.
        assert mean(losses[SAVED:]) < mean(losses[SAVED - 5 : SAVED]) + 0.1, (name, losses)
        assert lines[-1]["optim/skipped_steps"] == lines[-1]["optim/refused"] == 0, name
