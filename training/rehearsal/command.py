"""What `pretrain.py --rehearse` does."""

import argparse
import json
from pathlib import Path

from parallel.plan.devices import device_named
from training.build import on_mock_tokens
from training.config import Config, check
from training.errors import ConfigError
from training.rehearsal.guard import GuardError
from training.rehearsal.rehearse import rehearse
from training.rehearsal.report import described


def run(config: Config, options: argparse.Namespace) -> int:
    """Exit code: 0 if the run would not break, else 1; prints the report, and writes it as JSON.

    Raises ConfigError for a config, a number of GPUs, a rank or a device that cannot be, and for a
    machine that cannot rehearse.
    """
    config = on_mock_tokens(config)
    check(config, options.gpus)
    try:
        report = rehearse(
            config,
            options.gpus,
            device_named(options.device or config.plan.device),
            ranks=chosen(options.rank, options.gpus),
            compiled=options.compile_kernels,
        )
    except (GuardError, ValueError) as error:
        raise ConfigError(str(error)) from error
    print(described(report))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(report.as_dict(), indent=2) + "\n")
    return 0 if report.ok else 1


def chosen(rank: int | None, world: int) -> list[int] | None:
    """The ranks that are rehearsed: `rank`, all for -1, the default for None."""
    if rank is None:
        return None
    if rank >= world:
        raise ConfigError(f"--rank must be below --gpus {world}, got {rank}")
    return list(range(world)) if rank < 0 else [rank]
