"""The distributed optimizer beside replication and a layer-wise scheme, in one run on gloo ranks.

    python scripts/bench/distributed.py --ranks 2 --rule muon
    python scripts/bench/distributed.py --ranks 4 --rule spectral_sphere --json result.json
    python scripts/bench/distributed.py --placement --config configs/llama1b_sso.yaml

The baselines are in distributed_baselines.py. Each scheme has its own copy of the same weights
(bfloat16; gradients, masters and state float32) and gets the same gradients, different on every
rank. They take turns; a turn lasts from complete local gradients to new weights on every rank
(reduction, step, gather), on the slowest rank, and the median of `--repeats` turns counts, after
one that does not. Processor time is that of the busiest rank, gloo's threads included: other work
on the machine disturbs it less. Without clipping, which is the same in all.

Bytes are counted per collective as a ring would send them. Memory is counted too: what a rank keeps
between steps, and the tensors that a step creates (scratch), at its worst moment. The schemes share
a process, so its resident set says nothing about one of them. Gaussian gradients let the solver of
the spectral sphere stop early, which flatters most the scheme that solves most, replication.

`--placement` compares the ways to deal a model's matrices to 8 to 1024 ranks by the planner alone
(placement_comparison.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
# Python puts this folder first, whose spectral.py would hide the package of that name.
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", module=r"megatron\.")

from models.config import ModelConfig  # noqa: E402
from models.units import Unit  # noqa: E402
from parallel.comm import groups as process_groups  # noqa: E402
from parallel.comm.collectives import CommVolume, from_all  # noqa: E402
from parallel.comm.groups import Groups  # noqa: E402
from parallel.model import ParallelModel, build_model  # noqa: E402
from parallel.optimizer.build import build_optimizer  # noqa: E402
from parallel.optimizer.optimizer import DistributedOptimizer  # noqa: E402
from parallel.optimizer.routing import Assign, Assignment  # noqa: E402
from scripts.bench.distributed_baselines import LayerWise, Replicated, total_bytes  # noqa: E402
from scripts.bench.live_bytes import peak_bytes  # noqa: E402
from scripts.bench.placement_comparison import compare_placements, placement_table  # noqa: E402
from spectral.rules import RULES  # noqa: E402
from training.build import with_vocabulary  # noqa: E402
from training.config import group_of, load_config  # noqa: E402
from training.dry_run import table  # noqa: E402

OURS, REPLICATED, LAYER_WISE = "spectrain", "replicated", "layer-wise"
LR, WEIGHT_DECAY, GRADIENT_STD = 5e-3, 0.1, 1e-3
WIRES = {"fp32": None, "bf16": torch.bfloat16}
MIB = 2**20


class Scheme(Protocol):
    """A way to spread one optimizer over ranks. Weights and gradients are `[*shape]` by name."""

    comm_volume: CommVolume

    @property
    def parameters(self) -> Mapping[str, Tensor]:
        """The weights."""

    @property
    def gradients(self) -> Mapping[str, Tensor]:
        """Complete local gradients, to be filled before `update`."""

    def update(self) -> None:
        """None; from complete local gradients to new weights on every rank."""

    def memory(self) -> dict[str, int]:
        """Bytes that this rank keeps between steps, by kind."""


class Distributed:
    """The distributed optimizer of `parallel`, as a scheme."""

    def __init__(self, model: ParallelModel, optimizer: DistributedOptimizer) -> None:
        self.model = model
        self.optimizer = optimizer
        self.comm_volume = model.comm_volume
        self.parameters = {name: p.detach() for name, p in model.parameters.items()}
        self.gradients = {name: vars(p)["main_grad"] for name, p in model.parameters.items()}
        self.active = torch.tensor(True)

    def update(self) -> None:
        """None; reduce-scatter, step, all-gather."""
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
    """What was measured of one scheme; bytes of one step, `mean` over ranks, `most` of any.

    milliseconds   median over turns of the slowest rank's time, `turns`
    processor      median over turns of the busiest rank's processor time, milliseconds
    sent           bytes by kind of collective
    distance       relative difference of all weights from those of the replicated optimizer
    """

    milliseconds: float = 0.0
    processor: float = 0.0
    turns: list[float] = field(default_factory=list)
    processor_turns: list[float] = field(default_factory=list)
    sent: dict[str, float] = field(default_factory=dict)
    sent_mean: float = 0.0
    sent_most: float = 0.0
    memory_most: dict[str, int] = field(default_factory=dict)
    scratch_most: int = 0
    peak_most: int = 0
    distance: float = 0.0


def assign_matrices(rule: str) -> Assign:
    """Matrices to `rule`, everything else to AdamW."""

    def assign(unit: Unit) -> Assignment:
        group = group_of(unit.role)
        name = rule if group == "matrix" else "adamw"
        return Assignment(group, name, RULES[name](), LR, WEIGHT_DECAY)

    return assign


def build_schemes(
    config: ModelConfig,
    rule: str,
    groups: Groups,
    *,
    dtype: torch.dtype = torch.bfloat16,
    exchange_dtype: torch.dtype | None = None,
    bucket_numel: int | None = None,
    step_groups: int = 4,
) -> dict[str, Scheme]:
    """The three schemes with equal weights.

    `exchange_dtype`, `bucket_numel` and `step_groups` are those of `parallel`.
    """
    assign = assign_matrices(rule)
    model = build_model(
        config,
        groups,
        seed=0,
        sequence_length=8,
        dtype=dtype,
        elementwise=lambda unit: not assign(unit).whole_matrix,
        bucket_numel=bucket_numel,
    )
    baseline = (model.parameters, model.units, assign, groups.dense.replicas)
    return {
        OURS: Distributed(
            model,
            build_optimizer(model, assign, exchange_dtype=exchange_dtype, step_groups=step_groups),
        ),
        REPLICATED: Replicated(*baseline),
        LAYER_WISE: LayerWise(*baseline),
    }


def fill_gradients(schemes: Mapping[str, Scheme], turn: int, rank: int) -> None:
    """Give every scheme the gradients of this rank and turn."""
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
            spent = (time.perf_counter() - start, time.process_time() - start_processor)
            seconds, processor = map(max, zip(*from_all(spent), strict=True))
            if turn > 0:
                found[name].turns.append(1e3 * seconds)
                found[name].processor_turns.append(1e3 * processor)
    for name, scheme in schemes.items():
        found[name].milliseconds = statistics.median(found[name].turns)
        found[name].processor = statistics.median(found[name].processor_turns)
        found[name].distance = distance(scheme, schemes[REPLICATED])
        count_bytes(found[name], scheme)
    # Watching every operation takes time, so this is a turn of its own.
    fill_gradients(schemes, repeats + 1, groups.rank)
    for name, scheme in schemes.items():
        figures, kept = found[name], sum(scheme.memory().values())
        scratch = from_all(peak_bytes(scheme.update))
        figures.scratch_most = max(scratch)
        figures.peak_most = max(map(sum, zip(scratch, from_all(kept), strict=True)))
    return found


def count_bytes(figures: Figures, scheme: Scheme) -> None:
    """Fill in what the ranks have sent since their counts were cleared, and keep."""
    sent = from_all(dict(scheme.comm_volume.sent))
    totals = [sum(each.values()) for each in sent]
    figures.sent = {
        kind: statistics.mean(each.get(kind, 0) for each in sent)
        for kind in sorted(set().union(*sent))
    }
    figures.sent_mean, figures.sent_most = statistics.mean(totals), max(totals)
    kept = from_all(scheme.memory())
    figures.memory_most = {kind: max(each[kind] for each in kept) for kind in kept[0]}


def distance(scheme: Scheme, reference: Scheme) -> float:
    """Frobenius norm of the difference of all weights, relative to the reference's; the worst of
    all ranks."""
    squares = torch.zeros(2, dtype=torch.float64)
    for name, weight in reference.parameters.items():
        squares[0] += (scheme.parameters[name].double() - weight.double()).square().sum()
        squares[1] += weight.double().square().sum()
    return max(from_all((squares[0] / squares[1]).sqrt().item()))


def report(found: Mapping[str, Figures]) -> str:
    """Tables of the figures, and of what each scheme sends."""
    ours = found[OURS]
    header = (
        "scheme", "step (ms)", "best", "x", "processor (ms)", "x", "sent per rank (MiB)", "x",
        "most", "masters and state (MiB)", "x", "gradients", "scratch", "weights differ by",
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
                f"{each.sent_mean / MIB:.2f}",
                f"{each.sent_mean / ours.sent_mean:.3f}",
                f"{each.sent_most / MIB:.2f}",
                f"{state / MIB:.2f}",
                f"{state / ours.memory_most['masters and state']:.2f}",
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
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2, help="gloo processes, one thread each")
    parser.add_argument("--rule", choices=RULES, default="spectral_sphere", help="of the matrices")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ffn", type=int, default=704)
    parser.add_argument("--vocab", type=int, default=2048)
    parser.add_argument(
        "--exchange", choices=WIRES, default="fp32", help="what momentum travels in"
    )
    parser.add_argument("--step-groups", type=int, default=4, help="a step is cut in so many")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--placement", action="store_true", help="compare placements instead")
    parser.add_argument("--config", default=str(ROOT / "configs/llama1b_sso.yaml"), help="of that")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(arguments)


def start_ranks(options: argparse.Namespace) -> int:
    """The exit code of this script run on every rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(options.ranks), *sys.argv]
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env={**os.environ, **quiet}, check=False).returncode


