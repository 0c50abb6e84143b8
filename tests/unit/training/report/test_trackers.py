"""Trackers get every reported step, continue when the run resumes, and cannot stop the run."""

import shutil
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.run_configs import tiny_config
from tests.run_results import json_lines
from training.checkpoint.checkpoints import read_checkpoint
from training.config import Config
from training.report.trackers import TensorBoardTracker
from training.run import train


@pytest.fixture
def service(monkeypatch) -> SimpleNamespace:
    """A fake wandb that records the arguments of its runs."""
    runs: list[dict[str, Any]] = []

    def init(**settings: Any) -> SimpleNamespace:
        run: dict[str, Any] = {**settings, "logged": [], "axes": {}, "finished": False}
        runs.append(run)
        return SimpleNamespace(
            define_metric=lambda name, step_metric=None: run["axes"].update({name: step_metric}),
            log=run["logged"].append,
            finish=lambda: run.update(finished=True),
        )

    monkeypatch.setitem(sys.modules, "wandb", made := SimpleNamespace(runs=runs, init=init))
    return made


@pytest.fixture
def config(folder):
    """A function that returns the config of a short run. Keywords are config keys."""

    def make(*trackers: str, **keys: Any) -> Config:
        common = {"train__steps": 4, "log__interval": 2, "train__micro_batch": 8}
        common["validation__samples"] = 4
        return tiny_config(folder, "adamw", log__trackers=list(trackers), **common | keys)

    return make


def test_a_service_gets_each_line_once_and_the_config(config, world, service, tmp_path):
    train(config("wandb", log__wandb__project="p"), world)
    (run,) = service.runs
    assert (run["project"], run["name"]) == ("p", "test")
    assert run["config"]["model"]["hidden"] == 64 and run["dir"] == str(tmp_path / "run")
    assert run["axes"] == {"progress/step": None, "*": "progress/step"}
    expected = [
        {k: v for k, v in line.items() if k != "step"} | {"progress/step": line["step"]}
        for line in json_lines(tmp_path / "run/metrics.jsonl")
    ]
    assert run["logged"] == expected and len(expected) == 2 and run["finished"]


def test_a_continued_run_is_the_same_one(config, world, service):
    train(config("wandb", checkpoint__interval=2, train__exit_step=2), world)
    train(config("wandb", checkpoint__interval=2), world)
    first, second = service.runs
    assert first["id"] == second["id"] and first["resume"] == second["resume"] == "allow"
    steps = [line["progress/step"] for run in (first, second) for line in run["logged"]]
    assert steps == [2, 4]
    train(config("wandb", checkpoint__interval=2), world, resume="none")
    assert service.runs[2]["id"] != first["id"]


def test_a_copy_of_a_run_is_tracked_as_another(config, world, service, tmp_path):
    keys = {"checkpoint__interval": 2, "train__exit_step": 2}
    train(config("wandb", **keys), world)
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for step in (3, 4):
        train(config("wandb", **keys | {"run__dir": copy, "train__exit_step": step}), world)
    (tmp_path / "run").rename(tmp_path / "moved")
    train(config("wandb", run__dir=tmp_path / "moved", checkpoint__interval=2), world)
    first, second, third, moved = (run["id"] for run in service.runs)
    assert first == moved != second == third
    assert len({read_checkpoint(tmp_path / name).meta["run_id"] for name in ("copy", "moved")}) == 1


def test_the_folder_of_a_later_start_offline_has_all_steps(config, world, service, monkeypatch):
    """In `wandb sync`, the folder of the last start replaces the folders of earlier starts."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    keys = {"checkpoint__interval": 1, "log__interval": 1}
    for stop in (1, 3, 4):
        train(config("wandb", train__exit_step=stop, **keys), world)
    logged = [[line["progress/step"] for line in run["logged"]] for run in service.runs]
    assert logged == [[1], [1, 2, 3], [1, 2, 3, 4]]
    lines = service.runs[2]["logged"]
    assert lines[:3] == service.runs[1]["logged"] and all("step" not in line for line in lines)
    assert len({run["id"] for run in service.runs}) == 1


@pytest.mark.parametrize("when", ["init", "log", "finish"])
def test_a_failing_service_is_left_out(config, world, service, monkeypatch, capsys, tmp_path, when):
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nand more")

    start = service.init

    def broken(**settings: Any) -> SimpleNamespace:
        run = start(**settings)
        setattr(run, when, fail)
        return run

    monkeypatch.setattr(service, "init", fail if when == "init" else broken)
    assert train(config("wandb"), world).step == 4
    text = "warning: no longer logging to wandb: no route"
    # Repeated at the end, far below the first, unless it failed at the end.
    assert capsys.readouterr().out.count(f"{text}\n") == (1 if when == "finish" else 2)
    warnings = [e for e in json_lines(tmp_path / "run/events.jsonl") if "wandb" in e["text"]]
    step = {"init": 0, "log": 2, "finish": 4}[when]
    assert [(e["kind"], e["step"], e["text"]) for e in warnings] == [("warning", step, text)]
    assert [line["step"] for line in json_lines(tmp_path / "run/metrics.jsonl")] == [2, 4]


@pytest.mark.filterwarnings("ignore")
def test_event_files_hold_what_was_reported(config, world, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    keys = {"checkpoint__interval": 2, "log__interval": 1, "monitors__interval": 1}
    train(config("tensorboard", train__exit_step=3, **keys), world)
    # As if killed between the log and the save of step 3.
    last = tmp_path / "run/checkpoints/step_00000003"
    last.rename(tmp_path / "lost")
    train(config("tensorboard", **keys), world)
    events = EventAccumulator(str(tmp_path / "run/tensorboard"))
    events.Reload()
    logged = events.Scalars("train/loss")
    assert [event.step for event in logged] == [1, 2, 3, 4]
    written = json_lines(tmp_path / "run/metrics.jsonl")
    losses = [line["train/loss"] for line in written]
    assert [event.value for event in logged] == pytest.approx(losses, rel=1e-6)
    tags = events.Tags()["scalars"]
    assert "monitor_stable_rank/gate" in tags
    assert len(tags) == len(set().union(*written) - {"step"})
    assert max(Counter(tag.partition("/")[0] for tag in tags).values()) < 30
    tracker = TensorBoardTracker(config("tensorboard"), 4)
    tracker.log({"sample/walk/text": "words", "val/loss": None}, step=5)
    tracker.close()
    (text,) = events.Reload().Tensors("sample/walk/text/text_summary")
    assert text.step == 5 and text.tensor_proto.string_val == [b"words"]
