"""Compare the distributed optimizer with replication and a layer-wise scheme, in one run.

    torchrun --nproc-per-node 2 scripts/bench/distributed.py --config configs/tiny_muon.yaml
    torchrun --nproc-per-node 4 scripts/bench/distributed.py --config configs/tiny_sso.yaml \\
        --json result.json model.hidden=256 optimizer.distributed.step_groups=1

The baselines are in distributed_baselines.py. Where megatron-core's own layer-wise Muon can run
(megatron_peer.py) it is a fourth scheme; elsewhere a line says why it is left out. Each scheme has
its own copy of the weights of the config's model and gets the same gradients, different on every
rank. They alternate; a turn lasts from complete local gradients to new weights on every rank
(reduction, step, gather), on the slowest rank, and the median of `--repeats` turns counts, after
one that does not. Processor time is that of the busiest rank, with gloo's threads; other work on
the machine disturbs it less. Nothing is clipped: clipping is the same in all schemes.

Bytes are counted per collective as a ring would send them, in the first turn. Memory is counted
too: what a rank keeps between steps, and the tensors that a step creates (scratch), at their peak.
The schemes share a process, so its resident set says nothing about one of them. Gaussian gradients
let the solver of the spectral sphere stop early, which flatters replication most, as it solves
most.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from parallel.comm import groups as process_groups
from parallel.comm.collectives import CommVolume, from_all
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.optimizer.optimizer import DistributedOptimizer
from parallel.optimizer.routing import Assign
from scripts.bench.distributed_baselines import LayerWise, Replicated, total_bytes
from scripts.bench.live_bytes import peak_bytes
from scripts.bench.megatron_peer import MegatronLayerWise, why_absent
from scripts.bench.record import record, write_json
from scripts.bench.trainer import start
from scripts.command import add_config, add_json, command
from training.build import (
    build_distributed_optimizer,
    build_parallel_model,
    config_assignments,
    with_vocabulary,
)
from training.config import load_config
from training.errors import InputError
from training.report.table import table

OURS, REPLICATED, LAYER_WISE = "spectrain", "replicated", "layer-wise"
MEGATRON = "megatron-core"
GRADIENT_STD = 1e-3
MIB = 2**20


class Scheme(Protocol):
    """A way to distribute one optimizer over ranks. Weights and gradients are `[*shape]` by
    name."""

    comm_volume: CommVolume

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The weights."""

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Local gradients, to be filled before `update`."""

    def update(self) -> None:
        """Go from complete local gradients to new weights on every rank."""

    def memory(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps, by kind."""


