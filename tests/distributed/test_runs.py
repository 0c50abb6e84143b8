"""Whole runs on several ranks that are stopped or killed, and resume on the same or another
layout."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm import groups as process_groups
from scripts.average import main as average
from tests.distributed.run_workers import PREEMPTIONS
from tests.launch import ROOT, environment, run_on_ranks
from tests.run_configs import read_config, tiny_config
from tests.run_results import metrics_of, same_state, state_of, tensors_of
from tests.saved_state import save_state
from tests.slow_cases import slow_but
from training.build import build_trainer, restore
from training.checkpoint.checkpoints import read_checkpoint, step_folder, steps
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.data.build_data import build_data
from training.run import train

WORKERS = "tests.distributed.run_workers"
KEYS: dict[str, Any] = {
    "checkpoint__interval": 1,
    "checkpoint__keep_last": "null",
    "log__interval": 1,
    "train__steps": 5,
    "train__batch_ramp": "[{batch: 4, until_steps: 2}]",
    "data__phases": "[{after_steps: 2, weights: {walk: 1}}]",
    "train__exit_step": 4,
    "validation__samples": 4,
}
LAYOUTS: list[dict[str, int]] = [{}, {"tensor": 2}]

# float32: sums over ranks have another order.
LOSS_TOLERANCE = 1e-5

pytestmark = pytest.mark.timeout(1200)


def single(folder: Path, name: str, **keys: Any) -> list[float]:
    """Train the run FOLDER/NAME in this process, and return its losses."""
    world = process_groups.initialize()
    try:
        config = read_config(str(folder), **{**KEYS, **keys}, run__dir=f"{folder}/{name}")
        train(config, world)
    finally:
        process_groups.shutdown()
    return [line["train/loss"] for line in metrics_of(folder / name)]


def loaded_by_one(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the state of this process after it has loaded step 4 of FOLDER/NAME."""
    world = process_groups.initialize()
    try:
        config = read_config(str(folder), **KEYS, run__dir=f"{folder}/{name}")
        trainer = build_trainer(config, world, *build_data(config))
        restore(trainer, read_checkpoint(step_folder(folder / name, 4)))
        save_state(folder / f"{name} back" / "state", trainer.model, trainer.optimizer)
    finally:
        process_groups.shutdown()
    return tensors_of(CheckpointInfo(folder / f"{name} back", {}, ""))


@pytest.fixture(scope="module")
def folder(shared_folder) -> Path:
    """A folder with the token set, the config, and the runs on two ranks."""
    folder = shared_folder
    tiny_config(str(folder), "spectral_sphere")
    single(folder, "one", train__exit_step=2)
    single(folder, "one whole", train__exit_step=5)
    arguments = {"folder": str(folder), "layouts": LAYOUTS, "keys": KEYS}
    said = run_on_ranks(2, WORKERS, "runs", arguments, timeout=1000)
    for rank, (stacks, *differences) in enumerate(said):
        (folder / f"said {rank}.txt").write_text(stacks)
        (folder / f"differences {rank}.txt").write_text("\n".join(differences))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_run_goes_on_another_layout_and_back(layout, folder):
    name = f"ranks2{''.join(f' {k}{v}' for k, v in layout.items())}"
    loaded = tensors_of(CheckpointInfo(folder / f"{name} loaded", {}, ""))
    assert same_state(loaded, state_of(folder / "one", 2)) == []
    assert same_state(loaded_by_one(folder, name), state_of(folder / name, 4)) == []
    whole = [line["train/loss"] for line in metrics_of(folder / "one whole")]
    back = single(folder, name, train__exit_step=5)
    assert len(back) == len(whole) == 5
    assert back == pytest.approx(whole, abs=LOSS_TOLERANCE)
    used = [read_checkpoint(step_folder(folder / name, step)).meta["layout"] for step in (3, 5)]
    one = {"tensor": 1, "pipeline": 1}
    assert used[0] | {"ranks": 2, **one, **layout} == used[0]
    assert used[1] | {"ranks": 1, **one} == used[1]


