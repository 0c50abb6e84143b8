"""Measure what PC layers cost: no PC layers, materialized and in the graph, in one run.

    python scripts/bench/pc.py
    python scripts/bench/pc.py --microbatches 4 --json result.json model.hidden=256 model.ffn=704
    python scripts/bench/pc.py --config configs/llama271m_muon_pc.yaml train.micro_batch=1

Each variant takes whole training steps (forward, backward, reduction, clipping, update) of the same
config on random tokens. The variants alternate, and medians are printed: of processor time on a
CPU, which other work on the machine disturbs less, and of the device's time on a GPU.

`x` compares whole steps. The materialized evaluator adds nothing to forward and backward passes, so
a difference there from the step without PC layers is noise. `x, update` leaves it out: it takes one
forward and backward time for both, and each variant's own time for the rest of the step. That rest
is constant, so its share falls with the tokens of a step: compare widths at a constant ratio of
width to tokens, and remember that data-parallel ranks share it.

Memory is counted in tensors: what is kept between steps, and the most that one step adds. Beyond a
run without PC layers the materialized evaluator keeps W (without it the parameter is W), gamma, u
and v.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from models.engine import import_quietly

import_quietly()

from models.pc_config import PCConfig
from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from scripts.bench.live_bytes import peak_bytes
from scripts.bench.phases import Phases, watch
from scripts.bench.record import record, write_json
from scripts.bench.trainer import new_trainer, start
from scripts.command import add_config, add_json, command
from training.config import Config, load_config
from training.config.paper_choices import with_paper_choices
from training.loop import Trainer
from training.report.table import table

NONE, MATERIALIZED, IN_GRAPH = "no PC layers", "materialized", "in the graph"
# With these defaults a micro-batch has 64 times as many tokens as the model is wide, like the
# paper's 271M model on one GPU.
DEFAULTS = (
    "model.vocab_size=512",
    "train.sequence_length=512",
    "train.micro_batch=16",
)
MIB = 2**20


def variants(config: Config) -> dict[str, Config]:
    """The config without PC layers and with either evaluator."""
    pc = config.pc or with_paper_choices(dataclasses.replace(config, pc=PCConfig())).pc
    assert pc is not None
    return {
        NONE: dataclasses.replace(config, pc=None),
        MATERIALIZED: dataclasses.replace(
            config, pc=dataclasses.replace(pc, evaluator="materialized")
        ),
        IN_GRAPH: dataclasses.replace(config, pc=dataclasses.replace(pc, evaluator="in_graph")),
    }


def with_microbatches(config: Config, count: int, data_size: int) -> Config:
    """The config with `count` micro-batches per step on each of `data_size` data-parallel ranks."""
    batch = count * config.train.micro_batch * data_size
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))


def kept_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes that this rank keeps between steps, by kind."""
    buffers = [domain.buffers for domain in trainer.model.domains]
    return {
        "weights": sum(p.nbytes for b in buffers for p in b.parameters),
        "gradients": sum(g.nbytes for b in buffers for g in b.gradients),
        "masters and state": trainer.optimizer.memory_bytes(),
        "pairs in the graph": sum(
            b.nbytes
            for chunk in trainer.model.chunks
            for name, b in chunk.named_buffers()
            if "parametrizations" in name
        ),
    }


@dataclasses.dataclass
class Turn:
    """Seconds of one step, and of its part after the forward and backward passes."""

    step: float
    update: float


class Variant:
    """A trainer on random tokens and the phases of its steps."""

    def __init__(self, config: Config, groups: Groups) -> None:
        self.trainer = new_trainer(config, groups, synthetic=True)
        self.phases = Phases(groups.device, time.process_time)
        watch(self.trainer, self.phases)

    def step(self, index: int) -> Turn:
        """Take a step and measure it."""
        self.phases.restart()
        self.trainer.step(index)
        seconds = self.phases.seconds()
        step = sum(seconds.values())
        return Turn(step, step - seconds["data"] - seconds["forward"] - seconds["backward"])

    def peak_bytes(self, index: int) -> int:
        """Take a step and count the most bytes that it adds to what is kept."""
        if not self.phases.cuda:
            return peak_bytes(lambda: self.trainer.step(index))
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.trainer.step(index)
        return torch.cuda.max_memory_allocated() - before


def measure(config: Config, groups: Groups, repeats: int) -> dict[str, dict[str, Any]]:
    """Times and bytes of every variant at the config's number of micro-batches."""
    sides = {name: Variant(each, groups) for name, each in variants(config).items()}
    turns: dict[str, list[Turn]] = {name: [] for name in sides}
    for index in range(repeats + 1):
        for name, side in sides.items():
            spent = side.step(index)
            if index > 0:
                turns[name].append(spent)
    step = {name: statistics.median(t.step for t in each) for name, each in turns.items()}
    update = {name: statistics.median(t.update for t in each) for name, each in turns.items()}
    return {
        name: {
            "step_seconds": step[name],
            "update_seconds": update[name],
            "ratio": step[name] / step[NONE],
            "ratio_by_update": 1 + (update[name] - update[NONE]) / step[NONE],
            "turns": [dataclasses.asdict(turn) for turn in turns[name]],
            "kept": kept_bytes(side.trainer),
            "step_peak": side.peak_bytes(repeats + 1),
        }
        for name, side in sides.items()
    }


def report(count: int, found: Mapping[str, Mapping[str, Any]]) -> str:
    """The table for one number of micro-batches."""
    header = (
        "micro-batches", "variant", "step (ms)", "x", "update (ms)", "x, update",
        "masters and state (MiB)", "kept in all (MiB)", "step's peak (MiB)", "x",
    )  # fmt: skip
    rows = [
        (
            str(count),
            name,
            f"{1e3 * each['step_seconds']:.0f}",
            f"{each['ratio']:.3f}",
            f"{1e3 * each['update_seconds']:.1f}",
            "" if name == IN_GRAPH else f"{each['ratio_by_update']:.4f}",
            f"{each['kept']['masters and state'] / MIB:.2f}",
            f"{sum(each['kept'].values()) / MIB:.2f}",
            f"{each['step_peak'] / MIB:.2f}",
            f"{each['step_peak'] / found[NONE]['step_peak']:.3f}",
        )
        for name, each in found.items()
    ]
    return table(header, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_config(parser, ROOT / "configs/tiny_muon_pc.yaml")
    parser.add_argument(
        "--microbatches", type=int, nargs="+", default=[1, 4, 16], help="default: 1 4 16"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="steps of each variant to measure (default: 3)"
    )
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print and write the result on rank 0."""
    options = parse(arguments)
    config = load_config(options.config, [*DEFAULTS, *options.overrides])
    replicas = process_groups.world_size() // config.parallel.model_ranks
    groups = start(with_microbatches(config, 1, replicas))
    figures = {}
    for count in options.microbatches:
        found = measure(with_microbatches(config, count, groups.data.size), groups, options.repeats)
        figures[count] = found
        if groups.rank == 0:
            print(report(count, found), "\n", flush=True)
    if groups.rank == 0:
        write_json(
            options.json,
            record("scripts/bench/pc.py", arguments, groups.device, {"steps": figures}),
        )
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
