"""What PC layers cost: steps without them, materialized and in the graph, side by side in one run.

    python scripts/bench/pc.py
    python scripts/bench/pc.py --microbatches 4 --json result.json model.hidden=256 model.ffn=704
    python scripts/bench/pc.py --config configs/llama271m_muon_pc.yaml train.micro_batch=1

Each variant is a whole training step (forward, backward, reduction, clipping, update) of the same
config on random tokens; they take turns, of which medians are told. On a CPU it is processor time
that counts, which other work on the machine disturbs less; on a GPU it is wall time.

`x` compares whole steps. The materialized evaluator adds nothing to forward and backward passes, so
that their difference between it and the step without PC layers is noise; `x, update` leaves it out:
one forward and backward time for both, and each variant's own time for the rest of the step. That
rest is constant, so its share falls with the tokens of a step: compare widths at a constant ratio
of width to tokens, and remember that data-parallel ranks share it.

Memory is that of tensors, counted: what stays between steps, and the most that one step adds to it.
What the materialized evaluator keeps beyond is W (without it the parameter is W), gamma, u and v.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
# Python puts this folder first, whose spectral.py would hide the package of that name.
sys.path.insert(0, str(ROOT))
warnings.filterwarnings("ignore", module=r"megatron\.")

from models.pc_config import PCConfig  # noqa: E402
from parallel.comm import groups as process_groups  # noqa: E402
from parallel.comm.groups import Groups  # noqa: E402
from scripts.bench.live_bytes import peak_bytes  # noqa: E402
from training.build import build_distributed_optimizer, build_parallel_model, ignore  # noqa: E402
from training.config import Config, load_config  # noqa: E402
from training.dry_run import table  # noqa: E402
from training.lifecycle.progress import Progress  # noqa: E402
from training.loop import Trainer  # noqa: E402

NONE, MATERIALIZED, IN_GRAPH = "no PC layers", "materialized", "in the graph"
# At the defaults a micro-batch has 64 times as many tokens as the model is wide, as the paper's
# 271M model has on one GPU.
DEFAULTS = (
    "model.vocab_size=512",
    "train.sequence_length=512",
    "train.micro_batch=16",
)
MIB = 2**20


def variants(config: Config) -> dict[str, Config]:
    """The config without PC layers and with either evaluator."""
    pc = config.pc or PCConfig()
    return {
        NONE: dataclasses.replace(config, pc=None),
        MATERIALIZED: dataclasses.replace(
            config, pc=dataclasses.replace(pc, evaluator="materialized")
        ),
        IN_GRAPH: dataclasses.replace(config, pc=dataclasses.replace(pc, evaluator="in_graph")),
    }


def new_trainer(config: Config, groups: Groups) -> Trainer:
    """A trainer on random tokens that reports nothing."""
    shape = config.train.micro_batch, config.train.sequence_length + 1
    vocabulary = config.model.vocab_size
    assert vocabulary is not None

    def batches(progress: Progress) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(groups.data.rank)
        while True:
            yield torch.randint(vocabulary, shape, generator=generator)

    model = build_parallel_model(config, groups)
    optimizer = build_distributed_optimizer(config, model)
    return Trainer(
        config, groups, model, optimizer, batches, [], ignore, flops_per_token=1.0, peak_flops=None
    )


def with_microbatches(config: Config, count: int, groups: Groups) -> Config:
    """The config with `count` micro-batches per step on every data-parallel rank."""
    batch = count * config.train.micro_batch * groups.data.size
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
    """Seconds of one step, by the device's clock or the processor's: of all, and of what is not a
    forward or backward pass."""

    step: float
    update: float


def timed_step(trainer: Trainer, index: int) -> Turn:
    """What one step took."""
    cuda = trainer.groups.device.type == "cuda"
    passes = 0.0

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() if cuda else time.process_time()

    run = trainer.model.forward_backward

    def timed_run(*arguments: Any, **options: Any) -> Any:
        nonlocal passes
        start = now()
        figures = run(*arguments, **options)
        passes += now() - start
        return figures

    trainer.model.forward_backward = timed_run  # type: ignore[method-assign]
    try:
        start = now()
        trainer.step(index)
        step = now() - start
    finally:
        trainer.model.forward_backward = run  # type: ignore[method-assign]
    return Turn(step, step - passes)


def step_peak(trainer: Trainer, index: int) -> int:
    """The most bytes that a step adds to what is kept."""
    if trainer.groups.device.type != "cuda":
        return peak_bytes(lambda: trainer.step(index))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.step(index)
    return torch.cuda.max_memory_allocated() - before


def measure(config: Config, groups: Groups, repeats: int) -> dict[str, dict[str, Any]]:
    """Times and bytes of every variant at the config's number of micro-batches."""
    trainers = {name: new_trainer(each, groups) for name, each in variants(config).items()}
    turns: dict[str, list[Turn]] = {name: [] for name in trainers}
    for turn in range(repeats + 1):
        for name, trainer in trainers.items():
            spent = timed_step(trainer, turn)
            if turn > 0:
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
            "kept": kept_bytes(trainer),
            "step_peak": step_peak(trainer, repeats + 1),
        }
        for name, trainer in trainers.items()
    }


def report(count: int, found: dict[str, dict[str, Any]]) -> str:
    """The table of one number of micro-batches."""
    header = (
        "micro-batches", "variant", "step (ms)", "x", "update (ms)", "x, update",
        "masters and state (MiB)", "all that is kept", "step's peak (MiB)", "x",
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
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs/tiny_muon_pc.yaml")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--repeats", type=int, default=3, help="turns that count")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("override", nargs="*", help="section.key=value of the config")
    return parser.parse_args(arguments)


def main() -> int:
    """Exit code."""
    options = parse()
    overrides = [*DEFAULTS, *options.override]
    config = load_config(options.config, [*overrides, "train.global_batch=16"])
    groups = process_groups.initialize()
    figures = {}
    for count in options.microbatches:
        found = measure(with_microbatches(config, count, groups), groups, options.repeats)
        figures[count] = found
        if groups.rank == 0:
            print(report(count, found), "\n", flush=True)
    if groups.rank == 0 and options.json:
        chosen = {key: str(value) for key, value in vars(options).items() if key != "json"}
        machine = {"torch": torch.__version__, "cores": os.cpu_count(), "options": chosen}
        options.json.write_text(json.dumps({"machine": machine, "steps": figures}, indent=2) + "\n")
    process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