class Distributed:
    """The distributed optimizer of `parallel`, as a scheme."""

    def __init__(
        self, model: ParallelModel, optimizer: DistributedOptimizer, device: torch.device
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.comm_volume = model.comm_volume
        self.parameters = {name: p.detach() for name, p in model.parameters.items()}
        self.gradients = {name: vars(p)["main_grad"] for name, p in model.parameters.items()}
        self.active = torch.tensor(True, device=device)

    def update(self) -> None:
        """Reduce-scatter, step, all-gather."""
        self.model.finish_gradients()
        self.optimizer.step(1.0, self.active)
        self.model.wait_for_weights()

    def memory(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps, padding included."""
        (domain,) = self.model.domains
        return {
            "weights": total_bytes(domain.buffers.parameters),
            "gradients": total_bytes(domain.buffers.gradients),
            "masters and state": self.optimizer.memory_bytes(),
        }


@dataclass
class Figures:
    """What was measured of one scheme; bytes of one step, `mean` over ranks, `most` on any.

    milliseconds   median over turns of the slowest rank's time, `turns`
    processor      median over turns of the busiest rank's processor time, milliseconds
    balance        median over turns of the busiest rank's over the mean rank's processor time
    sent           bytes by kind of collective
    distance       relative difference of all weights from those of the replicated optimizer
    """

    milliseconds: float = 0.0
    processor: float = 0.0
    balance: float = 0.0
    turns: list[float] = field(default_factory=list)
    processor_turns: list[float] = field(default_factory=list)
    balance_turns: list[float] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    sent_mean: float = 0.0
    sent_most: float = 0.0
    memory_mean: dict[str, float] = field(default_factory=dict)
    memory_most: dict[str, int] = field(default_factory=dict)
    scratch_most: int = 0
    peak_most: int = 0
    distance: float = 0.0


def build_schemes(
    model: ParallelModel, optimizer: DistributedOptimizer, assign: Assign, groups: Groups
) -> dict[str, Scheme]:
    """The three schemes with equal weights; the first one owns `model` and `optimizer`."""
    baseline = (model.parameters, model.units, assign, groups.dense.replicas)
    return {
        OURS: Distributed(model, optimizer, groups.device),
        REPLICATED: Replicated(*baseline),
        LAYER_WISE: LayerWise(*baseline),
    }


def fill_gradients(schemes: Mapping[str, Scheme], turn: int, rank: int) -> None:
    """Give every scheme the same gradients, those of this rank and turn."""
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    some = next(iter(schemes.values()))
    for name, like in some.gradients.items():
        gradient = GRADIENT_STD * torch.randn(like.shape, generator=generator)
        for scheme in schemes.values():
            scheme.gradients[name].copy_(gradient)


def measure(schemes: Mapping[str, Scheme], groups: Groups, repeats: int) -> dict[str, Figures]:
    """The figures of every scheme, the same on every rank."""
    found = {name: Figures() for name in schemes}
    for turn in range(repeats + 1):
        fill_gradients(schemes, turn, groups.rank)
        for name, scheme in schemes.items():
            scheme.comm_volume.sent.clear()
            dist.barrier()
            start, start_processor = time.perf_counter(), time.process_time()
            scheme.update()
            if groups.device.type == "cuda":
                torch.cuda.synchronize()
            spent = (time.perf_counter() - start, time.process_time() - start_processor)
            seconds, processors = zip(*from_all(spent), strict=True)
            if turn == 0:
                count_bytes(found[name], scheme)
                continue
            found[name].turns.append(1e3 * max(seconds))
            found[name].processor_turns.append(1e3 * max(processors))
            found[name].balance_turns.append(max(processors) / statistics.mean(processors))
    for name, scheme in schemes.items():
        found[name].milliseconds = statistics.median(found[name].turns)
        found[name].processor = statistics.median(found[name].processor_turns)
        found[name].balance = statistics.median(found[name].balance_turns)
        found[name].distance = distance(scheme, schemes[REPLICATED])
    # Counting allocations slows a turn down, so it gets its own.
    fill_gradients(schemes, repeats + 1, groups.rank)
    for name, scheme in schemes.items():
        figures, kept = found[name], sum(scheme.memory().values())
        scratch = from_all(peak_bytes(scheme.update))
        figures.scratch_most = max(scratch)
        figures.peak_most = max(map(sum, zip(scratch, from_all(kept), strict=True)))
    return found


def count_bytes(figures: Figures, scheme: Scheme) -> None:
    """Fill in the bytes that ranks sent since their counts were cleared, and those they keep."""
    sent = from_all(dict(scheme.comm_volume.sent))
    totals = [sum(each.values()) for each in sent]
    figures.sent = {
        kind: statistics.mean(each.get(kind, 0) for each in sent)
        for kind in sorted(set().union(*sent))
    }
    figures.sent_mean, figures.sent_most = statistics.mean(totals), max(totals)
    kept = from_all(scheme.memory())
    figures.memory_most = {kind: max(each[kind] for each in kept) for kind in kept[0]}
    figures.memory_mean = {kind: statistics.mean(each[kind] for each in kept) for kind in kept[0]}


def distance(scheme: Scheme, reference: Scheme) -> float:
    """Frobenius norm of the difference of all weights, relative to the reference's; the largest of
    all ranks."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, weight in reference.parameters.items():
        squares[0] += (scheme.parameters[name].double() - weight.double()).square().sum()
        squares[1] += weight.double().square().sum()
    return max(from_all((squares[0] / squares[1]).sqrt().item()))


def report(found: Mapping[str, Figures]) -> str:
    """The tables of the figures, and of what each scheme sends."""
    ours = found[OURS]
    header = (
        "scheme", "step (ms)", "best", "x", "processor (ms)", "x", "most / mean",
        "sent per rank (MiB)", "x", "most", "masters and state (MiB)", "x", "most / mean",
        "gradients", "scratch", "weights differ by",
    )  # fmt: skip
    rows = []
    for name, each in found.items():
        state = each.memory_most["masters and state"]
        rows.append(
            (
                name,
                f"{each.milliseconds:.1f}",
                f"{min(each.turns):.1f}",
                f"{each.milliseconds / ours.milliseconds:.2f}",
                f"{each.processor:.1f}",
                f"{each.processor / ours.processor:.2f}",
                f"{each.balance:.2f}",
                f"{each.sent_mean / MIB:.2f}",
                f"{each.sent_mean / ours.sent_mean:.3f}",
                f"{each.sent_most / MIB:.2f}",
                f"{state / MIB:.2f}",
                f"{state / ours.memory_most['masters and state']:.2f}",
                f"{state / each.memory_mean['masters and state']:.2f}",
                f"{each.memory_most['gradients'] / MIB:.2f}",
                f"{each.scratch_most / MIB:.2f}",
                f"{each.distance:.1e}",
            )
        )
    kinds = [
        (name, kind, f"{size / MIB:.3f}")
        for name, each in found.items()
        for kind, size in each.sent.items()
    ]
    sent = table(("scheme", "sent as", "MiB per rank, mean"), kinds)
    return f"{table(header, rows)}\n\n{sent}"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser)
    parser.add_argument("--repeats", type=int, default=5, help="turns to measure (default: 5)")
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write the result on rank 0."""
    options = parse(arguments)
    config = with_vocabulary(load_config(options.config, options.overrides))
    ranks = process_groups.world_size()
    if config.parallel.model_ranks > 1 or config.model.moe is not None or config.pc is not None:
        raise InputError("the config must be data-parallel, without experts and PC layers")
    groups = start(config)
    model = build_parallel_model(config, groups)
    optimizer = build_distributed_optimizer(config, model)
    assign = config_assignments(config)
    schemes = build_schemes(model, optimizer, assign, groups)
    assigned = list(dict.fromkeys(assign(unit) for unit in model.units))
    absent = why_absent(assigned, model.config.params_dtype)
    if absent is None:
        schemes[MEGATRON] = MegatronLayerWise(build_parallel_model(config, groups), assign)
    numel = sum(p.numel() for p in schemes[OURS].parameters.values())
    found = measure(schemes, groups, options.repeats)
    if groups.rank == 0:
        print(f"{config.run.name} on {ranks} ranks, {numel:,} parameters\n\n{report(found)}")
        if absent is not None:
            print(f"\n{MEGATRON} left out: {absent}")
        measured = {name: asdict(each) for name, each in found.items()}
        figures = {"ranks": ranks, "parameters": numel, "schemes": measured}
        write_json(
            options.json,
            record("scripts/bench/distributed.py", arguments, groups.device, figures),
        )
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