def test_an_average_takes_checkpoints_of_several_layouts(folder, tmp_path):
    """Step 2 was saved by one process, and step 4 by two ranks that share every matrix."""
    run, mean = folder / "ranks2 tensor2", tmp_path / "mean"
    assert average([str(run), str(mean), "--steps", "2", "4"]) == 0
    first, second = state_of(run, 2), state_of(run, 4)
    for key, value in tensors_of(read_checkpoint(mean), "weight/").items():
        by_hand = (first[key].double() + second[key].double()) / 2
        # One rounding to float32.
        torch.testing.assert_close(value.double(), by_hand, rtol=2**-23, atol=1e-12)


def test_twice_resumed_on_two_ranks_is_never_stopped(folder):
    lines, whole = (metrics_of(folder / f"resumed {kind}") for kind in ("twice", "whole"))
    assert lines == whole and len(whole) == 3 and "pc/domain/outside" in whole[-1]
    states = [state_of(folder / f"resumed {kind}", 3) for kind in ("twice", "whole")]
    assert same_state(*states) == []


def test_copies_that_differ_after_a_load_are_named(folder):
    for rank in range(2):
        said = (folder / f"differences {rank}.txt").read_text().splitlines()
        assert len(said) == len(LAYOUTS)
        for line in said:
            name, text = line.split(": ", 1)
            assert text == f"copies of weights differ between ranks: {name}"


def test_preemptions_change_nothing(folder):
    reasons = (folder / "reasons.txt").read_text().splitlines()
    assert len(reasons) == PREEMPTIONS
    assert set(reasons) == {"a signal", "a STOP file"}
    assert metrics_of(folder / "preempted") == metrics_of(folder / "whole")
    assert same_state(state_of(folder / "preempted", 8), state_of(folder / "whole", 8)) == []


def test_a_hang_leaves_the_stacks_of_all_ranks(folder):
    said = [(folder / f"said {rank}.txt").read_text() for rank in range(2)]
    assert all("most recent call first" in text for text in said)
    assert "stand_still" in said[1]
    assert metrics_of(folder / "hang")[-1]["step"] == 4  # it continued


@pytest.mark.parametrize("what", slow_but(["writer"], ["rank", "writer", "all ranks"]))
def test_killed_while_saving(what, folder):
    arguments = {"folder": str(folder), "what": what, "keys": KEYS}
    with pytest.raises(AssertionError) as failed:
        run_on_ranks(2, WORKERS, "killed", arguments, timeout=600)
    if what == "writer":
        said = str(failed.value)
        assert (
            "step 3 could not be saved: the checkpoint writer of rank 1 failed: it was killed"
            in said
        )
    assert max(steps(folder / what)) == 2
    before = metrics_of(folder / what)[:2]
    losses = single(folder, what)
    assert losses[:2] == [line["train/loss"] for line in before]
    whole = [line["train/loss"] for line in metrics_of(folder / "one whole")]
    assert losses == pytest.approx(whole[:4], abs=LOSS_TOLERANCE)
    assert steps(folder / what) == [1, 2, 3, 4]


def test_two_runs_in_one_folder(folder):
    """The second run reports that the first run uses the folder, and changes nothing."""
    run_dir = folder / "held"
    holder = (
        "import sys, time; from training.lifecycle.run_folder import locked\n"
        "with locked(sys.argv[1]): print('held', flush=True); time.sleep(3600)"
    )
    command = [sys.executable, "-c", holder, str(run_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        with pytest.raises(Exception, match=f'in use by another run: .*"pid": {process.pid}'):
            single(folder, "held")
        assert not (run_dir / "checkpoints").exists()
        process.kill()
    assert len(single(folder, "held")) == 4  # the lock has ended with its process
