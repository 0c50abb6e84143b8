"""A rehearsal, from the config to the report of all rehearsed ranks."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from parallel.plan.devices import Device
from training.config import Config, check
from training.data.build_data import on_mock_tokens
from training.dry_run import device_named, plan_run
from training.errors import ConfigError
from training.rehearsal.fake_driver import GuardError
from training.rehearsal.matching import mismatches
from training.rehearsal.processes import perform
from training.rehearsal.rank import Job, with_known_kernels
from training.rehearsal.verdict import Report, combined, described


def rehearse(
    config: Config,
    world: int,
    device: Device,
    *,
    ranks: Sequence[int] | None = None,
    compiled: bool = False,
) -> Report:
    """Rehearse `config` on `world` simulated GPUs of one kind.

    If `ranks` is None, the first rank of each pipeline stage is rehearsed. If all ranks are
    rehearsed, their collectives are compared. If `compiled` is true, Triton kernels are compiled.
    Raises GuardError if this machine cannot rehearse, RehearsalError if a process ended without a
    report."""
    ranks = chosen(config, None, world) if ranks is None else ranks
    planned = plan_run(with_known_kernels(config), world, device)
    reports = perform([Job(config, world, rank, device, compiled) for rank in ranks])
    whole = len(ranks) == world and all(each.error is None for each in reports)
    different = mismatches({each.rank: each.calls for each in reports}) if whole else []
    report = combined(reports, world, device, different)
    report.planned_memory_bytes = planned.memory.total
    report.planned_seconds = planned.time.total
    if report.modelled_seconds:
        report.mfu = planned.model_flops / (report.modelled_seconds * planned.peak_flops)
    return report


def run(config: Config, options: argparse.Namespace) -> int:
    """Rehearse, print the report and write it as JSON; return exit code 0 if the run would succeed,
    else 1.

    Raises ConfigError if the config, number of GPUs, rank or device is not valid, or if the machine
    cannot rehearse.
    """
    config = on_mock_tokens(config)
    check(config, options.gpus)
    ranks = chosen(config, options.rank, options.gpus)
    device = device_named(options.device or config.plan.device)
    some = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    some = f"ranks {some}" if len(ranks) > 1 else f"rank {some}"
    print(f"rehearsing {some} of {options.gpus:,} on {device.name}", file=sys.stderr)
    try:
        report = rehearse(
            config, options.gpus, device, ranks=ranks, compiled=options.compile_kernels
        )
    except GuardError as error:
        raise ConfigError(str(error)) from error
    print(described(report))
    if options.json is not None:
        Path(options.json).write_text(
            json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8"
        )
    return 0 if report.ok else 1


def chosen(config: Config, rank: int | None, world: int) -> list[int]:
    """Return the ranks to rehearse: `rank`, all ranks for -1, the first rank of each pipeline stage
    for None."""
    if rank is None:  # the pipeline is the outermost axis of Megatron's ranks
        return list(range(0, world, world // config.parallel.pipeline))
    if rank >= world:
        raise ConfigError(f"--rank must be below --gpus {world}, got {rank}")
    return list(range(world)) if rank < 0 else [rank]
