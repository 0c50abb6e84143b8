"""Kill random ranks of a run that torchrun restarts, and compare it with one that nothing disturbs.

    python scripts/bench/restart.py --kills 50 --output benchmarks/results/restart.json

A tiny Llama on made tokens trains on two gloo ranks under `torchrun --max-restarts`, with a
checkpoint after every few steps. Per kill: `gone`, the seconds until the other rank has ended too,
`repaired`, those until the first step that was new, and `repeated`, the steps that were taken
again. In the end weights, optimizer state and metrics must be those of the undisturbed run, to the
bit.
"""

import argparse
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.record import record, write_json
from scripts.command import command, whole_number
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
    batch: int = 4,
    exit_step: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a run in `folder`; what it prints is in a file beside it."""
    sizes = {"layers": 2, "hidden": 64, "ffn": 96, "heads": 4, "kv_heads": 2, "vocab_size": 256}
    changes = [f"model.{name}={size}" for name, size in sizes.items()]
    changes += [f"train.steps={steps}", f"train.global_batch={batch}", "train.micro_batch=2"]
    changes += ["train.sequence_length=32", "schedule.warmup_steps=4", "data.mock=true"]
    changes += [f"checkpoint.interval={interval}", "checkpoint.keep_last=2", "log.interval=1"]
    changes += ["validation.interval=0", "validation.samples=4", f"run.dir={folder}"]
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


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=whole_number(), default=50)
    parser.add_argument("--minutes", type=float, default=math.inf, help="kill no longer than this")
    parser.add_argument(
        "--interval", type=whole_number(), default=2, help="steps between checkpoints"
    )
    parser.add_argument(
        "--batch", type=whole_number(), default=4, help="samples of a step, four at a time"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and ranks")
    parser.add_argument("--output", type=Path)
    return parser.parse_args(arguments)


def killed_run(options: argparse.Namespace) -> dict[str, Any]:
    """Kill ranks of a run and compare it with an undisturbed one, and return the figures."""
    chance = random.Random(options.seed)
    kills: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as name:
        killed, whole = Path(name) / "killed", Path(name) / "whole"
        # Enough steps that the run does not end before the last kill.
        steps = max(40, 2 * options.interval) * options.kills
        begin = partial(start, steps=steps, interval=options.interval, batch=options.batch)
        with begin(killed, restarts=options.kills) as agent:
            end_of_kills = time.monotonic() + 60 * options.minutes
            while len(kills) < options.kills and (time.monotonic() < end_of_kills or not kills):
                kills.append(kill_one(agent, killed, chance, options.interval))
                print(kills[-1], flush=True)
            (killed / "STOP").touch()
            agent.wait(PATIENCE)
        end = last_step(killed)
        with begin(whole, restarts=0, exit_step=end) as agent:
            if agent.wait(60 + 10 * PATIENCE):
                raise RuntimeError(f"the undisturbed run has ended with {agent.returncode}")
        different = differences(killed, whole, end)
    figures = {
        name: {
            "median": round(statistics.median(each[name] for each in kills), 2),
            "largest": round(max(each[name] for each in kills), 2),
        }
        for name in ("gone", "repaired", "repeated")
    }
    return {
        "ranks": RANKS,
        "interval": options.interval,
        "batch": options.batch,
        "steps": end,
        "figures": figures,
        "different": different,
        "kills": kills,
    }


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write what became of each kill; 1 if a run differs from the undisturbed one."""
    options = parse(arguments)
    run = killed_run(options)
    print(
        f"{len(run['kills'])} kills, {run['steps']} steps: {run['figures']}; "
        f"different from undisturbed: {run['different']}"
    )
    write_json(
        options.output, record("scripts/bench/restart.py", arguments, torch.device("cpu"), run)
    )
    return int(bool(run["different"]))


if __name__ == "__main__":
    sys.exit(main())
