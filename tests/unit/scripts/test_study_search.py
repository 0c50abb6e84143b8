"""Successive halving finds the best candidate at exactly the cost given for the study."""

from collections import Counter

import pytest

from scripts.studies.description import Rung, Search, Stage, Study, Variant
from scripts.studies.records import Record
from scripts.studies.search import run_of, search
from training.errors import InputError

RATES = [0.01, 0.02, 0.04, 0.08]
PAIRS = [["m=0.9", "w=0"], ["m=0.95", "w=0.1"]]
STAGES = {"rate": Stage(grid={"lr": RATES}), "pair": Stage(choices=PAIRS)}
RUNGS = {
    "rate": [Rung(share=0.25, keep=2), Rung(share=0.5, keep=1)],
    "pair": [Rung(share=0.25, keep=1)],
}
STUDY = Study(
    title="t",
    seeds=[1, 2],
    full={"steps": 80, "warmup": 8},
    variants={name: Variant(config="configs/tiny_sso.yaml", search=STAGES) for name in ("a", "b")},
    search=Search(seed=7, stages=RUNGS),
)
BEST = {"a": 0.04, "b": 0.01}


def landscape(trained: list):
    """Return a function that trains runs with artificial losses: convex in the learning rate, lower
    with w = 0.1, and failing for b at 0.08."""

    def train(runs):
        records = []
        for run in runs:
            trained.append(run)
            said = dict(each.split("=") for each in run.overrides)
            name, rate = run.label.split()[0], float(said["lr"])
            loss = abs(rate - BEST[name]) - 0.001 * float(said.get("w", 0)) + 1 / int(said["steps"])
            failed = name == "b" and rate == 0.08
            records.append(Record(run.label, run.label, run.settings, failed, 1.0, {"loss": loss}))
        return records

    return train


def test_the_best_candidate_is_found_at_the_stated_cost():
    trained = []
    found = search(STUDY, {}, ["extra=1"], landscape(trained))
    assert found.chosen == {n: [f"lr={best:g}", "m=0.95", "w=0.1"] for n, best in BEST.items()}
    cost = Counter()
    for run in trained:
        said = dict(each.split("=") for each in run.overrides)
        assert said["extra"] == "1" and said["seed"] == "7"
        assert int(said["warmup"]) == int(said["steps"]) // 10
        cost[run.label.split()[0]] += int(said["steps"]) / 80
    assert cost == {name: STUDY.budget(name) for name in STUDY.variants}
    assert cost["a"] == 4 * 0.25 + 2 * 0.5 + 2 * 0.25
    (broken,) = [t for t in found.trials if t.loss is None]
    assert (broken.variant, broken.candidate, broken.share) == ("b", ["lr=0.08"], 0.25)


def test_a_rung_ranks_its_candidates_by_their_mean_over_seeds():
    losses = {"0.01": (1.0, 9.0), "0.02": (2.0, 3.0), "0.04": (8.0, 1.0)}  # means 5, 2.5, 4.5

    def train(runs):
        records = []
        for run in runs:
            said = dict(each.split("=") for each in run.overrides)
            loss = losses[said["lr"]][int(said["seed"]) - 1]
            failed = loss == failing
            records.append(Record(run.label, run.label, run.settings, failed, 1.0, {"loss": loss}))
        return records

    variant = Variant(
        config="configs/tiny_sso.yaml", search={"rate": Stage(grid={"lr": [0.01, 0.02, 0.04]})}
    )
    rungs = [Rung(share=0.5, keep=2), Rung(share=0.5, keep=1, seeds=[1, 2])]
    study = Study(
        title="t",
        seeds=[1],
        full={"steps": 80},
        variants={"a": variant},
        search=Search(seed=1, stages={"rate": rungs}),
    )
    failing = None
    found = search(study, {}, [], train)
    assert found.chosen == {"a": ["lr=0.02"]} and study.budget("a") == 3 * 0.5 + 2 * 0.5 * 2
    assert [(t.loss, t.seeds) for t in found.trials[3:]] == [(5.0, [1, 2]), (2.5, [1, 2])]
    assert found.trials[0].seeds == [1]
    failing = 3.0
    failed = search(study, {}, [], train)
    assert failed.chosen == {"a": ["lr=0.01"]} and failed.trials[-1].loss is None


def test_a_section_does_not_shadow_what_is_tuned_after_it():
    variant = Variant(config="configs/tiny_sso.yaml", overrides=["run={name: a}"])
    study = Study(title="t", seeds=[1], variants={"a": variant}, overrides=["run.name=c"])
    assert run_of(study, "a", ["run.name=b"], 7).merged["run"]["name"] == "b"
    given = run_of(study, "a", ["run.name=b"], 7, extra=["run.name=d"])  # on the command line
    assert given.merged["run"]["name"] == "d"

    trained = []
    with pytest.raises(InputError, match=r"the candidates lr=0\.01 and lr=0\.02 are the same run"):
        search(STUDY, {}, ["lr=1"], landscape(trained))
    assert not trained


def test_a_stage_multiplies_what_was_tuned_elsewhere():
    stage = Stage(factors={"lr": [0.5, 2.0]})
    assert stage.candidates(["lr=0.1", "m=0.9", "lr=0.04"]) == [["lr=0.02"], ["lr=0.08"]]
    assert stage.count() == 2 and Stage(grid={"x": [1, 2], "y": [3, 4, 5]}).count() == 6
    grid = Stage(grid={"x+z": [1, 2], "y": [3]})
    assert grid.candidates([]) == [["x=1", "z=1", "y=3"], ["x=2", "z=2", "y=3"]]
    with pytest.raises(ValueError, match="exactly one of"):
        Stage(grid={"x": [1.0]}, factors={"x": [1.0]})
