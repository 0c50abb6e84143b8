"""PC layers on any layout: the evaluators are compared with each other, one process, and a resumed
run.

test_layouts.py compares whole runs with PC layers with one process.
"""

import pytest
import torch

from tests.distributed.workers import Case
from tests.launch import run_on_ranks
from tests.token_files import write_token_set

WORKERS = "tests.distributed.pc_workers"
LAYOUTS: list[dict[str, int]] = [{}, {"tensor": 2}, {"pipeline": 2}]

# float32 over two steps: sums in another order, amplified by msign in rare directions.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def found():
    """Gradients, and the effect of nonfinite weights, on one rank and on each layout of two
    ranks."""
    found = run_on_ranks(1, WORKERS, "gradients", {"layouts": [{}]})[0]
    for rank in run_on_ranks(2, WORKERS, "gradients", {"layouts": LAYOUTS}):
        for name, units in rank.items():  # each rank reports the units that it holds or owns
            found.setdefault(name, {}).update(units)
    return found


def test_a_weight_that_is_not_finite_at_its_owner_reaches_no_rank(found):
    unsound = [units for name, units in found.items() if name.endswith("unsound")]
    assert len(unsound) == 1 + len(LAYOUTS)
    for units in unsound:
        assert any(".down" in name for name in units)
        for name, (finite, moved) in units.items():
            assert finite and moved == (".down" not in name), name


def test_gradients_of_weights_and_gammas_are_those_of_the_graph(found):
    expected = found["ranks1 in_graph"]
    assert sum(name.endswith(".gamma") for name in expected) == 2 * (1 + 1 + 3)
    gradients_of = [units for name, units in found.items() if not name.endswith("unsound")]
    assert len(gradients_of) == 2 * (1 + len(LAYOUTS))
    for gradients in gradients_of:
        # float64: one process and both evaluators agree up to the order of sums.
        torch.testing.assert_close(gradients, expected, rtol=1e-9, atol=1e-12)


def case(rule: str, evaluator: str, **layout: int) -> Case:
    """Return the case of a run with PC layers and several micro-batches."""
    pc = {"pc__evaluator": evaluator, "pc__level": 4 if rule == "adamw" else 2}
    pc["pc__gamma_weight_decay"] = 30.0
    batches = {"train__global_batch": 16, "train__micro_batch": 4}
    return layout, rule, {**batches, **pc, "pc__blocks": "[k,o,gate,up,down]"}


def test_a_run_goes_on_with_the_other_evaluator_and_layout(tmp_path):
    write_token_set(tmp_path / "tokens", tokens=20_000, vocab=120, seed=0)
    folder = {"folder": str(tmp_path)}

    def saved(ranks: int, cases: dict[str, Case]) -> dict[str, list[float]]:
        return run_on_ranks(ranks, WORKERS, "saved", folder | {"cases": cases})[0]

    def loaded(ranks: int, cases: list[tuple[str, Case]]) -> list[list[float]]:
        return run_on_ranks(ranks, WORKERS, "loaded", folder | {"cases": cases})[0]

    sphere, adamw = "spectral_sphere", "adamw"
    whole = saved(1, {"sphere": case(sphere, "materialized"), "adamw": case(adamw, "in_graph")})
    plain: Case = ({}, adamw, {})
    whole |= saved(2, {"shared": case(sphere, "in_graph", tensor=2), "plain": plain})
    shared = [
        ("sphere", case(sphere, "in_graph", tensor=2)),
        ("adamw", case(adamw, "materialized", pipeline=2)),
    ]
    back = [("shared", case(sphere, "materialized")), ("sphere", case(sphere, "materialized"))]
    other = [("adamw", plain), ("plain", case(adamw, "in_graph"))]
    *found, same, more, fewer = [*loaded(2, shared), *loaded(1, [*back, *other])]
    assert same == whole["sphere"]  # bit for bit
    rest = "; for example, layers.0.down is only in the"
    assert f"PC layers, but the model has 0{rest} checkpoint" in more
    assert "it has 0 PC layers, but the model has " in fewer and f"{rest} model" in fewer
    for (name, _), losses in zip([*shared, back[0]], found, strict=True):
        # The first loss is of the loaded weights; later steps sum in another order.
        assert losses[0] == pytest.approx(whole[name][0], rel=1e-6)
        assert losses == pytest.approx(whole[name], rel=TOLERANCE)
