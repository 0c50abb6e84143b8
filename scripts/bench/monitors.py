"""What a step that monitors look at costs, against those it is between.

    python scripts/bench/monitors.py --config configs/tiny_sso.yaml
    torchrun --nproc-per-node 2 scripts/bench/monitors.py --config configs/tiny_sso.yaml

Steps that are looked at and steps that are not are taken in turn, within one run, so that what else
the machine does weighs on both. Prints their median times (ms), the extra of a look in steps, and
so the share of the run's time at the config's `monitors.interval`. On a CPU times are those of the
processor, over all ranks; on a GPU those of the clock.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

PLAIN = 2
"""Steps of a period that have nothing to do with the look."""

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from parallel.comm.groups import Groups, initialize, shutdown  # noqa: E402
from training.build import build_data, build_trainer, with_vocabulary  # noqa: E402
from training.config import Config, check, load_config  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the run's config")
    parser.add_argument("--looks", type=int, default=3, help="looks that are timed")
    parser.add_argument("override", nargs="*", help="section.key=value")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    config = with_vocabulary(load_config(options.config, options.override))
    usual = config.monitors.interval
    period = PLAIN + kept_steps(config)
    config = replace(config, monitors=replace(config.monitors, interval=period))
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, run=replace(config.run, dir=folder))
        layout = config.parallel
        groups = initialize(
            tensor=layout.tensor, pipeline=layout.pipeline,
            virtual_pipeline=layout.virtual_pipeline, context=layout.context, expert=layout.expert,
        )  # fmt: skip
        check(config, torch.distributed.get_world_size())
        trainer = build_trainer(config, groups, *build_data(config))
        times: list[list[float]] = [[] for _ in range(period)]
        for step in range(1, period * (options.looks + 1) + 1):
            began = now(groups.device)
            trainer.advance()
            passed = total(now(groups.device) - began, groups)
            if step > period:  # the first ones allocate
                times[step % period].append(passed)
        if groups.rank == 0:
            print_costs(times, usual)
        shutdown()
    return 0


def kept_steps(config: Config) -> int:
    """How many steps a look weighs on: the one looked at, and those before it at whose beginning
    something is kept that it compares."""
    samples = config.monitors.noise_samples
    return max(2, samples if "noise" in config.monitors.groups else 0)


def now(device: torch.device) -> float:
    """Seconds of this process's processor time, on a GPU of the clock when its work is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def total(seconds: float, groups: Groups) -> float:
    """The seconds of all ranks."""
    found = torch.tensor(seconds, dtype=torch.float64)
    torch.distributed.all_reduce(found, group=groups.host)
    return found.item()


def print_costs(times: Sequence[Sequence[float]], interval: int) -> None:
    """None; `times[k]` are those of steps whose number is k modulo their count: 0 is looked at, 1
    and 2 are as without monitors."""
    medians = [statistics.median(each) for each in times]
    plain = statistics.median([time for each in times[1 : PLAIN + 1] for time in each])
    extra = sum(median - plain for median in (medians[0], *medians[PLAIN + 1 :]))
    before = statistics.median(medians[PLAIN + 1 :])
    print(
        f"step {1000 * plain:.0f} ms, looked at {1000 * medians[0]:.0f}, before {1000 * before:.0f}"
    )
    print(f"extra {extra / plain:.2f} steps per look", end="")
    print(f", {100 * extra / plain / interval:.2f}% at interval {interval}" if interval else "")


if __name__ == "__main__":
    sys.exit(main())
