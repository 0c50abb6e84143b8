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
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from parallel.comm import groups as process_groups
from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups
from scripts.bench.measure import MIB, in_turn, record, write_json
from scripts.bench.train import CONFIG, add_variants, start, variants
from scripts.command import add_config, add_json, command
from training.build import build_distributed_optimizer, build_parallel_model
from training.config import Config
from training.errors import InputError
from training.report.table import table

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
        self.model.comm_volume.sent.clear()
        dist.barrier()
        wall, processor = time.perf_counter(), time.process_time()
        self.update()
        if self.active.is_cuda:
            torch.cuda.synchronize()
        spent = 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor)
        walls, processors = zip(*from_all(spent), strict=True)
        return list(walls), list(processors)


@dataclass
class Figures:
    """What was measured of one side; bytes of one step.

    Attributes:
        milliseconds: median over turns of the slowest rank's wall time.
        processor: the same of the busiest rank's processor time.
        balance: the same of the busiest rank's over the mean rank's processor time.
        sent: bytes that the mean rank sends, by kind of collective.
        state_most, state_mean: bytes of masters and state on the fullest and the mean rank.
        distance: relative difference of all weights from those of the config.
    """

    milliseconds: float
    processor: float
    balance: float
    sent: dict[str, float]
    state_most: int
    state_mean: float
    distance: float


def measure(sides: Mapping[str, Side], repeats: int) -> dict[str, Figures]:
    """Measure every side; the figures are the same on every rank."""
    turns = in_turn({name: side.turn for name, side in sides.items()}, repeats, warm_up=1)
    found = {}
    for name, side in sides.items():
        sent = from_all(dict(side.model.comm_volume.sent))
        state = from_all(side.optimizer.memory_bytes())
        found[name] = Figures(
            milliseconds=statistics.median(max(walls) for walls, _ in turns[name]),
            processor=statistics.median(max(spent) for _, spent in turns[name]),
            balance=statistics.median(max(s) / statistics.mean(s) for _, s in turns[name]),
            sent={
                kind: statistics.mean(rank.get(kind, 0) for rank in sent)
                for kind in sorted(set().union(*sent))
            },
            state_most=max(state),
            state_mean=statistics.mean(state),
            distance=distance(side, sides[CONFIG]),
        )
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


def report(found: Mapping[str, Figures]) -> str:
    """The tables of the figures, and of what each side sends."""
    config = found[CONFIG]
    header = (
        "variant", "step (ms)", "x", "processor (ms)", "x", "most / mean", "sent (MiB)", "x",
        "masters and state (MiB)", "x", "most / mean", "weights differ by",
    )  # fmt: skip
    total = sum(config.sent.values())
    rows = [
        (
            name,
            f"{figures.milliseconds:.1f}",
            f"{figures.milliseconds / config.milliseconds:.2f}",
            f"{figures.processor:.1f}",
            f"{figures.processor / config.processor:.2f}",
            f"{figures.balance:.2f}",
            f"{sum(figures.sent.values()) / MIB:.2f}",
            f"{sum(figures.sent.values()) / total:.3f}" if total else "",
            f"{figures.state_most / MIB:.2f}",
            f"{figures.state_most / config.state_most:.2f}",
            f"{figures.state_most / figures.state_mean:.2f}",
            f"{figures.distance:.1e}",
        )
        for name, figures in found.items()
    ]
    kinds = [
        (name, kind, f"{size / MIB:.3f}")
        for name, figures in found.items()
        for kind, size in figures.sent.items()
    ]
    sent = table(("variant", "sent as", "MiB per rank, mean"), kinds)
    return f"{table(header, rows)}\n\n{sent}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    add_variants(parser)
    parser.add_argument("--repeats", type=int, default=5, help="turns to measure (default: 5)")
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
        print(f"{config.run.name} on {ranks} ranks, {numel:,} parameters\n\n{report(found)}")
        measured = {name: asdict(figures) for name, figures in found.items()}
        figures = {"ranks": ranks, "parameters": numel, "variants": measured}
        write_json(
            options.json, record("scripts/bench/distributed.py", arguments, groups.device, figures)
        )
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
