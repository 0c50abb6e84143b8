"""The tables of a study follow from its losses and draw no conclusions from the end of a grid."""

import json
import math
import re
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pandas as pd
import pytest

from scripts.studies.description import Stage, Study, TunedIn, Variant
from scripts.studies.records import Record
from scripts.studies.running import hopeless_grids
from scripts.studies.running import row as row_of
from scripts.studies.search import tuned_settings
from scripts.studies.tables import (
    comparison,
    grid_ends,
    half_width,
    loss_by,
    markdown,
    paired,
    tokens_to_loss,
)
from tests.paths import ROOT
from tests.run_results import json_lines
from training.errors import DataError

STAGE = {"grid": {"lr": [1, 2, 4], "beta": [0.5, 0.9]}, "factors": {}, "choices": []}
RESULTS = sorted(ROOT.glob("studies/**/results.json"))


def study(a, b, *, search=None, **more):
    """Return the results of a study of two variants with these losses."""
    variants = {k: {"against": v, "search": search or {}} for k, v in {"a": None, "b": "a"}.items()}
    rows = [{"variant": "a", "losses": a}, {"variant": "b", "losses": b}]
    return {"variants": variants, "seeds": list(range(len(a))), "rows": rows, **more}


def test_differences_are_paired_by_seed():
    results = study([2.0, 3.0, 4.0], [1.9, 2.8, 3.7])
    first, second = comparison(results).to_dict("records")
    assert (first["loss"], first["error"]) == (3.0, pytest.approx(1 / 3**0.5))
    assert math.isnan(first["difference"])
    expected, error = mean([-0.1, -0.2, -0.3]), stdev([-0.1, -0.2, -0.3]) / 3**0.5
    assert (second["difference"], second["difference_error"]) == pytest.approx((expected, error))
    # Seeds differ by 1, variants by a tenth: only pairs show it. 4.303 is Student's t of two.
    assert second["error"] > 5 * second["difference_error"]
    ends = (expected - 4.303 * error, expected + 4.303 * error)
    assert (second["low"], second["high"]) == pytest.approx(ends)
    row = "| b | 2.8000 ± 0.5196 | -0.2000 ± 0.0577 | -0.4484 to +0.0484 | a | cannot tell |"
    assert row in markdown(results)
    begun = markdown(results | {"complete": False, "seeds": [1, 2, 3, 4]})
    assert begun == f"unfinished: 3 of 4 seeds\n\n{markdown(results | {'complete': True})}"
    shorter = markdown(results | {"command_overrides": ["train.steps=3", "seed=1"]})
    assert shorter.startswith("overrides on the command line: train.steps=3 seed=1\n\n###")


def test_each_dataset_has_its_own_comparison():
    records = {
        name: [
            Record(f"{name}{seed}", "", [], failed, 0.0, {"loss": 0.5 * (x + y), "datasets": sets})
            for seed, (x, y, failed) in enumerate(runs)
            for sets in [{"x": x, "y": y}]
        ]
        for name, runs in {
            "a": [(2.0, 4.0, False), (3.0, 5.0, False), (4.0, 6.0, False)],
            "b": [(1.9, 4.1, False), (2.8, 5.2, False), (3.7, 6.3, False)],
        }.items()
    }
    results = study([], []) | {"rows": [row_of(*item) for item in records.items()]}
    table = markdown(results)
    assert "| x | b | 2.8000 ± 0.5196 | -0.2000 ± 0.0577 | -0.4484 to +0.0484 | a |" in table
    assert "| y | b | 5.2000 ± 0.6351 | +0.2000 ± 0.0577 | -0.0484 to +0.4484 | a |" in table
    failed = replace(records["b"][1], failed=True, figures={})
    results["rows"][1] = row_of("b", [records["b"][0], failed, records["b"][2]])
    assert "| x | b | 1 runs failed |" in markdown(results)
    # A record of an earlier version contains no losses by dataset.
    earlier = replace(records["b"][1], figures={"loss": 4.0})
    results["rows"][1] = row_of("b", [records["b"][0], earlier, records["b"][2]])
    assert "by dataset" not in markdown(results)


