"""Reactions of a run to bad losses, the end of a job, and a failing run folder or disk."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.verify import main as verify
from tests.paths import ROOT
from tests.run_configs import read_config, tiny_config
from tests.run_results import json_lines, metrics_of, same_state, state_of
from tests.token_files import write_token_set
from training.build import build_trainer
from training.checkpoint import checkpoints
from training.checkpoint.checkpoints import read_checkpoint, steps
from training.checkpoint.saving import CheckpointError, Saver
from training.config.schema import StopConfig
from training.data.build_data import build_data
from training.lifecycle.lifecycle import StopRequests
from training.lifecycle.run_folder import FolderError, locked
from training.nonfinite import NonFiniteError, SpikeDetector
from training.run import train
from training.step import StepResult

KEYS: dict[str, Any] = {
    "checkpoint__interval": 2,
    "checkpoint__keep_last": "null",
    "log__interval": 1,
    "train__steps": 10,
    "train__micro_batch": 8,
    "train__max_skipped_steps": 1,
    "validation__samples": 2,
}


@pytest.fixture
def folder(folder, tmp_path) -> Path:
    """A folder with a token set and a config."""
    tiny_config(folder, "muon")
    return tmp_path


def config_of(folder: Path, **keys: Any) -> Any:
    """Return the config of a run in FOLDER/run."""
    return read_config(str(folder), **{**KEYS, **keys})


def test_a_rewind_goes_back_and_leaves_the_samples_out(folder, world, poisoned, capsys):
    """Steps 6 and 7 are not finite. The run repeats steps 5, 6, ... without the samples of steps 6
    and 7 (40 to 55)."""
    monitors = {"monitors__interval": 1, "monitors__groups": "[weights,gradients,updates]"}
    config = config_of(folder, spikes__rewinds=1, **monitors)
    data, _ = build_data(config)
    windows = [data[i].tolist() for i in range(200)]
    read: list[list[int]] = []

    def note_samples(trainer: Any) -> None:
        make = trainer.make_batches

        def noted(batch: torch.Tensor) -> torch.Tensor:
            read.append([windows.index(row) for row in batch.tolist()])
            return batch

        trainer.make_batches = lambda progress: map(noted, make(progress))
        trainer.batches = trainer.make_batches(trainer.progress)

    steps_taken = poisoned(5, change=note_samples)
    outcome = train(config, world)
    assert outcome.step == 10
    assert steps_taken == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10]
    first = [list(range(8 * step, 8 * step + 8)) for step in range(12)]
    assert read == [*first[:7], *first[4:5], *first[7:12]]
    printed = capsys.readouterr().out
    assert "rewinding to" in printed and "(samples 40 to 55)" in printed
    lines = metrics_of(folder / "run")
    for log in (lines, json_lines(folder / "run" / "monitors.jsonl")):
        assert [line["step"] for line in log] == list(range(1, 11))
    # The step before step 5, which is repeated, is not the last one taken.
    for figure in ("gradient_alignment", "update_alignment"):
        compared = [line["step"] for line in log if figure in line["units"]["layers.0.o"]]
        assert compared == [2, 3, 4, *range(6, 11)], figure
    assert lines[-1]["optim/skipped_steps"] == 2
    assert all(line["train/loss"] is not None for line in lines)
    assert checkpoints.steps(folder / "run") == [2, 4, 6, 8, 10]
    assert "step 6 could not be saved: " in printed and " is not finite" in printed
    # Checkpoints contain the range, so the next start leaves out these samples as well.
    progress = read_checkpoint(folder / "run").meta["progress"]
    assert progress["left_out"] == [[40, 56]] and progress["sample"] == 8 * 12
    assert verify([str(folder / "run")]) == 0


def test_a_rewind_puts_later_checkpoints_aside(folder, world, poisoned):
    """The losses of steps 6 and 7 are spikes, so the state is finite, and step 6 is saved."""
    there: dict[int, tuple[list[int], list[str]]] = {}
    run = folder / "run"

    def note(step: int, result: StepResult) -> None:
        there[step] = steps(run), [path.read_text() for path in run.glob("checkpoints/latest")]

    def with_spikes(trainer: Any) -> Callable[[int, StepResult], None]:
        update, spikes = trainer.update, iter([True] * 5 + [False] * 2)
        trainer.update = lambda factor, sound: update(factor, sound & next(spikes, True))
        return note

    poisoned(change=with_spikes)
    assert train(config_of(folder, spikes__rewinds=1), world).step == 10
    aside = run / "checkpoints-left-at-00000004"
    assert [path.name for path in aside.iterdir()] == ["step_00000006"]
    assert there[5] == ([2, 4], ["step_00000004\n"])  # when it is repeated
    assert steps(run) == [2, 4, 6, 8, 10]


def test_saves_that_are_refused_end_a_run_only_in_a_row(folder, world, poisoned, monkeypatch):
    monkeypatch.setattr("training.checkpoint.saving.REFUSALS", 2)
    poisoned(3, 7)
    assert train(config_of(folder, spikes__rewinds=2), world).step == 10


def test_without_rewinds_left_a_run_that_is_not_finite_stops(folder, world, poisoned):
    """The run rewinds to step 4 twice, first leaving out the samples of steps 6 and 7, then the
    samples of steps 8 and 9."""
    trainers: list[Any] = []
    taken = poisoned(5, 7, 9, change=trainers.append)
    keys = {"spikes__rewinds": 2, "checkpoint__interval": 4, "train__steps": 12}
    with pytest.raises(NonFiniteError, match="more than train.max_skipped_steps = 1 consecutive"):
        train(config_of(folder, **keys), world)
    assert taken == [*range(1, 7), *range(5, 9), *range(5, 11)]
    assert trainers[0].progress.left_out == ((40, 56), (72, 88))


def test_a_save_is_completed_before_losses_end_a_run(folder, world, poisoned, monkeypatch):
    """The save of step 4 is still in progress when steps 6 and 7 are not finite."""
    monkeypatch.setattr(Saver, "status", lambda self: (0, int(self.busy)))
    poisoned(5)
    with pytest.raises(NonFiniteError, match="more than train.max_skipped_steps = 1 consecutive"):
        train(config_of(folder, checkpoint__interval=4), world)
    assert steps(folder / "run") == [4]
    assert verify([str(folder / "run")]) == 0


def test_a_state_that_is_not_finite_is_no_last_checkpoint(folder, world, poisoned):
    """The run must not end as if it had succeeded."""
    poisoned(4)
    config = config_of(folder, train__steps=4)
    with pytest.raises(CheckpointError, match="the last step .4. could not be saved, because"):
        train(config, world)
    assert steps(folder / "run") == [2]
    assert not (folder / "run" / "DONE").exists()
    poisoned()
    assert train(config, world).step == 4


def test_a_state_that_stays_not_finite_ends_the_run_by_its_place(folder, world, poisoned):
    """The nonfinite embedding row belongs to a token that is in no batch, so the loss stays
    finite."""
    write_token_set(folder / "tokens", tokens=8_000, vocab=100, seed=0)

    def poison_row(trainer: Any) -> Callable[[int, StepResult], None]:
        named = trainer.model.parameters.items()
        embedding = next(value for name, value in named if "embedding" in name)

        def poison(step: int, result: StepResult) -> None:
            if step == 3:
                embedding.data[119, 5] = torch.nan

        return poison

    poisoned(change=poison_row)
    text = r"step 8 could not be saved: weight.embedding\[119, 5\] is not finite; .* last of 3"
    with pytest.raises(CheckpointError, match=text):
        train(config_of(folder), world)
    assert steps(folder / "run") == [2]


def test_a_spike_is_what_lies_above_the_last_losses():
    generator = torch.Generator().manual_seed(1)
    losses = torch.randn(200, generator=generator, dtype=torch.float64) + 3
    detector = SpikeDetector(2.0, 16, torch.device("cpu"))
    taken: list[float] = []
    spikes = 0
    for loss in losses:
        window = taken[-16:]
        mean = sum(window) / max(len(window), 1)
        deviation = (sum((x - mean) ** 2 for x in window) / 15) ** 0.5
        expected = len(window) == 16 and loss.item() > mean + 2 * deviation
        is_not_spike = detector.is_not_spike(loss)
        assert is_not_spike.item() is not expected
        detector.record(loss, is_not_spike)
        if is_not_spike:
            taken.append(loss.item())
        spikes += expected
    assert 2 < spikes < 40
    for window in (16, 4, 20):  # also for a run that continues with another weight
        again = SpikeDetector(2.0, window, torch.device("cpu"))
        again.restore(detector.losses.tolist())
        assert again.losses[-16:].tolist() == taken[-min(window, 16) :]
        assert again.losses[:-16].isnan().all()
    assert SpikeDetector(None, 16, torch.device("cpu")).is_not_spike(torch.tensor(torch.inf))


def test_a_spike_is_skipped_the_same_after_a_resume(folder, world):
    keys = {"spikes__deviations": 0.3, "spikes__window": 2, "train__max_skipped_steps": 5}
    keys |= {"validation__interval": 1, "train__steps": 6}  # every start ends with one
    # Nothing is learned, so losses fluctuate.
    keys |= {f"optimizer__{group}__lr": 1e-9 for group in ("matrix", "embedding", "head", "scalar")}
    train(config_of(folder, **keys, run__dir=folder / "whole"), world)
    for stop in (3, 5, 6):
        train(config_of(folder, **keys, train__exit_step=stop), world)
    lines = metrics_of(folder / "run")
    assert lines[-1]["optim/skipped_steps"] > 0
    assert lines == metrics_of(folder / "whole")
    ours, theirs = state_of(folder / "run", 6), state_of(folder / "whole", 6)
    assert same_state(ours, theirs) == []


@pytest.mark.parametrize(
    ("margin", "left", "before"), [(600, 600, 300), (600, 5000, 600), (0, 9, 0)]
)
def test_a_short_slurm_job_trains_for_half_of_its_time(
    margin, left, before, tmp_path, monkeypatch, capsys
):
    end = int(time.time()) + left
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(end))
    stops = StopRequests(
        tmp_path, StopConfig(slurm_margin_seconds=margin), first=True, interrupts=None
    )
    assert stops.deadline == pytest.approx(end - before, abs=1.5)
    assert ("is more than half of the" in capsys.readouterr().out) is (before == 300)


def test_the_end_of_a_slurm_job_stops_the_run(folder, world, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) - 10))
    keys = {"train__steps": 6}
    outcome = train(config_of(folder, **keys, stop__slurm_margin_seconds=700), world)
    assert outcome.stopped == "the SLURM time limit" and outcome.step < 6
    assert "stopped by the SLURM time limit after step" in capsys.readouterr().out
    assert checkpoints.steps(folder / "run")[-1] == outcome.step
    assert not (folder / "run" / "DONE").exists()
    monkeypatch.setenv("SLURM_JOB_END_TIME", "abc")
    assert train(config_of(folder, **keys), world).step == 6
    assert "SLURM_JOB_END_TIME is not a time in seconds: 'abc'" in capsys.readouterr().out
    for text in ("9" * 400, "9" * 5000, "\u0663"):
        monkeypatch.setenv("SLURM_JOB_END_TIME", text)
        assert StopRequests(folder, StopConfig(), first=True, interrupts=None).deadline is None
        assert "SLURM_JOB_END_TIME is not a time in seconds: " in capsys.readouterr().out
    assert (folder / "run" / "DONE").exists()


def test_a_stop_file_that_is_written_while_a_run_starts_stops_it(
    folder, world, monkeypatch, capsys
):
    """An older STOP file does not stop the run. The SLURM script does not requeue the stopped run,
    which was not saved."""
    (folder / "run").mkdir()
    (folder / "run" / "STOP").touch()
    os.utime(folder / "run" / "STOP", (time.time() - 60, time.time() - 60))
    assert train(config_of(folder, train__steps=3), world).step == 3
    assert not (folder / "run" / "STOP").exists()
    said = f"removed {folder}/run/STOP, which was created before this start\n"
    assert said in capsys.readouterr().out

    def built(*arguments: Any, **options: Any) -> Any:
        (folder / "run" / "STOP").touch()
        return build_trainer(*arguments, **options)

    monkeypatch.setattr("training.run.build_trainer", built)
    outcome = train(config_of(folder, checkpoint__interval=0), world, resume="none")
    assert outcome.stopped == "a STOP file" and outcome.step < 10
    script = (ROOT / "scripts" / "slurm" / "pretrain.sbatch").read_text()
    (text,) = re.findall(r'\*"(.*not saved.*)"\*', script)
    assert text in capsys.readouterr().out
    assert not (folder / "run" / "STOP").exists()


@pytest.mark.parametrize(("before", "reason"), [(signal.SIG_DFL, 3), (signal.SIG_IGN, 0)])
def test_a_closed_terminal_stops_a_run_but_under_nohup(before, reason, tmp_path):
    ours = signal.signal(signal.SIGHUP, before)
    with StopRequests(tmp_path, StopConfig(), first=True, interrupts=None) as requests:
        os.kill(os.getpid(), signal.SIGHUP)
        assert requests.wanted() == reason
    signal.signal(signal.SIGHUP, ours)


def test_a_stop_is_obeyed_where_every_step_is_saved(folder, world, capsys):
    """Waiting for a save drops the pending exchange of stop requests. With `--resume 1` again, the
    run would repeat the steps after step 1."""

    def stop(step: int, result: StepResult) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    config = config_of(folder, checkpoint__interval=1)
    for resume, advice in (("latest", "the same command"), ("1", "the command without --resume")):
        outcome = train(config, world, on_step=stop, resume=resume)
        assert outcome.stopped == "a signal" and 3 <= outcome.step < 10
        assert f"; rerun {advice} to resume\n" in capsys.readouterr().out


def test_a_stop_is_obeyed_in_the_middle_of_an_evaluation(folder, world):
    """The evaluation is interrupted, and the next start repeats it."""
    keys = {"validation__interval": 3, "validation__samples": 40, "train__steps": 5}
    keys |= {"monitors__interval": 1, "monitors__groups": "[weights]"}
    train(config_of(folder, **keys, run__dir=folder / "whole"), world)
    config = config_of(folder, **keys)
    calls: list[int] = []

    def stop(step: int, result: StepResult) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        calls.append(step)

    outcome = train(config, world, on_step=stop)
    assert outcome.stopped == "a signal" and outcome.step == 3
    assert [line["step"] for line in metrics_of(folder / "run")] == [1, 2]
    assert read_checkpoint(folder / "run").meta["progress"]["unreported"]
    assert verify([str(folder / "run")]) == 0  # no step is missing
    train(config, world)
    assert metrics_of(folder / "run") == metrics_of(folder / "whole")
    run, whole = (json_lines(folder / name / "monitors.jsonl") for name in ("run", "whole"))
    assert run == whole and [line["step"] for line in run] == [1, 2, 3, 4, 5]
    assert read_checkpoint(folder / "run").meta["progress"]["unreported"] == {}


def test_latest_that_cannot_be_replaced_ends_no_run(folder, world, capsys):
    """The checkpoint itself is complete, and the run resumes from it."""
    keys = {"train__steps": 4}
    train(config_of(folder, **keys, train__exit_step=2), world)
    latest = folder / "run" / "checkpoints" / "latest"

    def obstruct(step: int, result: StepResult) -> None:
        latest.unlink()
        latest.mkdir()
        (latest / "in the way").touch()

    assert train(config_of(folder, **keys, train__exit_step=3), world, on_step=obstruct).step == 3
    said = capsys.readouterr().out
    assert "warning: " in said and "step_00000003 is saved, but latest is not updated: " in said
    shutil.rmtree(latest)
    assert train(config_of(folder, **keys), world).step == 4
    assert latest.read_text() == "step_00000004\n"


def test_checkpoints_that_cannot_be_removed_end_no_run(folder, world, monkeypatch, capsys):
    """A later save removes these checkpoints, including partially removed ones."""

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    keys = {"checkpoint__interval": 1, "checkpoint__keep_last": 1, "train__steps": 4}
    with monkeypatch.context() as patch:
        patch.setattr("training.checkpoint.checkpoints.delete", refuse)
        assert train(config_of(folder, **keys, train__exit_step=3), world).step == 3
    said = capsys.readouterr().out
    assert said.count("warning: older checkpoints are not removed: Permission denied: ") == 1
    assert train(config_of(folder, **keys), world).step == 4
    assert steps(folder / "run") == [4]
    assert not list((folder / "run" / "checkpoints").glob(".*"))


def test_one_folder_that_cannot_be_removed_keeps_no_other(folder, world, monkeypatch, capsys):
    keys = {"checkpoint__interval": 1, "checkpoint__keep_last": 1, "train__steps": 5}
    delete = checkpoints.delete

    def refuse_the_first(path: Path) -> None:
        if "step_00000001" in path.name:
            raise OSError(39, "Directory not empty", str(path))
        delete(path)

    monkeypatch.setattr(checkpoints, "delete", refuse_the_first)
    assert train(config_of(folder, **keys, train__exit_step=4), world).step == 4
    assert train(config_of(folder, **keys), world).step == 5
    said = capsys.readouterr().out
    assert said.count("warning: older checkpoints are not removed: Directory not empty: ") == 2
    (left,) = (folder / "run" / "checkpoints").glob(".*")
    assert f"warning: {left} is not removed: Directory not empty" in said
    assert steps(folder / "run") == [5]


def test_saves_that_are_slower_than_their_interval_are_whole(folder, world, monkeypatch) -> None:
    sync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (time.sleep(0.05), sync(file)))
    train(config_of(folder, checkpoint__interval=1, train__steps=4), world)
    saved = [read_checkpoint(checkpoints.step_folder(folder / "run", step)) for step in range(1, 5)]
    assert [text for info in saved for text in checkpoints.problems(info)] == []


TAKE = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_a_run_whose_folder_another_has_taken_saves_no_more(folder, world) -> None:
    """The run's lock file was removed by hand, and another run created a new lock file."""
    lock, taken = folder / "run" / "lock", []

    def take(step: int, result: StepResult) -> None:
        done = subprocess.run([sys.executable, "-c", TAKE, lock], capture_output=True)
        taken.append(done.returncode == 0)
        if step == 3:
            lock.unlink()
            lock.touch()

    config = config_of(folder, checkpoint__interval=2, train__steps=6)
    with pytest.raises(FolderError, match="is in use by another run, because the lock file"):
        train(config, world, on_step=take)
    assert checkpoints.steps(folder / "run") == [2]
    assert taken == [False, False, False, True]


@pytest.mark.parametrize("name", ["lock", ".heartbeat.json", "stacks", "checkpoints"])
def test_a_run_folder_whose_files_are_elsewhere_is_refused(name, folder) -> None:
    kept = folder / "kept"
    kept.write_text("precious")
    (folder / "run").mkdir()
    (folder / "run" / name).symlink_to(kept)
    with (
        pytest.raises(
            FolderError, match=f"must contain only files and folders, but {name} is a link"
        ),
        locked(folder / "run"),
    ):
        pass
    assert kept.read_text() == "precious"
    (folder / "run" / name).unlink()
    os.mkfifo(folder / "run" / name)
    with pytest.raises(FolderError, match=f"{name} is a link or"), locked(folder / "run"):
        pass
