"""Progress lines of a command that takes a long time to compute its result."""

import itertools
import time

import pytest

from training.report import text
from training.report.text import pause, progress


@pytest.fixture
def soon(monkeypatch):
    """Print the first line after 0.01 seconds."""
    monkeypatch.setattr(text, "FIRST", 0.01)


def test_lines_state_time_and_state_while_the_block_runs(soon, capsys):
    numbers = itertools.count(1)
    with progress(lambda: f"plans layout {next(numbers)}"):
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["0:00:00 plans layout 1", "0:00:00 plans layout 2"]
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_a_short_block_prints_nothing(capsys):
    with progress(lambda: "plans"):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_block_within_a_block_prints_alone(soon, capsys):
    with progress(lambda: "outer"):
        with progress(lambda: "inner"):
            time.sleep(0.2)
        inner = capsys.readouterr().err
        time.sleep(0.2)
    assert "inner" in inner and "outer" not in inner and "outer" in capsys.readouterr().err


def test_lines_become_rarer():
    assert pause(0) == pause(60) == 10 and pause(3600) == 360


def test_a_failure_within_the_block_is_raised_and_ends_the_lines(soon, capsys):
    try:
        with progress(lambda: "plans"):
            raise ValueError("no layout")
    except ValueError:
        capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == ""
