"""Figures of runs from their lines: time by steps, and the order of runs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scripts.plots.compare import BITS, LOSS, measure
from scripts.plots.run_data import RunData


def run_of(*lines: dict[str, Any], vocabulary: int = 100) -> RunData:
    """Return a run with these lines of metrics."""
    train = {"global_batch": 1, "sequence_length": 8}
    config = {"model": {"vocab_size": vocabulary}, "train": train}
    return RunData(Path("run"), list(lines), [], config, [])


def test_time_is_that_of_steps_not_of_lines() -> None:
    """Intervals between lines with step times vary, and some lines have no time."""
    times = {1: 2.0, 10: 0.5, 12: None, 20: 1.0, 100: 0.25}
    lines = [
        {"step": step} | ({} if time is None else {"perf/step_time_s": time})
        for step, time in times.items()
    ]
    passed = run_of(*lines).seconds()
    assert [passed(line) for line in lines] == [2, 6.5, 6.5, 16.5, 36.5]
    hours = run_of(*lines).seconds(3600)
    assert hours(lines[-1]) == pytest.approx(36.5 / 3600)


def test_monitored_steps_have_their_own_tokens() -> None:
    """Their tokens are right between logged steps and after the last step, where a ramp has another
    batch."""
    monitors = [{"step": step, "tokens": tokens} for step, tokens in ((4, 8), (8, 40), (12, 72))]
    run = replace(run_of({"step": 10, "progress/tokens": 56}), monitors=monitors)
    assert [run.tokens(line) for line in monitors] == [8, 40, 72]
    assert run.tokens({"step": 9}) == 48


@pytest.mark.parametrize(
    ("bits", "vocabularies", "expected"),
    [
        ((1.0, 1.1), (100, 200), BITS),
        ((1.0, None), (100, 200), LOSS),  # not ranked by a metric that one of them lacks
        ((None, None), (100, 200), LOSS),
        ((1.0, 1.1), (100, 100), LOSS),
    ],
)
def test_runs_are_ordered_by_what_all_have(bits, vocabularies, expected) -> None:
    runs = []
    for value, vocabulary in zip(bits, vocabularies, strict=True):
        line = {"step": 1, "val/loss": 3.0} | ({} if value is None else {"val/bpb": value})
        runs.append(run_of(line, vocabulary=vocabulary))
    assert measure(runs) == expected


def test_a_run_that_has_not_validated_does_not_decide_what_orders_the_others() -> None:
    validated = run_of({"step": 1, "val/loss": 3.0, "val/bpb": 1.0})
    assert measure([validated, run_of({"step": 1}, vocabulary=200)]) == BITS
