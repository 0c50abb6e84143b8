"""docs/results.md says what the committed results of the study of optimizers say."""

import json
import re

import pytest

from scripts.studies.page import BEGIN, SMALL, insert, read_all, section
from scripts.study import parse
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "results.md").read_text()
STUDIES = ROOT / "studies" / "optimizers"


@pytest.fixture(scope="module")
def studies():
    """Everything that is committed."""
    return read_all(STUDIES)


def test_every_number_is_that_of_the_results(studies):
    assert insert(PAGE, section(studies)) == PAGE, "run python scripts/study_page.py"


def test_what_is_said_of_the_budget_is_what_the_study_does(studies):
    study = studies[SMALL].study
    (budget,) = {study.budget(name) for name in study.variants}
    assert f"at the cost of {budget:g} runs of full length" in PAGE
    (count,) = {variant.search["rate"].count() for variant in study.variants.values()}
    assert count == 8 and "eight rates" in PAGE
    assert study.full["train.steps"] == 1080 and "1,080 steps" in PAGE
    assert not {study.search.seed} & set(study.seeds)
    for name, each in studies.items():
        budgets = {each.study.budget(variant) for variant in each.study.variants}
        assert len(budgets) == 1, name


def test_results_are_recorded_at_the_cost_that_is_stated(studies):
    for each in studies.values():
        if each.results:
            stated = set(each.results["budget"].values())
            assert stated == {each.study.budget(name) for name in each.results["chosen"]}


def test_an_unfinished_part_is_said_to_be_unfinished(studies):
    finished = all(each.complete for each in studies.values())
    introduction = PAGE[: PAGE.index(BEGIN)]
    assert ("are not finished" in introduction) != finished


def test_records_are_whole(studies):
    for path in STUDIES.glob("results/*/runs.jsonl"):
        keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
        assert len(keys) == len(set(keys)), path


def test_every_command_of_a_study_is_understood():
    commands = re.findall(r"^    python scripts/study.py (.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert (ROOT / parse(command.split()).study).is_file()
