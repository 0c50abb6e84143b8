"""Where runs of a study are trained at the same time: processor cores, or GPUs of this node."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from scripts.command import whole_number
from training.errors import InputError


@dataclass(frozen=True)
class Place:
    """Room for one run at a time.

    ranks   processes of a run
    gpus    names of its GPUs as CUDA_VISIBLE_DEVICES takes them, None for what the machine has
    """

    ranks: int = 1
    gpus: tuple[str, ...] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """What its runs have in their environment."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def add_places(parser: argparse.ArgumentParser) -> None:
    """Add the options that `places` reads."""
    parser.add_argument(
        "--jobs",
        type=whole_number(),
        metavar="N",
        help="runs at a time (default: 1, or as many as the GPUs allow)",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument(
        "--nproc", type=whole_number(), default=1, metavar="N", help="ranks of each run (default 1)"
    )
    ranks.add_argument(
        "--gpus-per-run",
        type=whole_number(),
        metavar="N",
        help="one rank on each of N GPUs per run, and as many runs as this node has GPUs for",
    )


def places(options: argparse.Namespace) -> list[Place]:
    """Return the places that the command line asks for.

    Raises InputError where there are fewer GPUs.
    """
    each: int | None = options.gpus_per_run
    if each is None:
        return [Place(options.nproc)] * (options.jobs or 1)
    gpus = visible_gpus()
    most = len(gpus) // each
    if most == 0:
        raise InputError(f"--gpus-per-run must be at most the {len(gpus)} GPUs here, got {each}")
    jobs: int = options.jobs or most
    if jobs > most:
        raise InputError(
            f"--jobs must be at most {most} with --gpus-per-run {each} on {len(gpus)} GPUs, "
            f"got {jobs}"
        )
    return [Place(each, tuple(gpus[i * each : (i + 1) * each])) for i in range(jobs)]


def visible_gpus() -> Sequence[str]:
    """Names of the GPUs that this process may use; as CUDA, up to the first that is none."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        names = (name.strip() for name in named.split(","))
        return list(takewhile(lambda name: name and not name.startswith("-"), names))
    return [str(i) for i in range(torch.cuda.device_count())]
