"""Measure what a monitored step costs, compared with the steps around it.

    python scripts/bench/monitors.py --config configs/tiny_sso.yaml
    torchrun --nproc-per-node 2 scripts/bench/monitors.py --config configs/tiny_sso.yaml

Monitored steps and others alternate within one run, so that other work on the machine affects both
alike. Prints their median times (ms), the extra time of a monitored step in steps, and what share
of the run's time that is at the config's `monitors.interval`. Times on a CPU are processor time
over all ranks, on a GPU wall time.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from parallel.comm.collectives import from_all
from parallel.comm.groups import shutdown
from scripts.bench.timing import now
from scripts.bench.trainer import new_trainer, start
from scripts.command import add_config, command
from training.build import with_vocabulary
from training.config import Config, load_config

PLAIN = 2
"""Steps per period on which monitors have no effect."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    parser.add_argument(
        "--repeats", type=int, default=3, help="monitored steps to measure (default: 3)"
    )
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the result on rank 0."""
    options = parse(arguments)
    config = with_vocabulary(load_config(options.config, options.overrides))
    usual = config.monitors.interval
    period = PLAIN + affected_steps(config)
    config = replace(config, monitors=replace(config.monitors, interval=period))
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, run=replace(config.run, dir=folder))
        groups = start(config)
        trainer = new_trainer(config, groups)
        times: list[list[float]] = [[] for _ in range(period)]
        for step in range(1, period * (options.repeats + 1) + 1):
            began = now(groups.device)
            trainer.advance()
            passed = sum(from_all(now(groups.device) - began))
            if step > period:  # the first ones allocate
                times[step % period].append(passed)
        if groups.rank == 0:
            print_costs(times, usual)
        shutdown()
    return 0


def affected_steps(config: Config) -> int:
    """How many steps a monitored step makes slower: itself, and those before it whose weights or
    gradients are kept for comparison."""
    samples = config.monitors.noise_samples
    return max(2, samples if "noise" in config.monitors.groups else 0)


def print_costs(times: Sequence[Sequence[float]], interval: int) -> None:
    """Print what a monitored step costs.

    `times[k]` are seconds of steps whose number is k modulo `len(times)`: 0 is the monitored step,
    1 and 2 are plain, the others are affected.
    """
    medians = [statistics.median(each) for each in times]
    plain = statistics.median([time for each in times[1 : PLAIN + 1] for time in each])
    extra = sum(median - plain for median in (medians[0], *medians[PLAIN + 1 :]))
    before = statistics.median(medians[PLAIN + 1 :])
    print(
        f"plain step {1000 * plain:.0f} ms, monitored {1000 * medians[0]:.0f}, "
        f"before it {1000 * before:.0f}"
    )
    print(f"extra {extra / plain:.2f} steps per monitored step", end="")
    print(f", {100 * extra / plain / interval:.2f}% at interval {interval}" if interval else "")


if __name__ == "__main__":
    sys.exit(main())
