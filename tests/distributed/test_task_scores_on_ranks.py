"""Task scores on any layout equal the scores in one process."""

import random
from typing import Any

import pytest

from tests.launch import run_on_ranks
from tests.token_files import write_token_set

KEYS: dict[str, Any] = {"model__vocab_size": 119, "model__layers": 4, "train__global_batch": 4}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "data 2": ({}, {"train__loss_chunk": 13}),
    "tensor 2": ({"tensor": 2}, {}),
    "interleaved pipeline 2": ({"pipeline": 2, "virtual_pipeline": 2}, {"train__micro_batch": 1}),
    "context 2": ({"context": 2}, {}),
}


def drawn() -> list[dict[str, Any]]:
    """Draw requests with lengths of up to a window of 32, including requests that fill the
    window."""
    draw = random.Random(0)
    sizes = [draw.randint(2, 33) for _ in range(21)] + [33, 2]
    tokens = [[draw.randrange(119) for _ in range(size)] for size in sizes]
    return [{"tokens": each, "scored": draw.randint(1, len(each) - 1)} for each in tokens]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A folder with a token set."""
    path = tmp_path_factory.mktemp("scores")
    write_token_set(path / "tokens", tokens=4_000, vocab=119, seed=0)
    return str(path)


def scores(folder: str, ranks: int, layouts: Any) -> Any:
    """Return the log-likelihoods and the metrics of two random tasks, on every rank and for every
    layout."""
    cases = [(layout, "adamw", KEYS | keys) for layout, keys in layouts]
    arguments = {"folder": folder, "cases": cases, "requests": drawn()}
    return run_on_ranks(ranks, "tests.distributed.workers", "task_scores", arguments)


def test_layouts_score_as_one_process(folder):
    (((likelihoods, metrics),),) = scores(folder, 1, [({}, {})])
    assert len({round(value, 3) for value in likelihoods}) == len(drawn()) and len(metrics) == 6
    for rank in scores(folder, 2, LAYOUTS.values()):
        for name, (ours, theirs) in zip(LAYOUTS, rank, strict=True):
            # float32 sums in another order
            assert ours == pytest.approx(likelihoods, rel=1e-5), name
            assert theirs == metrics, name
