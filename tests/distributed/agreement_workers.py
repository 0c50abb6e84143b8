"""Functions that the ranks run in the agreement tests."""

import os
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch

import pretrain
from parallel.comm import groups as process_groups
from parallel.comm.collectives import CollectiveError
from tests.run_configs import read_config
from training import command_line
from training.run import train
from training.step import StepResult, Trainer


def started(config: str, overrides: list[list[str]]) -> tuple[int, str]:
    """Return the exit code and the errors of pretrain.py with this rank's overrides. Other ranks
    wait only briefly for this rank, because no torchrun stops them."""
    said = StringIO()
    mine = overrides[int(os.environ["RANK"])]
    with redirect_stderr(said), patch.object(command_line, "PATIENCE", 0.5):
        code = pretrain.main(["--config", config, *mine])
    return code, said.getvalue()


def each_started(config: str, overrides: list[list[list[str]]]) -> list[tuple[int, str]]:
    """Return the result of `started` for each entry of `overrides`."""
    return [started(config, each) for each in overrides]


def on_own_data(config: str, folders: list[str], name: str) -> list[tuple[int, str]]:
    """Return the result of `started` in each folder. Each rank reads its own copy of the token set
    `name`, without verification."""
    said = []
    for folder in folders:
        os.chdir(f"{folder}/{os.environ['RANK']}")
        given = [f"data.{kind}.walk.path={name}" for kind in ("train", "validation")]
        given.append("data.verify=none")
        said.append(started(config, [given, given]))
    return said


def ended(config: str, overrides: list[list[str]]) -> None:
    """End this rank as pretrain.py does."""
    mine = overrides[int(os.environ["RANK"])]
    raise SystemExit(pretrain.main(["--config", config, *mine]))


def with_a_hanging_rank(folder: str) -> str:
    """Return this rank's messages from a run in which rank 1 of 3 hangs after the second step until
    the other ranks have exited."""
    groups = process_groups.initialize(timeout_seconds=60)
    config = read_config(folder, log__interval=1, train__global_batch=6)
    ended = [Path(folder) / f"ended {rank}" for rank in (0, 2)]

    def hang(step: int, result: StepResult) -> None:
        if step == 2 and groups.rank == 1:
            while not all(file.exists() for file in ended):
                time.sleep(0.1)

    try:
        train(config, groups, on_step=hang)
    except CollectiveError as error:
        (Path(folder) / f"ended {groups.rank}").touch()
        return str(error)
    return "went on"


def with_a_failing_rank(config: str) -> tuple[int, str]:
    """Return the result of `started` for a run in which rank 1 raises an error in its second
    step."""
    real = Trainer.step

    def step(trainer: Trainer, index: int) -> StepResult:
        if index == 1 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("as on a GPU that is full")
        return real(trainer, index)

    Trainer.step = step  # type: ignore[method-assign]
    return started(config, [[], []])
