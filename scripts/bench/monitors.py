"""What a step that monitors look at costs, against those it is between.

    python scripts/bench/monitors.py --config configs/tiny_sso.yaml
    torchrun --nproc-per-node 2 scripts/bench/monitors.py --config configs/tiny_sso.yaml

Steps that are looked at and steps that are not are taken in turn, within one run, so that what else
the machine does weighs on both. Prints their median times (ms), the extra of a step that is looked
at in steps, and so the share of the run's time at the config's `monitors.interval`.
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

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from parallel.groups import initialize, shutdown  # noqa: E402
from training.config import check, load_config  # noqa: E402
from training.run import build_data, build_trainer, with_vocabulary  # noqa: E402


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, help="the run's config")
    parser.add_argument("--pairs", type=int, default=5, help="steps of each kind")
    parser.add_argument("override", nargs="*", help="section.key=value")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code."""
    options = parse(arguments)
    config = with_vocabulary(load_config(options.config, options.override))
    usual = config.monitors.interval
    # The step before one that is looked at keeps what that one compares, so it counts as well:
    # of four steps, one is looked at, one keeps, two are as without monitors.
    config = replace(config, monitors=replace(config.monitors, interval=4))
    with tempfile.TemporaryDirectory() as folder:
        config = replace(config, run=replace(config.run, dir=folder))
        layout = config.parallel
        groups = initialize(
            tensor=layout.tensor, pipeline=layout.pipeline,
            virtual_pipeline=layout.virtual_pipeline, context=layout.context, expert=layout.expert,
        )  # fmt: skip
        check(config, torch.distributed.get_world_size())
        trainer = build_trainer(config, groups, *build_data(config))
        times: list[list[float]] = [[], [], [], []]
        for step in range(1, 4 * (options.pairs + 1) + 1):
            began = time.perf_counter()
            trainer.advance()
            if groups.device.type == "cuda":
                torch.cuda.synchronize()
            if step > 4:  # the first ones allocate
                times[step % 4].append(time.perf_counter() - began)
        if groups.rank == 0:
            print_costs(times, usual)
        shutdown()
    return 0


def print_costs(times: Sequence[Sequence[float]], interval: int) -> None:
    """None; `times[k]` are those of steps whose number is k modulo 4: 0 is looked at, 3 precedes
    it."""
    looked, before = statistics.median(times[0]), statistics.median(times[3])
    plain = statistics.median([*times[1], *times[2]])
    extra = (looked - plain) + (before - plain)
    print(f"step {1000 * plain:.1f} ms, looked at {1000 * looked:.1f}, before {1000 * before:.1f}")
    print(f"extra {extra / plain:.2f} steps per look", end="")
    print(f", {100 * extra / plain / interval:.2f}% at interval {interval}" if interval else "")


if __name__ == "__main__":
    sys.exit(main())
