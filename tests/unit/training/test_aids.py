"""Failures to write optional files do not end a run, and a single disk failure costs no steps."""

import errno
import fcntl
import io
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.checkpoint.state_writer import write_plain
from parallel.comm import groups as process_groups
from parallel.comm.collectives import Agreement
from tests.disk_calls import DiskCalls
from tests.failing_disk import largest_file
from tests.run_configs import read_config, tiny_config
from tests.run_results import json_lines, metrics_of, same_state, state_of
from training.build import build_trainer
from training.checkpoint import checkpoints, saving
from training.checkpoint.checkpoints import steps
from training.checkpoint.saving import CheckpointError, Saver
from training.config.schema import StopConfig
from training.data.build_data import build_data
from training.errors import InputError
from training.lifecycle.lifecycle import Lifecycle, StopRequests, Watchdog
from training.lifecycle.run_folder import FolderError, HeldFolder, locked
from training.lifecycle.terminal import LastingFile, outlive_readers
from training.loop import ignore
from training.report.log_lines import LogFile
from training.run import train
from training.step import StepResult

KEYS: dict[str, Any] = {
    "checkpoint__interval": 2,
    "checkpoint__keep_last": 1,
    "log__interval": 1,
    "train__steps": 6,
    "train__micro_batch": 8,
    "validation__samples": 2,
}
END = 6


@pytest.fixture
def run(folder, world, tmp_path) -> Callable[..., Any]:
    """A function that trains in the folder `run` and returns the outcome."""
    tiny_config(folder, "muon")

    def trained(*, on_step: Any = ignore, **keys: Any) -> Any:
        return train(read_config(folder, **KEYS | keys), world, on_step=on_step)

    return trained


@pytest.fixture(scope="module")
def whole(shared_folder) -> Path:
    """An undisturbed run."""
    world = process_groups.initialize()
    train(tiny_config(str(shared_folder), "muon", **KEYS), world)
    process_groups.shutdown()
    return shared_folder / "run"


def check_equal(ours: Path, whole: Path) -> None:
    """Check that a run ended with the same results as `whole`."""
    assert same_state(state_of(ours, END), state_of(whole, END)) == []
    assert metrics_of(ours) == metrics_of(whole)


@pytest.mark.parametrize("size", [0, 10, 12, 17, 30])
def test_lines_that_the_disk_refuses_are_written_with_the_next(size, tmp_path, capsys):
    """If a line has been written partially, its remainder is written as well."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')  # as after a killed run
    with closing(LogFile(path)) as log:
        with largest_file(size):
            for step in (2, 3):
                log.append({"step": step})
        log.append({"step": 4})
    assert [line["step"] for line in json_lines(path)] == [1, 2, 3, 4]
    said = capsys.readouterr().out
    assert said.count("warning: lines of metrics.jsonl are not written yet: File too large") == 1
    assert "could not be written" not in said


def test_a_log_that_is_removed_begins_again(tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    with closing(LogFile(path)) as log:
        log.append({"step": 1})
        path.unlink()
        log.append({"step": 2})
    assert [line["step"] for line in json_lines(path)] == [2]
    assert "metrics.jsonl was removed: creating a new file" in capsys.readouterr().out


def test_lines_that_never_could_be_written_are_counted(tmp_path, capfd):
    with closing(LogFile(tmp_path / "gone" / "events.jsonl")) as log:
        log.append({"step": 1})
        log.append({"step": 2})
    said = capfd.readouterr().out
    assert "warning: 2 lines of " in said and "events.jsonl could not be written" in said


def test_plain_values_on_a_full_disk_are_an_error_of_the_system(tmp_path):
    """With torch's writer, the error would be a RuntimeError."""
    with largest_file(1000), pytest.raises(OSError, match="too large"):
        write_plain(tmp_path / "rng.pt", [torch.zeros(10_000)])


def test_a_disk_that_does_not_answer_asks_for_no_stop(tmp_path):
    unanswered = tmp_path / ("x" * 5000)
    with pytest.raises(OSError, match="too long"):
        os.stat(unanswered / "STOP")
    assert StopRequests(unanswered, StopConfig(), first=True, interrupts=None).wanted() == 0


def test_the_limit_of_processor_time_is_a_stop_request(tmp_path):
    with StopRequests(tmp_path, StopConfig(), first=True, interrupts=None) as requests:
        os.kill(os.getpid(), signal.SIGXCPU)
        assert requests.wanted() == 3


