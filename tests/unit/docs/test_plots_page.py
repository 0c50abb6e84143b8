"""docs/plots.md: its commands are understood, its table names every figure."""

import re
import shlex

from scripts.plot import KINDS, parse
from scripts.plots.figures import FIGURES
from tests.paths import ROOT

PAGE = (ROOT / "docs" / "plots.md").read_text()


def test_every_command_is_understood():
    commands = re.findall(r"^    python scripts/plot.py (.*)$", PAGE, re.MULTILINE)
    assert {parse(shlex.split(command)).kind for command in commands} == set(KINDS)


def test_the_table_names_every_figure():
    table = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    named = set(re.findall(r"`(\w+)`", " ".join(table)))
    assert named == {figure.name for figure in FIGURES}
