"""What the page of optimizers computes from results, in worlds whose answers are known."""

import json
import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scripts.plots.optimizers import plot_courses, plot_rates
from scripts.studies.answer import advice, answer, basin_verdict, findings
from scripts.studies.evidence import Basin, Evidence, basin, edge, share_for, token_speedup
from scripts.studies.page import (
    BEGIN,
    END,
    answered,
    behaviour,
    figures,
    insert,
    lines_of_progress,
    losses,
    speedups,
    transfer,
)
from scripts.studies.page import basins as basin_table
from scripts.studies.records import Record, RecordBook
from scripts.studies.schema import Stage, read_study
from scripts.study import run_study

RATES = [0.0005, 0.001, 0.002, 0.004, 0.008]
BEST = {"AdamW": 0.002, "Muon": 0.004}
GAIN = {"AdamW": 1.0, "Muon": 1.5}
SPECTRUM = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]


def made_up(run) -> Record:
    """A world in which a loss falls by 0.3 nats per e-fold of tokens, Muon's tokens count 1.5
    times, seeds move all losses alike, and a rate costs its squared distance in octaves."""
    said = dict(each.split("=", 1) for each in run.overrides)
    name = "Muon" if "muon" in run.config else "AdamW"
    share, rate = (
        int(said["train.steps"]) / 1000,
        float(said.get("optimizer.matrix.lr", BEST[name])),
    )
    octaves = math.log2(rate / BEST[name])
    loss = 3 - 0.3 * math.log(share * GAIN[name]) + 0.04 * octaves**2 + 0.001 * int(said["seed"])
    figures = {
        "loss": loss,
        "tokens": int(said["train.steps"]) * 4096,
        "course": [[500, loss + 1], [1000, loss]],
        "step_seconds": 0.2 if name == "AdamW" else 0.25,
        "largest_logit": 7.0,
        "residual_rms": 1.25,
        "spikes": 2 if said["seed"] == "3" else 0,
        "skipped_steps": 0,
        "spectra": {"q": {"first": SPECTRUM, "last": SPECTRUM[::-1]}},
    }
    return Record(run.key, run.label, run.settings, False, 36.0, figures)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A study and its results in that world."""
    folder = tmp_path_factory.mktemp("study")
    search = {"rate": {"grid": {"optimizer.matrix.lr": RATES}}}
    study = {
        "title": "T",
        "seeds": [1, 2, 3],
        "full": {"train.steps": 1000},
        "search": {"seed": 0, "stages": {"rate": [{"share": 0.5, "keep": 1}]}},
        "curve": {"variant": "AdamW", "shares": [0.5, 1.4], "seeds": [1, 2, 3]},
        "variants": {
            "AdamW": {"config": "studies/optimizers/rules/adamw.yaml", "search": search},
            "Muon": {
                "config": "studies/optimizers/rules/muon.yaml", "against": "AdamW",
                "search": deepcopy(search),
            },
        },
    }  # fmt: skip
    (folder / "s.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    book = RecordBook(folder)

    def train(runs):
        records = [made_up(run) for run in runs]
        for record in records:
            if record.key not in book:
                book.add(record)
        return records

    run_study(read_study(folder / "s.yaml"), folder, train, [])
    return folder


@pytest.fixture
def evidence(folder: Path) -> Evidence:
    """What can be read of it."""
    return Evidence(folder / "s.yaml", folder)


def test_tokens_to_a_loss_are_found_on_the_baselines_curve(evidence):
    assert share_for(2.5, [(0.5, 3.0), (2.0, 2.0)]) == pytest.approx(1.0)
    assert share_for(1.5, [(1.0, 3.0), (2.0, 2.0)]) == pytest.approx(2**1.5)
    assert share_for(4.0, [(1.0, 3.0), (2.0, 2.0)]) == pytest.approx(0.5)
    assert share_for(1.0, [(1.0, 3.0), (2.0, 3.0)]) is None
    found = token_speedup(evidence, "Muon")
    # The curve is a line in the logarithm, so it is exact even beyond its end at 1.4.
    assert found.value == pytest.approx(1.5) and found.beyond
    # Seeds move all losses by 0.001 each: no resample changes a share by more than 0.002 / 0.3.
    assert 1.5 * math.exp(-0.02) < found.low < 1.5 < found.high < 1.5 * math.exp(0.02)
    own = token_speedup(evidence, "AdamW")
    assert own.value == pytest.approx(1.0) and not own.beyond


def test_speed_is_tokens_over_the_time_of_a_step(evidence):
    lines = speedups(evidence).splitlines()
    assert lines[2].startswith("| AdamW | 1.00 (") and "| 1.00 |" in lines[2]
    muon = [cell.strip() for cell in lines[3].split("|")[1:-1]]
    assert muon[0] == "Muon" and muon[1].startswith("1.50 (") and muon[1].endswith(" *")
    assert muon[2] == "1.25" and muon[3].startswith("1.20 (")


def test_a_basin_is_where_the_loss_stays_within_the_bound(evidence):
    # A line between neighbours at 0 and 0.04 reaches 0.01 a quarter of an octave from the best.
    narrow, wide = (basin(evidence.trials, "AdamW", within) for within in (0.01, 0.04))
    assert narrow == Basin(pytest.approx(2**0.5), cut=False)
    assert wide == Basin(pytest.approx(4.0), cut=False)
    # Muon's best is one from the end of the grid: there the basin is cut.
    assert basin(evidence.trials, "Muon", 1.0) == Basin(pytest.approx(16.0), cut=True)
    assert edge([(1.0, 0.0), (2.0, 1.0), (4.0, 0.5)], 2.0) == 4.0
    assert "| AdamW | lr 0.002 | 0.002 | 1.41 |" in basin_table(evidence)


def test_the_tables_have_what_was_measured(evidence):
    assert "| T | 22 | 0 | 3 of 3 | 0.2 | complete |" in lines_of_progress([evidence])
    assert "| Muon | 2.8804 ± 0.0006 | -0.1216 ± 0.0000 |" in losses(evidence)
    assert "| Muon | 7 | 1.25 | 2 | 0 of 3 | 0.50 | 0.50 |" in behaviour(evidence)
    (row,) = (line for line in transfer(evidence).splitlines() if "| AdamW" in line)
    assert row.startswith("| AdamW |  | 0.002 | 0.0005 3.") and "± 0.0006" in row
    assert row.count("**") == 2 and "**0.002 3.2079**, 0.004 3.2479" in row


def test_the_best_of_rates_around_another_studys_says_where_the_grid_ends(evidence):
    stage = Stage(factors={"optimizer.matrix.lr": [0.25, 0.5, 1.0, 2.0]})
    variants = {
        name: replace(variant, search={"rate": stage})
        for name, variant in evidence.study.variants.items()
    }
    evidence.study = replace(evidence.study, variants=variants)
    first = evidence.trials[0]
    evidence.results = {**evidence.results, "trials": evidence.trials[:2]}
    assert first["candidate"] == ["optimizer.matrix.lr=0.0005"]
    (row,) = (line for line in transfer(evidence).splitlines() if "| AdamW" in line)
    assert row.startswith("| AdamW | 0.002 | 0.001 (edge) | 0.0005 3.")


def test_nothing_is_said_of_what_has_not_been_run(folder, tmp_path):
    empty = Evidence(folder / "s.yaml", tmp_path)
    for text in (losses(empty), speedups(empty), basin_table(empty), behaviour(empty)):
        assert "nothing yet" in text.lower()
    assert "| T | 0 of at most 22 | 0 | 0 of 3 | 0.0 | **not complete** |" in lines_of_progress(
        [empty]
    )
    assert answer(empty) == [] and "None yet" in answered(empty) and figures(empty) == []
    (line,) = advice(empty)
    assert "has not ended" in line


def test_the_answer_is_what_the_numbers_say(evidence):
    sentences = answer(evidence)
    assert sentences == [
        "Muon has the smallest loss, 2.8804 ± 0.0006; every other variant's is larger, and no "
        "interval holds 0.",
        "From tuned AdamW, in nats per token: Muon (-0.1216) below.",
        "In time on this CPU, to the same loss: faster than tuned AdamW is Muon (1.20).",
    ]
    ((_, seen, verdict, _),) = findings(evidence)
    assert seen.startswith("1.50 (") and verdict.startswith("**agrees**")
    assert verdict in answered(evidence)
    first = advice(evidence)[0]
    assert first.startswith("Start with **Muon**: tuned AdamW needs 1.50 times its tokens")
    assert "extrapolated), 1.20 times its time on a CPU." in first
    assert "This is from a T, 3 seeds. Nothing here says" in advice(evidence)[-1]


def test_larger_studies_confirm_the_advice_or_say_what_is_best_there(evidence, folder, tmp_path):
    unfinished = Evidence(folder / "s.yaml", tmp_path)
    last = advice(evidence, [evidence, unfinished])[-1]
    assert (
        last.count("In a T, 3 seeds, Muon is the best of 2 rules (1.50 times the tokens, 1.4") == 1
    )
    content = json.loads((folder / "results.json").read_text())
    content["rows"][0]["loss"] = 1.0
    (tmp_path / "results.json").write_text(json.dumps(content))
    other = Evidence(folder / "s.yaml", tmp_path)
    assert "In a T, 3 seeds, AdamW has the smallest loss." in advice(evidence, [other])[-1]


def test_what_cannot_be_told_is_said_so(folder, tmp_path):
    content = json.loads((folder / "results.json").read_text())
    losses = content["rows"][0]["losses"]
    moved = [loss + by for loss, by in zip(losses, (-0.01, 0.01, -0.004), strict=True)]
    content["rows"][1] |= {"losses": moved, "loss": sum(moved) / 3}
    (tmp_path / "results.json").write_text(json.dumps(content))
    level = Evidence(folder / "s.yaml", tmp_path)
    first, second = answer(level)[:2]
    assert first.endswith("AdamW cannot be told from it.")
    assert second.endswith("Muon (-0.0013) not told from it.")
    assert "AdamW cannot be told from it" in advice(level)[0]


@pytest.mark.parametrize(
    ("wider", "verdict"),
    [
        ([True, True], "**agrees**"),
        ([False, False], "**contradicts**"),
        ([True, False], "**open**"),
        ([None, True], "**open**"),
    ],
)
def test_a_basin_that_the_grid_cuts_decides_nothing(wider, verdict):
    assert basin_verdict(wider).startswith(verdict)


def test_a_failed_seed_has_no_speed(folder, tmp_path):
    content = json.loads((folder / "results.json").read_text())
    content["rows"][1] |= {"losses": [2.9, None, 2.9], "loss": None, "error": None}
    content["rows"][1] |= {"difference": None, "difference_error": None, "interval": None}
    (tmp_path / "results.json").write_text(json.dumps(content))
    failed = Evidence(folder / "s.yaml", tmp_path)
    assert token_speedup(failed, "Muon") is None
    assert "| Muon | 1 of 3 runs failed |" in losses(failed)
    assert answer(failed)[0].startswith("AdamW has the smallest loss")
    assert answer(failed)[-1] == "Failed with at least one seed: Muon."


def test_figures_show_every_variant(evidence):
    rates, courses = plot_rates(evidence).axes[0], plot_courses(evidence).axes[0]
    for axes in (rates, courses):
        assert [text.get_text() for text in axes.get_legend().get_texts()] == ["AdamW", "Muon"]
    assert list(rates.lines[0].get_ydata()) == pytest.approx([0.16, 0.04, 0, 0.04, 0.16])
    assert list(courses.lines[1].get_xdata()) == [500 * 4096, 1000 * 4096]


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError, match="must have the marks"):
        insert("no marks", "x")
    assert insert(f"a\n{BEGIN}\nold\n{END}\nz", "new\n") == "a\nnew\nz"
