"""docs/results.md and README.md say what the committed results of the optimizers say."""

import json
import re
import shutil

import pytest

from scripts.studies.page import BEGIN, END, SMALL, insert, read_all, readme, section
from scripts.study import parse
from scripts.study_page import main as make_pages
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "results.md").read_text()
README = (ROOT / "README.md").read_text()
STUDIES = ROOT / "studies" / "optimizers"


@pytest.fixture(scope="module")
def studies():
    """Everything that is committed."""
    return read_all(STUDIES)


def test_every_number_is_that_of_the_results(studies):
    assert insert(PAGE, section(studies)) == PAGE, "run python scripts/study_page.py"
    assert insert(README, readme(studies)) == README, "run python scripts/study_page.py"


def test_another_result_is_another_page(tmp_path):
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "docs/results.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(STUDIES, tmp_path / "studies")
    arguments = ["--check", "--docs", str(tmp_path / "docs")]
    arguments += ["--studies", str(tmp_path / "studies")]
    assert make_pages(arguments) == 0
    records = tmp_path / "studies" / "results" / SMALL / "runs.jsonl"
    with records.open("a") as file:
        file.write(
            json.dumps(json.loads(records.read_text().splitlines()[0]) | {"key": "x"}) + "\n"
        )
    assert make_pages(arguments) == 1


def test_what_is_said_of_the_budget_is_what_the_study_does(studies):
    study = studies[SMALL].study
    (budget,) = {study.budget(name) for name in study.variants}
    assert f"at the cost of {budget:g} runs of full length" in PAGE
    (count,) = {variant.search["rate"].count() for variant in study.variants.values()}
    assert count == 8 and "eight rates" in PAGE
    steps = study.full["train.steps"]
    assert f"{steps} steps of 2,048 tokens" in PAGE
    overrides = dict(each.split("=") for each in study.overrides)
    assert int(overrides["train.global_batch"]) * 128 == 2048
    assert not {study.search.seed} & set(study.seeds)
    for name, each in studies.items():
        budgets = {each.study.budget(variant) for variant in each.study.variants}
        assert len(budgets) == 1, name


def test_results_are_recorded_at_the_cost_that_is_stated(studies):
    for each in studies.values():
        if each.results:
            stated = set(each.results["budget"].values())
            assert stated == {each.study.budget(name) for name in each.results["chosen"]}


def test_nothing_is_concluded_from_an_unfinished_study(studies):
    small = studies[SMALL]
    made = README[README.index(BEGIN) : README.index(END)]
    assert ("Start with" in made) == ("has the smallest loss" in PAGE) == small.complete
    assert ("None yet" in PAGE) == ("not ended yet" in made) == (not small.complete)


def test_every_seed_and_every_failed_run_counts(studies):
    for each in studies.values():
        for name, keys in each.results.get("runs", {}).items():
            row, records = each.row(name), [each.records[key] for key in keys]
            if row is not None:
                assert row["losses"] == [record.loss for record in records]
                assert (row["loss"] is None) == any(record.failed for record in records)
        if each.complete:
            assert all(len(row["losses"]) == len(each.study.seeds) for row in each.rows)
            assert {row["variant"] for row in each.rows} == set(each.results["chosen"])


def test_the_file_of_a_study_is_the_one_that_was_run(studies):
    for each in studies.values():
        if each.results:
            for key in ("title", "seeds", "overrides", "full"):
                assert each.results[key] == getattr(each.study, key), (each.name, key)


def test_records_are_whole(studies):
    for path in STUDIES.glob("results/*/runs.jsonl"):
        keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
        assert len(keys) == len(set(keys)), path


def test_every_command_of_a_study_is_understood():
    commands = re.findall(r"^    python scripts/study.py (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert (ROOT / parse(command.split()).study).is_file()