def run_rank(options: argparse.Namespace) -> None:
    """None; what one rank does. Rank 0 prints."""
    groups = process_groups.initialize()
    model = ModelConfig(
        layers=options.layers,
        hidden=options.hidden,
        heads=options.heads,
        ffn=options.ffn,
        vocab_size=options.vocab,
    )
    schemes = build_schemes(
        model,
        options.rule,
        groups,
        exchange_dtype=WIRES[options.exchange],
        step_groups=options.step_groups,
    )
    numel = sum(p.numel() for p in schemes[OURS].parameters.values())
    found = measure(schemes, groups, options.repeats)
    if groups.rank == 0:
        print(f"{options.ranks} ranks, {options.rule}, {numel:,} parameters\n")
        print(report(found))
        write(options, {"parameters": numel, "schemes": {k: asdict(v) for k, v in found.items()}})
    process_groups.shutdown()


def write(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """None; the figures with the machine's description, if a file was asked for."""
    if options.json:
        chosen = {key: str(value) for key, value in vars(options).items() if key != "json"}
        machine = {"torch": torch.__version__, "cores": os.cpu_count(), "options": chosen}
        options.json.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")


def main() -> int:
    """Exit code."""
    options = parse()
    if options.placement:
        config = with_vocabulary(load_config(options.config))
        rows = list(compare_placements(config, [2**k for k in range(3, 11)]))
        print(placement_table(rows))
        write(options, {"rows": [asdict(row) for row in rows]})
        return 0
    if "RANK" not in os.environ:
        return start_ranks(options)
    run_rank(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