def test_a_watchdog_that_cannot_write_warns_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("training.lifecycle.lifecycle.PAUSE", -1.0)
    with Watchdog(tiny_config(str(tmp_path), watchdog__hang_seconds=100.0), rank=0) as watchdog:
        for step in range(5):
            watchdog.beat(step)
        said = capsys.readouterr().out
        assert said.count("warning: heartbeat.json is not up to date: No such file") == 1
        assert said.count("warning: no stack traces will be written: No such file") == 1
        (tmp_path / "run").mkdir()
        watchdog.beat(5)
    assert (tmp_path / "run" / "heartbeat.json").exists()


def test_output_on_a_full_disk_is_dropped_while_a_run_trains(monkeypatch):
    """Before training, output is not dropped, because --print-config must fail if it cannot
    print."""
    with LastingFile("/dev/full", "w") as file:
        with pytest.raises(OSError, match="No space left"):
            file.write(b"line")
        monkeypatch.setattr(LastingFile, "training", True)
        assert file.write(b"line") == 4


@pytest.mark.parametrize("settings", [{}, {"line_buffering": True}, {"write_through": True}])
def test_a_line_appears_as_soon_as_without_the_run(settings, tmp_path, monkeypatch):
    """Characters that the stream cannot encode are escaped."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # so that it is restored
    with io.TextIOWrapper((tmp_path / "out").open("wb"), "ascii", **settings) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        outlive_readers()
        print("é")
        assert (tmp_path / "out").read_text() == ("\\xe9\n" if settings else "")
        sys.stdout.flush()
    assert (tmp_path / "out").read_text() == "\\xe9\n"


@pytest.mark.parametrize("failing", [1, 8, 11, "one of each save", "all of step 4"])
def test_a_save_that_fails_once_is_made_again(failing, run, whole, tmp_path, monkeypatch, capsys):
    """A save that fails twice ends the run, which then resumes from the previous checkpoint."""
    sync, done, saves = os.fsync, [0], set()

    def fail(descriptor: int) -> None:
        path, always = os.readlink(f"/proc/self/fd/{descriptor}"), failing == "all of step 4"
        sealing = threading.current_thread() is not threading.main_thread()
        done[0] += sealing
        save = path.partition(".writing-")[2][:1]
        first = failing == "one of each save" and sealing and save not in ("", *saves)
        saves.add(save)
        if done[0] == failing or first or (always and save == "4"):
            done[0] += 1
            raise OSError(5, "Input/output error", path)
        sync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        if failing == "all of step 4":
            with pytest.raises(CheckpointError, match="step 4 could not be saved: .*Input/output"):
                run()
            assert steps(tmp_path / "run") == [2]
        else:
            assert run().step == END
            assert "warning: " in capsys.readouterr().out
            check_equal(tmp_path / "run", whole)
            return
    assert run().step == END
    check_equal(tmp_path / "run", whole)


def test_a_crash_after_a_save_loses_none_of_its_files_and_names(run, tmp_path, monkeypatch):
    """Ranks do not wait for the disk during training, because other threads and processes sync the
    files."""
    calls = DiskCalls(tmp_path, monkeypatch)
    assert run().step == END
    assert not [line for line in calls.lines() if line.startswith("wait ")]
    saved = tmp_path / "run" / "checkpoints" / f"step_{END:08d}"
    assert len([*saved.rglob("*")]) >= 8
    assert [*calls.lost(saved), *calls.lost(saved.parent / "latest")] == []
    # The run cannot continue before the logs' lines of a saved step.
    logs = [tmp_path / "run" / name for name in ("", "metrics.jsonl", "events.jsonl")]
    place = next(i for i, line in enumerate(calls.lines()) if line.endswith(f" {saved}"))
    assert {f"sync {path}" for path in logs} <= {*calls.lines()[:place]}


@pytest.mark.parametrize("failures", [0, 1])
def test_a_save_counts_when_it_is_sealed(failures, folder, world, monkeypatch):
    """Training continues during the save, a failed attempt is repeated, and a run waits for the
    seal before it ends."""
    config = tiny_config(folder, "muon", **KEYS)
    Path(config.run.dir).mkdir()
    trainer = build_trainer(config, world, *build_data(config))
    saver = Saver(config, world, trainer.model, trainer.optimizer, {})
    stops = StopRequests(config.run.dir, config.stop, first=True, interrupts=None)
    watchdog = Watchdog(config, rank=0)
    lifecycle = Lifecycle(config, saver, stops, watchdog, Agreement(world.host))
    complete, asked, allowed = checkpoints.complete, list[Path](), threading.Event()

    def sealed(path: Path, *arguments: Any) -> Path:
        asked.append(path)
        assert allowed.wait(10)
        if len(asked) <= failures:
            raise OSError(errno.EIO, "Input/output error", path)
        return complete(path, *arguments)

    def step_until(done: Callable[[], bool]) -> None:
        while not done():
            lifecycle.after_step(3)
            time.sleep(0.01)

    monkeypatch.setattr(checkpoints, "complete", sealed)
    saver.begin({"step": 2})
    step_until(lambda: bool(asked))
    for _ in range(4):
        lifecycle.after_step(3)
    assert saver.busy and saver.last_saved is None
    allowed.set()
    step_until(lambda: saver.last_saved == 2)
    assert len(asked) == failures + 1 and not saver.busy
    allowed.clear()
    saver.begin({"step": 4})
    step_until(lambda: len(asked) == failures + 2)
    threading.Timer(0.1, allowed.set).start()
    saver.abandon()
    assert steps(config.run.dir)[-1] == 4


def test_waiting_for_a_disk_that_hangs_is_said_and_is_no_progress(
    folder, world, monkeypatch, capsys
):
    config = tiny_config(folder, "muon", **KEYS)
    Path(config.run.dir).mkdir()
    trainer = build_trainer(config, world, *build_data(config))
    saver = Saver(config, world, trainer.model, trainer.optimizer, {})
    complete, poll, answers = checkpoints.complete, saving.Save.poll, threading.Event()
    monkeypatch.setattr(saving, "SLOW", 0.1)
    monkeypatch.setattr(saving.Save, "poll", lambda save, timeout: poll(save, timeout / 100))
    monkeypatch.setattr(
        checkpoints, "complete", lambda *given: complete(*given) if answers.wait(10) else None
    )
    saver.begin({"step": 2})
    threading.Timer(1.0, answers.set).start()
    beats = list[float]()
    saver.wait(lambda failed: failed, lambda: beats.append(time.monotonic()))
    assert beats and len(beats) < 50  # the files take a moment; the seal takes 100 turns
    assert saver.last_saved == 2
    warned = (
        r"warning: rank 0: step 2 is not saved after waiting for \d s; is (.*) on a slow or stuck"
    )
    said = re.findall(warned, capsys.readouterr().out)
    assert set(said) == {f"{config.run.dir}/checkpoints"} and 2 <= len(said) <= 8


def test_a_removal_that_hangs_holds_up_no_save(run, monkeypatch, capsys, tmp_path):
    """The removal does not delay the end of the process either, because the process does not wait
    for daemon threads."""
    retire, answers, daemons = checkpoints.retire, threading.Event(), list[bool]()

    def hang(*folder: Any, **keep: Any) -> Any:
        daemons.append(threading.current_thread().daemon)
        answers.wait(60)
        return retire(*folder, **keep)

    monkeypatch.setattr(saving, "SLOW", 0.1)
    monkeypatch.setattr(checkpoints, "retire", hang)
    assert run().step == END
    assert steps(tmp_path / "run") == [2, 4, END] and daemons == [True]
    said = capsys.readouterr().out
    assert said.count("older checkpoints are not removed after waiting for 0 s; is ") == 1
    answers.set()


@pytest.mark.parametrize(("hang", "timeout"), [(8.0, 600.0), (600.0, 100.0), (50.0, 60.0)])
def test_a_heartbeat_is_of_now_and_stacks_precede_the_timeout(hang, timeout, tmp_path, monkeypatch):
    armed: list[float] = []
    call = "faulthandler.dump_traceback_later"
    monkeypatch.setattr(call, lambda seconds, file: armed.append(seconds))
    keys = {"watchdog__hang_seconds": hang, "parallel__timeout_seconds": timeout}
    began, config = time.time(), tiny_config(str(tmp_path), **keys)
    Path(config.run.dir).mkdir()
    with Watchdog(config, rank=0) as watchdog:
        watchdog.beat(7)
    beat = json.loads((tmp_path / "run" / "heartbeat.json").read_text())
    assert began <= beat["time"] <= time.time()
    assert (beat["step"], beat["pid"]) == (7, os.getpid())
    (limit,) = armed
    assert 0 < limit < timeout - 10 and (limit == hang or hang > timeout / 2)


def test_an_error_between_steps_ends_a_run_that_has_saved(run, whole, tmp_path, monkeypatch):
    """In this test, the error is raised while the run prints a line."""

    def fail(metrics: Any, *, step: int, total_steps: int) -> str:
        if step == 3:
            raise OSError(28, "No space left on device")
        return ""

    with monkeypatch.context() as patch:
        patch.setattr("training.run_log.console_line", fail)
        with pytest.raises(OSError, match="No space left"):
            run(checkpoint__interval=100)
    assert steps(tmp_path / "run")[-1] >= 3
    assert run(checkpoint__interval=100).step == END
    check_equal(tmp_path / "run", whole)


@pytest.mark.parametrize("replaced", [True, False])
def test_a_run_whose_folder_was_moved_makes_no_new_one(replaced, run, tmp_path):
    """The run removes no checkpoints.

    The run starts from a saved step, because a save that is interrupted by the move may or may not
    be complete.
    """

    def stop(step: int, result: StepResult) -> None:
        if step == 2:
            (tmp_path / "run" / "STOP").touch()

    def move(step: int, result: StepResult) -> None:
        if step == 5:
            (tmp_path / "run").rename(tmp_path / "moved")
            if replaced:
                (tmp_path / "run").mkdir()

    run(on_step=stop, checkpoint__interval=100)
    saved = steps(tmp_path / "run")
    assert saved and saved[-1] < 5
    with pytest.raises(FolderError, match="run.dir .* was moved or removed while the run"):
        run(on_step=move, checkpoint__interval=100)
    assert (tmp_path / "run").exists() == replaced
    assert not replaced or not list((tmp_path / "run").iterdir())
    assert steps(tmp_path / "moved") == saved
    assert metrics_of(tmp_path / "moved")[-1]["step"] == END


@pytest.mark.parametrize("moved", ["run", "."])
@pytest.mark.parametrize("instead", [None, Path.touch, Path.mkdir])
def test_a_folder_is_gone_whatever_is_in_its_place_or_its_parents(moved, instead, tmp_path):
    place = (tmp_path / "parent" / moved).resolve()
    (tmp_path / "parent" / "run").mkdir(parents=True)
    with closing(HeldFolder(tmp_path / "parent" / "run")) as held:
        held.check()
        place.rename(tmp_path / "elsewhere")
        if instead is not None:
            instead(place)
        with pytest.raises(FolderError, match=r"run.dir .* was moved or removed"):
            held.check()


def test_a_run_writes_through_no_link(run, tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("precious")
    stacks = tmp_path / "run" / "stacks"
    stacks.mkdir(parents=True)
    (stacks / "rank_00000.txt").symlink_to(kept)
    os.link(kept, tmp_path / "run" / "config.yaml")
    for name in ("data.json", "events.jsonl", "metrics.jsonl", "started"):
        os.link(kept, tmp_path / "run" / name)
    assert run().step == END
    assert kept.read_text() == "precious"


def test_a_run_that_could_not_save_does_not_begin(run, tmp_path):
    """The run ends immediately, instead of hours later at its first save."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("precious")
    taken: list[int] = []
    with pytest.raises(InputError, match="cannot write to run.dir .*: File exists"):
        run(on_step=lambda step, result: taken.append(step))
    assert taken == []
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"checkpoints", "lock"}
    assert run(checkpoint__interval=0).step == END


def test_a_lock_that_has_another_name_is_refused(tmp_path):
    (tmp_path / "kept").write_text("precious")
    (tmp_path / "run").mkdir()
    os.link(tmp_path / "kept", tmp_path / "run" / "lock")
    with pytest.raises(FolderError, match="lock must not be a hard link"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "kept").read_text() == "precious"


def test_a_disk_without_space_for_the_lock_is_named(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(FolderError) as error, locked(tmp_path / "run"):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    place = tmp_path / "run"
    assert str(error.value).startswith(f"run.dir {place} cannot be written to: File too large: ")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.EAGAIN, "in use by another run: unknown"),
        (errno.EACCES, "in use by another run: unknown"),
        (errno.ENOLCK, "lock cannot be locked: No locks available"),
    ],
)
def test_a_folder_without_locks_is_not_said_to_be_in_use(number, text, tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with pytest.raises(FolderError, match=text), locked(tmp_path / "run"):
        pass
