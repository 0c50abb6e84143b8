"""Compare ways to distribute the optimizer over data-parallel ranks, in one run.

    torchrun --nproc-per-node 2 scripts/bench/distributed.py --config configs/tiny_muon.yaml \
        --variant optimizer.distributed.storage=owner \
        --variant optimizer.distributed.step_groups=1 --json result.json

Each `--variant` is the same config with further overrides: storage, placement, groups, dtypes, or
the rule. Each has its own copy of the model and gets the same gradients, different on every rank.
They alternate; a turn lasts from complete local gradients to new weights on every rank (reduction,
step, gather), on the slowest rank, and the median of `--repeats` turns counts, after one that does
not. Processor time is that of the busiest rank, with gloo's threads; other work on the machine
disturbs it less. Nothing is clipped: clipping is the same in all variants.

Bytes are counted per collective as a ring would send them, in one step, and so are the masters and
the state that a rank keeps. Gaussian gradients let the solver of the spectral sphere stop early.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.engine import import_engine

import_engine()

from parallel.comm import groups as process_groups
from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups
from scripts.bench.measure import MIB, in_turn, print_table, record, write_json
from scripts.bench.train import CONFIG, add_variants, start, variants
from scripts.command import add_config, add_json, command, whole_number
from training.build import build_distributed_optimizer, build_parallel_model
from training.config import Config
from training.errors import InputError

GRADIENT_STD = 1e-3


class Side:
    """A model and its optimizer, which take the same gradients as every other side."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self.model = build_parallel_model(config, groups)
        self.optimizer = build_distributed_optimizer(config, self.model)
        self.active = torch.tensor(True, device=groups.device)
        self.rank, self.turns = groups.rank, 0

    def fill_gradients(self) -> None:
        """Write local gradients, those of this rank and turn."""
        generator = torch.Generator().manual_seed(1000 * self.turns + self.rank)
        self.turns += 1
        for parameter in self.model.parameters.values():
            gradient = vars(parameter)["main_grad"]
            gradient.copy_(GRADIENT_STD * torch.randn(gradient.shape, generator=generator))

    def update(self) -> None:
        """Reduce-scatter, step, all-gather."""
        self.model.finish_gradients()
        self.optimizer.step(1.0, self.active)
        self.model.wait_for_weights()

    def turn(self) -> tuple[list[float], list[float]]:
        """Take a step; return wall and processor milliseconds of all ranks."""
        self.fill_gradients()
        self.model.comm_volume.clear()
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        self.update()
        if self.active.is_cuda:
            torch.cuda.synchronize()
        spent = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)
        walls, processors = zip(*from_all(spent), strict=True)
        return list(walls), list(processors)


def measure(sides: Mapping[str, Side], repeats: int) -> dict[str, dict[str, Any]]:
    """Measure every side, by its name; the figures are the same on every rank.

    Milliseconds are medians over turns: of the slowest rank's wall time, and of the busiest rank's
    processor time. `sent` are bytes of the mean rank in a step by kind of collective, `state` those
    of masters and state on the fullest rank, `distance` the relative difference of all weights from
    those of the config.
    """
    turns = in_turn({name: side.turn for name, side in sides.items()}, repeats, warm_up=1)
    found = {}
    for name, side in sides.items():
        sent = from_all(dict(side.model.comm_volume))
        found[name] = {
            "milliseconds": statistics.median(max(walls) for walls, _ in turns[name]),
            "processor": statistics.median(max(spent) for _, spent in turns[name]),
            "sent": {
                kind: statistics.mean(rank.get(kind, 0) for rank in sent)
                for kind in sorted(set().union(*sent))
            },
            "state": max(from_all(side.optimizer.memory_bytes())),
            "distance": distance(side, sides[CONFIG]),
        }
    return found


def distance(side: Side, reference: Side) -> float:
    """Frobenius norm of the difference of all weights, relative to the reference's; the largest of
    all ranks."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, parameter in reference.model.parameters.items():
        weight = parameter.detach().double()
        squares[0] += (side.model.parameters[name].detach().double() - weight).square().sum()
        squares[1] += weight.square().sum()
    return max(from_all((squares[0] / squares[1]).sqrt().item()))


def rows(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the table."""
    return [
        {
            "variant": name,
            "step (ms)": figures["milliseconds"],
            "processor (ms)": figures["processor"],
            "masters and state (MiB)": figures["state"] / MIB,
            "weights differ by": f"{figures['distance']:.1e}",
            "sent (MiB)": sum(figures["sent"].values()) / MIB,
            **{f"by {kind}": size / MIB for kind, size in figures["sent"].items()},
        }
        for name, figures in found.items()
    ]


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    add_variants(parser)
    parser.add_argument(
        "--repeats", type=whole_number(), default=5, help="turns to measure (default: 5)"
    )
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write the result on rank 0."""
    options = parse(arguments)
    configs = variants(options)
    config = configs[CONFIG]
    if config.parallel.model_ranks > 1 or config.model.moe is not None or config.pc is not None:
        raise InputError("the config must be data-parallel, without experts and PC layers")
    groups = start(config)
    sides = {name: Side(each, groups) for name, each in configs.items()}
    numel = sum(p.numel() for p in sides[CONFIG].model.parameters.values())
    found = measure(sides, options.repeats)
    if groups.rank == 0:
        ranks = process_groups.world_size()
        print(f"{config.run.name} on {ranks} ranks, {numel:,} parameters")
        print_table(rows(found))
        figures = {"ranks": ranks, "parameters": numel, "variants": found}
        write_json(
            options.json, record("scripts/bench/distributed.py", arguments, groups.device, figures)
        )
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