@pytest.mark.parametrize(
    ("b", "verdict"),
    [
        ([1.9, 2.9, 3.89], "lower"),
        ([2.1, 3.1, 4.11], "higher"),
        ([1.999, 3.001, 4.0], "level"),
        ([1.9, 3.1, 4.0], "cannot tell"),
        ([1.98, 2.98, 3.999], "cannot tell"),  # -0.013, -0.040 to +0.014: one end is far from 0
    ],
)
def test_only_a_narrow_interval_around_0_is_level(b, verdict):
    assert comparison(study([2.0, 3.0, 4.0], b))["verdict"][1] == verdict


def test_a_failed_run_fails_its_variant():
    results = study([2.0, 3.0, 4.0], [1.9, None, 3.7])
    assert "| a | 3.0000 ± 0.5774 |  |  |  |  |" in markdown(results)
    assert "| b | 1 runs failed |  |  | a | a run failed |" in markdown(results)


def trial(name, lr, beta, loss, share=0.5):
    candidate = [f"lr={lr}", f"beta={beta}"]
    return dict(variant=name, stage="s", share=share, candidate=candidate, loss=loss)


def searched(chosen):
    """Return a search over lr and beta for both variants, with these choices."""
    trials = [
        trial(name, lr, beta, abs(lr - 2) + beta)
        for name in ("a", "b") for lr in (1, 2, 4) for beta in (0.3, 0.5, 0.9)
    ]  # fmt: skip
    trials += [trial(name, 2, 0.5, 0.1, share=1.0) for name in ("a", "b")]
    losses = [2.0, 3.0, 4.0]
    return study(losses, [x - 0.1 for x in losses], search={"s": STAGE}, chosen=chosen,
                 trials=trials)  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "ended"),
    [
        (["lr=2", "beta=0.5"], ["lr=2", "beta=0.5"], {}),
        (["lr=2", "beta=0.5"], ["lr=4", "beta=0.5"], {"b": ["lr = 4"]}),
        (["lr=2", "beta=0.3"], ["lr=2", "beta=0.5"], {"a": ["beta = 0.3"]}),
    ],
)
def test_nothing_is_concluded_from_the_end_of_a_grid(a, b, ended, monkeypatch):
    """Variants that are compared with such a variant, or that share its tuned values, get no
    verdict either."""
    results = searched({"a": a, "b": b})
    ended = {name: [f"{key} is at an end of the grid of {name}" for key in keys]
             for name, keys in ended.items()}  # fmt: skip
    assert grid_ends(results) == ended
    verdict = comparison(results)["verdict"][1]
    assert verdict == ("lower" if not ended else f"refused: {next(iter(ended.values()))[0]}")
    stored = results | {"complete": True}
    monkeypatch.setattr("scripts.studies.search.read_results", lambda path: stored)
    for name in "abz":
        variants = {"c": Variant(config="c.yaml", tuned_as=name)}
        other = Study(title="t", seeds=[1], variants=variants, tuned_in=TunedIn(results="r"))
        if name == "z":
            with pytest.raises(DataError, match="r is missing the variants z"):
                tuned_settings(other, ROOT)
            stored["complete"] = False
            with pytest.raises(DataError, match="the study r must be complete"):
                tuned_settings(other, ROOT)
        elif name in ended:
            with pytest.raises(DataError, match=f"{ended[name][0]}; extend the grid first"):
                tuned_settings(other, ROOT)
        else:
            assert tuned_settings(other, ROOT) == {"c": results["chosen"][name]}


@pytest.mark.parametrize(
    ("stages", "short"),
    [
        ([{"grid": {"lr": [1, 2], "beta+gamma": [0.5, 0.9, 0.99]}}], ["lr"]),
        ([{"grid": {"lr": [1, 2, 4]}}, {"factors": {"beta+gamma": [1]}}], ["beta"]),
        ([{"grid": {"lr": [0, 2]}}], []),  # 0 is no end
        ([{"grid": {"lr": [1, 2]}}, {"grid": {"lr": [2, 4]}}], []),
        ([{"choices": [["lr=1"], ["lr=2"]]}], []),
    ],
)
def test_a_grid_without_a_value_between_its_ends_is_warned_of(stages, short):
    search = {str(number): Stage(**stage) for number, stage in enumerate(stages)}
    variants = {"a": Variant(config="c.yaml", search=search)}
    lines = hopeless_grids(Study(title="t", seeds=[1], variants=variants))
    assert [re.findall("the grid of a for (.*) has only ", line) for line in lines] == [
        [key] for key in short
    ]


