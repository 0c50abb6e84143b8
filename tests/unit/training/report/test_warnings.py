"""The warnings of a run cover new events only."""

import re
from contextlib import closing
from pathlib import Path

import pytest

from tests.run_configs import tiny_config
from tests.run_results import json_lines
from training.build import build_trainer
from training.data.build_data import build_data
from training.run_log import WARNINGS, RunLog


@pytest.mark.parametrize("name", WARNINGS)
def test_a_warning_counts_the_events_since_the_last_report(name: str, world, folder: str) -> None:
    """The run resumes after one event."""
    config = tiny_config(folder, "adamw")
    Path(config.run.dir).mkdir()
    trainer = build_trainer(config, world, *build_data(config))
    trainer.progress.step = 3
    facts = {"tracker_id": "id", "identity": {"data": {}, "tokenizer": {"sha256": None}}}
    metric, _ = WARNINGS[name]
    unit = {"optim/refused/layers.0.q": 2.0}
    with closing(RunLog(trainer, [], {name: 1.0}, facts)) as log:
        for step, events in enumerate([1.0, 3.0, 3.0, 4.0], start=4):
            log.report({metric: events, **unit}, step)
        log.report({"val/loss": 1.0}, 8)
        log.report({metric: 9.0, **unit}, 9)
    lines = json_lines(Path(config.run.dir) / "events.jsonl")
    warnings = [line for line in lines if line["kind"] == "warning"]
    counts = [re.search(r"\d+", line["text"]) for line in warnings]
    assert [int(count[0]) for count in counts if count] == [2, 1, 5]
    assert [line["step"] for line in warnings] == [5, 7, 9]
    assert all(("layers.0.q 2" in line["text"]) == (name == "refused") for line in warnings)
