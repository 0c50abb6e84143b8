"""Profiles of selected steps: traces, notes, and failures that do not end a run."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.comm.groups import Groups
from scripts.plot import main as plot
from tests.launch import run_on_ranks
from tests.minimal_config import problems
from tests.run_configs import read_config, tiny_config
from tests.run_results import json_lines, metrics_of, same_state, state_of
from tests.token_files import write_token_set
from tests.unit.training.test_aids import largest_file
from training.config import load_config
from training.errors import ConfigError
from training.loop import ignore
from training.machine.backends import check_backends
from training.run import train
from training.step_profile import StepProfile, announcement

KEYS: dict[str, Any] = {
    "train__steps": 5,
    "train__micro_batch": 8,
    "checkpoint__interval": 5,
    "log__interval": 1,
    "log__profile__first": 2,
    "log__profile__steps": 2,
    "monitors__interval": 0,
}


def trained(folder: str, world: Groups, **keys: Any) -> Path:
    """Train the tiny run, and return its folder."""
    config = read_config(folder, **{**KEYS, **keys})
    train(config, world)
    return Path(config.run.dir)


def said(run: Path, kind: str = "profile") -> list[str]:
    """Return the texts of all events of one kind in a run."""
    return [line["text"] for line in json_lines(run / "events.jsonl") if line["kind"] == kind]


def spans(path: Path) -> Counter[str]:
    """Count how often each name occurs in a trace."""
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return Counter(each["name"] for each in trace["traceEvents"] if each.get("ph") == "X")


def test_a_trace_has_its_steps_and_changes_no_result(folder, world, capsys):
    tiny_config(folder, "adamw")
    plain = trained(folder, world, log__profile="null", run__dir=f"{folder}/plain")
    capsys.readouterr()
    run = trained(folder, world)
    printed = capsys.readouterr().out.splitlines()
    found = spans(run / "profile" / "steps_2-3_rank_0.json.gz")
    assert [found[f"step {n}"] for n in range(1, 6)] == [0, 1, 1, 0, 0]
    assert found["forward_backward"] == found["optimizer"] == 2 and found["aten::mm"] > 10
    assert [path.name for path in (run / "profile").iterdir()] == ["steps_2-3_rank_0.json.gz"]
    assert metrics_of(run) == metrics_of(plain)
    assert same_state(state_of(run, 5), state_of(plain, 5)) == []
    first, last = said(run)
    assert first == f"profile: steps 2 to 3, rank 0, in {run}/profile"
    assert last.startswith(
        f"profile of steps 2 to 3 on rank 0: {run}/profile/steps_2-3_rank_0.json"
    )
    assert "MB, for https://ui.perfetto.dev" in last
    assert {first, last} <= set(printed) and printed.index(first) < 6
    assert plot([str(run), "--html"]) == 0
    assert "steps_2-3_rank_0.json.gz" in (run / "report.html").read_text()


ASKED = "of the requested steps 2 to 3"
AGAIN = "were taken before this start; to profile again, increase log.profile.first"


@pytest.mark.parametrize(
    ("after", "last", "text"),
    [
        (0, 1, "none, because steps 2 to 3 are past step 1, the run's last step"),
        (0, 2, f"steps 2 to 2 {ASKED}, rank 0, in"),
        (1, 3, "steps 2 to 3, rank 0, in"),
        (2, 3, f"steps 3 to 3 {ASKED}, rank 0, in"),
        (3, 5, f"none, because steps 2 to 3 {AGAIN}"),
    ],
)
def test_a_start_says_which_steps_it_profiles(after, last, text, folder):
    config = tiny_config(folder, **KEYS, train__exit_step=last)
    assert (announcement(config, after) or "").startswith(f"profile: {text}")
    assert announcement(tiny_config(folder), after) is None


@pytest.mark.slow
def test_a_start_past_the_steps_profiles_the_rest(folder, world):
    """Test a start after the steps to profile or within them, and a run that ends before or within
    them."""
    tiny_config(folder, "adamw")
    trained(folder, world, train__exit_step=1)
    trained(folder, world, train__exit_step=2)
    run = trained(folder, world, train__exit_step=4)
    asked = f"{ASKED}, rank 0, in {run}/profile"
    assert said(run)[3] == f"profile: steps 3 to 3 {asked}"
    trained(folder, world)
    traces = sorted(path.name for path in (run / "profile").iterdir())
    assert traces == ["steps_2-2_rank_0.json.gz", "steps_3-3_rank_0.json.gz"]


@pytest.mark.slow
def test_a_run_that_is_stopped_within_them_writes_what_there_is(folder, world):
    tiny_config(folder, "adamw")
    stop = Path(folder) / "run" / "STOP"
    config = read_config(folder, **{**KEYS, "log__profile__steps": 4})
    train(config, world, on_step=lambda step, _: stop.touch() if step == 3 else None)
    stopped = json_lines(Path(folder) / "run" / "metrics.jsonl")[-1]["step"]
    found = spans(Path(folder) / "run" / "profile" / f"steps_2-{stopped}_rank_0.json.gz")
    assert stopped < 5 and found[f"step {stopped}"] == 1


def test_no_failure_ends_the_run(folder, world, capsys):
    """Test a full disk, a file in place of the folder, and a profiler stopped by other code."""
    tiny_config(folder, "adamw")

    def failed(name: str, on_step: Any = ignore) -> list[str]:
        keys = {**KEYS, "checkpoint__interval": 0, "train__exit_step": 3, "validation__samples": 1}
        config = read_config(folder, **keys, run__dir=f"{folder}/{name}")
        train(config, world, on_step=on_step)
        run = Path(config.run.dir)
        assert len(metrics_of(run)) == 3 and not list((run / "profile").glob("*"))
        return [text for text in said(run, "warning") if "profile" in text]

    with largest_file(100_000):
        (text,) = failed("full")
    assert "the profiler could not write its trace" in text and text.endswith("the run continues")
    (Path(folder) / "taken").mkdir()
    (Path(folder) / "taken" / "profile").touch()
    (text,) = failed("taken")
    assert text.startswith("warning: no profile of rank 0: File exists:")
    (text,) = failed("ended", lambda step, _: step == 2 and torch.autograd._disable_profiler())
    assert text.startswith("warning: no profile of rank 0: ")


@pytest.mark.slow
def test_a_run_that_fails_stops_its_profile(folder, world, capsys):
    tiny_config(folder, "adamw")

    def fail(step: int, result: Any) -> None:
        raise RuntimeError("a broken step")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="a broken step"):
            train(read_config(folder, **{**KEYS, "log__profile__first": 1}), world, on_step=fail)
        assert "no profile of rank 0: the run failed" in capsys.readouterr().out


@pytest.mark.slow
def test_traces_of_other_ranks_are_said_by_the_first(tmp_path):
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)
    tiny_config(str(tmp_path))
    keys = {**KEYS, "train__micro_batch": 4, "log__profile__ranks": "[1]"}
    arguments = {"folder": str(tmp_path), "keys": keys}
    run_on_ranks(2, "tests.distributed.run_workers", "trained", arguments)
    run = tmp_path / "run"
    assert f"on rank 1: {run}/profile/steps_2-3_rank_1.json.gz" in said(run)[1]
    assert spans(run / "profile" / "steps_2-3_rank_1.json.gz")["step 3"] == 1


def profile_of(folder: str, world: Groups, notes: list[Any], **keys: Any) -> StepProfile:
    """Return the profile of a rank, without a run."""
    config = read_config(folder, **{**KEYS, "log__profile__steps": 3, **keys})
    Path(config.run.dir).mkdir(exist_ok=True)
    return StepProfile(config, world, 0, lambda *note: notes.append(note))


def step(profile: StepProfile, number: int) -> None:
    """Take a step that consists of one matmul."""
    profile.before(number)
    torch.ones(4, 4).mm(torch.ones(4, 4))
    profile.after(number)


def test_a_run_that_ends_early_or_fails_ends_its_profile(folder, world, capsys):
    tiny_config(folder, "adamw")
    notes: list[Any] = []
    profile = profile_of(folder, world, notes)
    for number in (1, 2, 3):
        step(profile, number)
    assert notes == []
    profile.finish(3)
    ((kind, after, text),) = notes
    assert (kind, after) == ("profile", 3) and text.startswith("profile of steps 2 to 3 on rank 0")
    found = spans(Path(folder) / "run" / "profile" / "steps_2-3_rank_0.json.gz")
    assert [found[name] for name in ("step 1", "step 2", "step 3", "aten::mm")] == [0, 1, 1, 2]
    for _ in range(2):
        profile = profile_of(folder, world, notes)
        step(profile, 2)
        profile.before(3)
        assert torch.autograd._profiler_enabled()
        profile.close()
        assert not torch.autograd._profiler_enabled()
        assert capsys.readouterr().out == "warning: no profile of rank 0: the run failed\n"
    assert len(notes) == 1 and len(list((Path(folder) / "run" / "profile").iterdir())) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_allocations_are_recorded_in_profiled_steps_alone(fails, folder, world, monkeypatch):
    tiny_config(folder)
    recorded: list[Any] = []
    notes: list[Any] = []

    def record(enabled: str | None = "all", **_: Any) -> None:
        recorded.append(enabled)

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).touch())
    profile = profile_of(folder, world, notes, log__profile__memory=True)
    step(profile, 1)
    assert recorded == []
    step(profile, 2)
    assert recorded == ["all"]
    if fails:
        profile.close()
    else:
        profile.finish(2)
        snapshot = Path(folder) / "run" / "profile" / "steps_2-2_rank_0.memory.pickle"
        assert snapshot.exists() and str(snapshot) in notes[-1][2]
    assert recorded == ["all", None]


def test_the_notes_of_all_ranks_are_written(folder, world, monkeypatch):
    """Rank 0 is not profiled. Other ranks write traces or fail."""
    tiny_config(folder)
    said = [[], ["profile of steps 2 to 4 on rank 1: a"], ["warning: no profile of rank 2: b"]]
    monkeypatch.setattr("training.step_profile.from_all", lambda messages, group: said)
    notes: list[Any] = []
    profile = profile_of(folder, world, notes, log__profile__ranks="[1,2]")
    for number in (1, 2, 3, 4, 5):
        step(profile, number)
    assert notes == [("profile", 4, said[1][0]), ("warning", 4, said[2][0])]


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        (["steps=2"], "log.profile.first is required (an integer)"),
        (["first=101"], "log.profile.first must be at most train.steps = 100, got 101"),
        (["first=2", "ranks=[]"], "log.profile.ranks must"),
        (["first=2", "ranks=[0,0]"], "log.profile.ranks must not contain duplicates, got [0, 0]"),
        (
            ["first=2", "ranks=[0,2]"],
            "log.profile.ranks must be below the number of ranks = 2, got [0, 2]",
        ),
    ],
)
def test_wrong_keys_are_refused(keys, rule, minimal):
    overrides = [f"log.profile.{key}" for key in keys]
    (line,) = problems(minimal, *overrides, world_size=2)
    assert line.startswith(rule)


def test_a_memory_snapshot_needs_a_gpu(minimal):
    config = load_config(minimal, ["log.profile.first=2", "log.profile.memory=true"])
    with pytest.raises(ConfigError, match=r"log\.profile\.memory must be false on device cpu"):
        check_backends(config, torch.device("cpu"))