def test_losses_by_a_key_are_the_best_over_the_others():
    results = searched({"a": [], "b": []}) | {"search": {"seed": 7}}
    # Only the shortest runs that vary the key are compared.
    results["variants"]["a"]["search"]["later"] = STAGE
    results["trials"].append(trial("a", 3, 0.3, 0.2, share=1.0) | {"stage": "later"})
    first, *_ = loss_by(results, "lr").to_dict("records")
    assert first == {"variant": "a", "1": 1.3, "2": 0.3, "4": 2.3}
    assert "| b | 1.3000 | **0.3000** | 2.3000 |" in markdown(results)
    headings = [line for line in markdown(results).splitlines() if line.startswith("#")]
    assert headings == ["### comparison", "### loss by lr", "### loss by beta", "### later rungs"]
    assert "| b | s | 1 | 7 | lr 2, beta 0.5 | 0.1000 |" in markdown(results)
    last = trial("a", 2, 0.3, None, share=1.0) | {"seeds": [1, 2]}
    results["trials"] += [last]
    assert "| a | s | 1 | 1 2 | lr 2, beta 0.3 | failed |" in markdown(results)


def test_tokens_to_a_loss_are_found_on_the_curve():
    """The loss of `a` falls by 1 per doubling. Outside the curve, there is no result."""
    points = [{"share": 0.5, "losses": [4.0, 4.0]}, {"share": 2.0, "losses": [2.0, 2.0]}]
    results = study([3.0, 3.0], [2.5, 2.5], points=points, curve={"variant": "a"})
    frame = tokens_to_loss(results, comparison(results))
    assert list(frame["tokens"]) == pytest.approx([1.0, 2**0.5])
    # A point with a failed run is not on the curve. At share 1, it has the mean of all seeds.
    failed = [*points, {"share": 2**0.25, "losses": [2.25, None]}, {"share": 1, "losses": [2.75]}]
    results = study([3.0, 3.0], [2.5, 2.5], points=failed, curve={"variant": "a"})
    assert tokens_to_loss(results, comparison(results))["tokens"][1] == pytest.approx(2**0.5)
    beyond = study([3.0, 3.0], [1.9, 1.9], points=points, curve={"variant": "a"})
    assert pd.isna(tokens_to_loss(beyond, comparison(beyond))["tokens"][1])


@pytest.mark.parametrize("seeds", [*range(2, 13), 20, 100])
def test_intervals_are_students_for_every_number_of_seeds(seeds):
    """The density of Student's t distribution, integrated over the interval, is 0.95."""
    degrees, width = seeds - 1, half_width(seeds)
    x = np.linspace(-width, width, 100_001)
    scale = math.gamma((degrees + 1) / 2) / math.gamma(degrees / 2) / (degrees * math.pi) ** 0.5
    density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
    assert np.trapezoid(density, x) == pytest.approx(0.95, abs=5e-5)  # three decimals
    losses = [2.5 + 0.001 * i for i in range(seeds)]
    half = width * stdev(losses) / seeds**0.5
    line = paired(pd.Series(losses))
    assert (line["low"], line["high"]) == pytest.approx((mean(losses) - half, mean(losses) + half))
    curve = {"curve": {"variant": "a"}, "points": [{"share": 2**i, "losses": [3.0 - i] * seeds}
                                                   for i in (-1, 1)]}  # fmt: skip
    results = study([3.0] * seeds, losses, **curve)
    _, found = tokens_to_loss(results, comparison(results)).to_dict("records")
    ends = [2 ** (3 - loss) for loss in (mean(losses) + half, mean(losses) - half)]
    assert [found["low"], found["high"]] == pytest.approx(ends)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.parent.name)
def test_committed_tables_are_those_of_the_committed_results(path):
    """No seed is missing, and every loss belongs to a recorded run."""
    results = json.loads(path.read_text())
    assert path.with_name("table.md").read_text() == markdown(results)
    lines = json_lines(path.with_name("runs.jsonl"))
    runs = {line["key"]: line for line in lines}
    assert len(runs) == len(lines)
    for row in results.get("rows", ()):
        found = [runs[key] for key in row["runs"]]
        expected = [None if run["failed"] else run["figures"]["loss"] for run in found]
        assert row["losses"] == expected
        for name, losses in row.get("datasets", {}).items():
            of_runs = [run["figures"].get("datasets", {}).get(name) for run in found]
            assert losses == of_runs
        assert len(expected) == len(results["seeds"]) or not results["complete"]
