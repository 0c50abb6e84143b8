"""Runs whose ranks are killed at random moments, and what they differ in from undisturbed ones."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.paths import ROOT
from training.checkpoint.files import read_checkpoint, step_folder
from training.report.metrics import read_metrics, without_times

RANKS = 2
CONFIG = "configs/tiny_sso.yaml"
PATIENCE = 600.0
"""Seconds for which anything may take."""


def start(
    folder: Path,
    steps: int,
    interval: int,
    restarts: int,
    *,
    exit_step: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run in `folder`; what it prints is in a file beside it."""
    sizes = {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab_size": 256}
    changes = [f"model.{name}={size}" for name, size in sizes.items()]
    changes += [f"train.steps={steps}", "train.global_batch=4", "train.micro_batch=2"]
    changes += ["train.sequence_length=32", "schedule.warmup_steps=4", "data.mock=true"]
    changes += [f"checkpoint.interval={interval}", "checkpoint.keep_last=2", "log.interval=1"]
    changes += ["validation.interval=0", "validation.samples=4", "validation.samples_interval=0"]
    changes.append(f"run.dir={folder}")
    if exit_step is not None:
        changes.append(f"train.exit_step={exit_step}")
    words = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}", "--monitor-interval=0.1",
        "pretrain.py", "--config", CONFIG, *changes,
    ]  # fmt: skip
    with (folder.parent / f"{folder.name}.txt").open("wb") as said:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def ranks_of(agent: int) -> list[int]:
    """Return the process ids of the ranks that an agent of torchrun has started."""
    found = []
    for task in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((task / "stat").read_text().rsplit(")", 1)[1].split()[1])
            words = (task / "cmdline").read_bytes().split(b"\0")
        except (OSError, IndexError):
            continue  # it has ended meanwhile
        if parent == agent and b"pretrain.py" in words:
            found.append(int(task.name))
    return sorted(found)


def last_step(folder: Path) -> int:
    """Return the last step that metrics.jsonl names."""
    file = folder / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return sum(line.endswith(b"\n") and b'"train/loss"' in line for line in lines)


def alive(process: int) -> bool:
    """Return whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool], what: str, agent: subprocess.Popen[bytes]) -> float:
    """Wait until `condition()` is true, and return the seconds that it took.

    Raises RuntimeError if the run ends before or patience does.
    """
    began = time.monotonic()
    while not condition():
        if agent.poll() is not None:
            raise RuntimeError(f"{what}: the run has ended with {agent.returncode}")
        if time.monotonic() - began > PATIENCE:
            agent.terminate()
            raise RuntimeError(f"{what}: not after {PATIENCE:g} s")
        time.sleep(0.01)
    return time.monotonic() - began


def kill_one(
    agent: subprocess.Popen[bytes], folder: Path, chance: random.Random, interval: int
) -> dict[str, float]:
    """Kill a rank at a random moment within `interval` new steps, and return what became of the
    run."""
    past = last_step(folder) + chance.randrange(interval)
    wait_for(
        lambda: last_step(folder) > past and len(ranks_of(agent.pid)) == RANKS, "a step", agent
    )
    time.sleep(chance.random() * 0.5)
    ranks = ranks_of(agent.pid)
    victim = chance.randrange(RANKS)
    step = last_step(folder)
    os.kill(ranks[victim], signal.SIGKILL)
    gone = wait_for(lambda: not any(alive(rank) for rank in ranks), "survivors", agent)
    lowest = step

    def is_new() -> bool:
        nonlocal lowest
        now = last_step(folder)
        lowest = min(lowest, now)
        return now > step

    repaired = gone + wait_for(is_new, "a new step", agent)
    found = {"rank": victim, "step": step, "gone": gone, "repaired": repaired}
    return found | {"repeated": step - lowest}


def differences(one: Path, other: Path, step: int) -> list[str]:
    """Return the names of what differs between two runs, their times aside."""
    states = [read_checkpoint(step_folder(run, step)).tensors("") for run in (one, other)]
    found = [
        name for name in states[0] | states[1]
        if name not in states[0] or name not in states[1]
        or not torch.equal(states[0][name], states[1][name])
    ]  # fmt: skip
    lines = [[trained(line) for line in read_metrics(run)] for run in (one, other)]
    return found + (["metrics.jsonl"] if lines[0] != lines[1] else [])


def trained(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of steps; only one of the runs is stopped, and validated for that."""
    return {k: v for k, v in without_times(line).items() if not k.startswith("val/")}


def killed_run(folder: Path, kills: int, *, interval: int = 2, seed: int = 0) -> dict[str, Any]:
    """Kill ranks of a run and compare it with an undisturbed one.

    `interval` is the number of steps between checkpoints.
    """
    chance = random.Random(seed)
    killed, whole = folder / "killed", folder / "whole"
    # Enough steps that the run does not end before the last kill.
    begin = partial(start, steps=max(40, 2 * interval) * kills, interval=interval)
    with begin(killed, restarts=kills) as agent:
        fates = [kill_one(agent, killed, chance, interval) for _ in range(kills)]
        (killed / "STOP").touch()
        agent.wait(PATIENCE)
    end = last_step(killed)
    with begin(whole, restarts=0, exit_step=end) as agent:
        if agent.wait(PATIENCE):
            raise RuntimeError(f"the undisturbed run has ended with {agent.returncode}")
    return {"steps": end, "different": differences(killed, whole, end), "kills": fates}
