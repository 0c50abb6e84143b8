"""Kill the ranks of a run at random times, and compare the run with an undisturbed one."""

import os
import random
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import pretrain
from tests.launch import FORKS, run_on_ranks, start_forks
from tests.paths import ROOT
from tests.run_results import metrics_of, same_state, state_of

RANKS = 2
CONFIG = "configs/tiny_sso.yaml"
PATIENCE = 500.0
"""Time limit for any operation, in seconds. It is below the 600 seconds that surviving ranks would
wait."""


SMALL = [
    "model.layers=2", "model.hidden=64", "model.ffn=96", "model.heads=4", "model.kv_heads=2",
    "model.vocab_size=256", "train.global_batch=4", "train.micro_batch=2",
    "train.sequence_length=32", "schedule.warmup_steps=4", "data.mock=true",
    "checkpoint.keep_last=2", "log.interval=1", "validation.interval=0", "validation.samples=4",
    "validation.samples_interval=0",
]  # fmt: skip
"""Overrides that turn a recipe into a run of many short steps."""


def settings(folder: Path, steps: int, interval: int) -> list[str]:
    """Return the pretrain.py arguments for a run in `folder`."""
    changes = [f"train.steps={steps}", f"checkpoint.interval={interval}"]
    return [CONFIG, *SMALL, *changes, f"run.dir={folder}"]


def start(arguments: list[str], output: Path, restarts: int, *, forks: bool) -> BaseProcess:
    """Start a run under torchrun, writing its output to a file. For `forks`, see `torchrun`."""
    words = [
        "--standalone",
        f"--nproc-per-node={RANKS}",
        f"--max-restarts={restarts}",
        "--monitor-interval=0.1",
        "pretrain.py",
        "--config",
        *arguments,
    ]
    start_forks()
    agent = FORKS.Process(target=torchrun, args=(words, str(output), forks))
    agent.start()
    return agent


def torchrun(words: list[str], output: str, forks: bool) -> None:
    """Run torchrun's command line. Ranks are separate programs or, to save imports, forks of this
    process."""
    log = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(ROOT)
    if forks:
        run.elastic_launch = forking
    run.main(words)


def forking(config: LaunchConfig, entrypoint: str) -> Callable[..., Any]:
    """Return torchrun's launcher for a command, using forks of this process as ranks."""
    config.start_method = "fork"
    return lambda *command: elastic_launch(config, rank)(command[command.index("--config") :])


def rank(arguments: list[str]) -> None:
    """Run pretrain.py on a forked rank."""
    sys.exit(pretrain.main(arguments))


def ranks_of(agent: BaseProcess) -> list[psutil.Process]:
    """Return the ranks of a torchrun agent, which are its only children."""
    return psutil.Process(agent.pid).children()


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return sum(line.endswith(b"\n") and b'"train/loss"' in line for line in lines)


def wait_for(condition: Callable[[], bool], what: str, agent: BaseProcess) -> None:
    """Wait until `condition()` is true.

    Raises RuntimeError if the run ends first or `PATIENCE` runs out.
    """
    end = time.monotonic() + PATIENCE
    while not condition():
        if not agent.is_alive():
            raise RuntimeError(f"{what}: the run exited with {agent.exitcode}")
        if time.monotonic() > end:
            agent.terminate()
            raise RuntimeError(f"{what}: not after {PATIENCE:g} s")
        time.sleep(0.01)


def kill_one(agent: BaseProcess, folder: Path, chance: random.Random, interval: int) -> int:
    """Kill a rank at a random time within the next `interval` steps, wait until the run continues,
    and return the last step before the kill."""
    past = last_step(folder) + chance.randrange(interval)
    wait_for(lambda: last_step(folder) > past and len(ranks_of(agent)) == RANKS, "a step", agent)
    time.sleep(chance.random() * 0.5)
    ranks = ranks_of(agent)
    step = last_step(folder)
    chance.choice(ranks).kill()
    _, left = psutil.wait_procs(ranks, timeout=PATIENCE)
    assert not left, "survivors have not ended"
    wait_for(lambda: last_step(folder) > step, "a new step", agent)
    return step


def differences(one: Path, other: Path, step: int) -> list[str]:
    """Return the names of everything that differs between two runs, apart from times."""
    found = same_state(*(state_of(run, step) for run in (one, other)))
    lines = [[trained(line) for line in metrics_of(run)] for run in (one, other)]
    return found + (["metrics.jsonl"] if lines[0] != lines[1] else [])


def trained(line: dict[str, Any]) -> dict[str, Any]:
    """Drop validation metrics, because only one of the runs is stopped and then validates."""
    return {key: value for key, value in line.items() if not key.startswith("val/")}


def killed_run(
    folder: Path, kills: int, *, forks: bool, interval: int = 2
) -> tuple[list[str], list[int], int]:
    """Kill ranks of a run that saves every `interval` steps. For `forks`, see `torchrun`.

    Returns the differences from an undisturbed run, the step before each kill, and the last step.
    """
    chance = random.Random(0)
    killed, whole = folder / "killed", folder / "whole"
    # Enough steps for the run to outlast the last kill.
    steps = 40 * kills
    agent = start(settings(killed, steps, interval), folder / "killed.txt", kills, forks=forks)
    try:
        found = [kill_one(agent, killed, chance, interval) for _ in range(kills)]
        (killed / "STOP").touch()
        agent.join(PATIENCE)
        if agent.is_alive():
            raise RuntimeError(f"STOP: not after {PATIENCE:g} s")
    finally:
        agent.terminate()
        agent.join()
    end = last_step(killed)
    config, *changes = [*settings(whole, steps, interval), f"train.exit_step={end}"]
    arguments = {"config": config, "overrides": [changes] * RANKS}
    ended = run_on_ranks(RANKS, "tests.distributed.agreement_workers", "started", arguments)
    assert [code for code, _ in ended] == [0] * RANKS, ended
    return differences(killed, whole, end), found, end
