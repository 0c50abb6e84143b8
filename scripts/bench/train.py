"""Measure a recipe's training speed: tokens/s, MFU, memory, and each phase's share of a step.

    python scripts/bench/train.py --config configs/tiny_sso.yaml --steps 10 --json out.json
    torchrun --nproc-per-node 8 scripts/bench/train.py --config configs/llama1b_muon.yaml
    python scripts/bench/train.py --config configs/tiny_muon_pc.yaml --synthetic \
        --variant pc=null --variant pc.evaluator=in_graph

The script measures the trainer of pretrain.py, built from the config and its `key=value` overrides,
without checkpoints or validation. `--synthetic` trains on random tokens instead of data.

Each `--variant` adds overrides to the config; quote several overrides as a single argument. The
config and its variants take steps alternately. Column `x` is a variant's step time divided by the
config's step time. For column `x by update`, the variant's data, forward and backward times are
first replaced with the config's times. With variants, phases on a CPU are measured in CPU time. The
`data` phase reads tokens and verifies their hashes; `--variant data.verify=none` skips the
verification.

MFU is model FLOPs per token times tokens per second per device, divided by the device's dense
bfloat16 peak. Model FLOPs per token (models/families.py) are 6 for each parameter of an active
matrix, plus the FLOPs of causal attention; recomputation is not counted. The peaks
(parallel/plan/devices.py) are taken from NVIDIA data sheets, such as 989e12 for H100 SXM and H200.
For devices without a listed peak, set --peak-flops; otherwise MFU is null. On a GPU, phases are
timed with CUDA events, which do not block the step. Step times include the logging that the config
requests.

To trace steps of a training run, set `log.profile`. A rehearsal prints the source lines at which
the host waits for the device (docs/planning.md).
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.engine import import_engine

import_engine()

from models.families import model_size
from parallel.comm import groups as process_groups
from parallel.comm.collectives import from_all
from parallel.comm.groups import Groups, world_size
from parallel.plan.devices import peak_flops
from scripts.bench.measure import MIB, in_turn, print_table, record, write_json
from scripts.command import add_config, add_json, command, new_parser, warn_replaced, whole_number
from spectral.kernels.dispatch import device_name
from training.build import build_trainer
from training.config import Config, check, load_config
from training.data.build_data import build_data, on_mock_tokens, with_vocabulary
from training.errors import InputError
from training.lifecycle.pace import performance
from training.loop import Loop
from training.machine.backends import check_backends
from training.machine.start import start_groups
from training.step import Trainer

CONFIG = "the config"
WARM_UP = 3
"""Number of untimed steps at the start, for the config and for each variant."""
PHASES: Final = (
    "data", "forward", "backward", "gradient reduction", "clip", "optimizer", "wait for weights",
    "logging", "other",
)  # fmt: skip
"""The phases of a step, without overlap. "gradient reduction" and "wait for weights" count only
the time that the step spends waiting. "backward" is the time spent in Megatron's schedule minus the
forward time, so it includes recomputation."""
PASSES: Final = ("data", "forward", "backward")


class Phases:
    """Measures the time spent in phases, with CUDA events on a GPU and with `clock` on a CPU.

    CUDA events do not block the host. If phases are nested, time is attributed to the innermost
    phase.
    """

    def __init__(
        self, device: torch.device, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.cuda = device.type == "cuda"
        self.clock = clock
        self._open = ["other"]
        self._marks: list[tuple[Any, str]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time spent in a `with` block to phase `name`."""
        self._open.append(name)
        self._mark()
        try:
            yield
        finally:
            self._open.pop()
            self._mark()

    def restart(self) -> None:
        """Discard previous times and start measuring."""
        self._marks.clear()
        self._mark()

    def seconds(self) -> dict[str, float]:
        """Wait for the device, then return the seconds spent in each phase since `restart`."""
        self._mark()
        if self.cuda:
            torch.cuda.synchronize()
        totals = dict.fromkeys(PHASES, 0.0)
        for (begin, name), (end, _) in pairwise(self._marks):
            totals[name] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        return totals

    def _mark(self) -> None:
        if not self.cuda:
            self._marks.append((self.clock(), self._open[-1]))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, self._open[-1]))


def watch(trainer: Trainer, phases: Phases) -> None:
    """Wrap the trainer's methods so that `phases` times all subsequent steps."""
    model, optimizer = trainer.model, trainer.optimizer
    calls: list[tuple[Any, str, str]] = [
        (model, "forward_backward", "backward"),
        (model, "finish_gradients", "gradient reduction"),
        (optimizer, "clip", "clip"),
        (optimizer, "step", "optimizer"),
        (trainer, "figures", "logging"),
        (trainer.pace, "figures", "logging"),
        (trainer.monitors, "take", "logging"),
        *((domain, "wait", "wait for weights") for domain in model.domains),
        *((chunk, "forward", "forward") for chunk in model.chunks),
    ]
    for holder, name, phase in calls:
        setattr(holder, name, partial(_within, phases, phase, getattr(holder, name)))
    trainer.batches = _timed(trainer.batches, phases)


def _within(phases: Phases, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with phases.phase(name):
        return call(*args, **options)


def _timed(batches: Iterator[torch.Tensor], phases: Phases) -> Iterator[torch.Tensor]:
    while True:
        with phases.phase("data"):
            batch = next(batches)
        yield batch


class Side:
    """The trainer of the config or of a variant, with its phase timer."""

    def __init__(self, config: Config, groups: Groups, clock: Callable[[], float]) -> None:
        data, _ = build_data(config)
        self.trainer = build_trainer(config, groups, data, [])
        self.phases = Phases(groups.device, clock)
        self.loop = Loop(self.trainer)
        watch(self.trainer, self.phases)

    def turn(self, steps: int) -> dict[str, float]:
        """Take steps. Return each phase's seconds per step, and the wall-clock time as `step`."""
        self.phases.restart()
        begun = time.perf_counter()
        for _ in range(steps):
            self.loop.step_and_report()
        spent = self.phases.seconds() | {"step": time.perf_counter() - begun}
        return {name: seconds / steps for name, seconds in spent.items()}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    add_config(parser)
    parser.add_argument(
        "--variant", action="append", default=[], metavar='"key=value ..."',
        help="also measure the config with these additional overrides; can be given repeatedly",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=whole_number(), default=10, help="number of timed steps (default: 10)"
    )
    parser.add_argument("--synthetic", action="store_true", help="train on random tokens")
    parser.add_argument(
        "--peak-flops", type=float, help="dense bf16 peak performance of one device (FLOP/s)"
    )
    add_json(parser)
    return parser.parse_intermixed_args(arguments)


def variants(options: argparse.Namespace) -> dict[str, Config]:
    """Load the config and its variants, adapt them for the benchmark, and return them by name.

    Raises InputError if a variant changes the parallel layout.
    """
    warn_replaced(options.overrides)
    overrides = {CONFIG: "", **{text: text for text in options.variant}}
    configs = {
        name: with_vocabulary(load_config(options.config, [*options.overrides, *text.split()]))
        for name, text in overrides.items()
    }
    for name, config in configs.items():
        if config.parallel != configs[CONFIG].parallel:
            raise InputError(f"--variant must not change the parallel section, got {name}")
        # Runs always log their last step, so the last step must come after the measured steps. Drop
        # the batch ramp, so that all steps use the full batch.
        steps = max(config.train.steps, WARM_UP + options.steps + 3)
        train = replace(config.train, steps=steps, exit_step=None, batch_ramp=())
        configs[name] = replace(config, train=train)
    if options.synthetic:
        return {name: on_mock_tokens(config) for name, config in configs.items()}
    return configs


def peak_bytes(device: torch.device) -> int:
    """On a GPU, return the peak allocated memory since the last reset. On a CPU, return the peak
    resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure(sides: Mapping[str, Side], steps: int) -> dict[str, dict[str, Any]]:
    """Return the memory on this rank and the median times of the config and of each variant."""
    device = next(iter(sides.values())).trainer.groups.device
    for side in sides.values():
        side.turn(WARM_UP)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    # Without variants, run all steps in one call, so that the host runs ahead of a GPU as usual.
    alone = len(sides) == 1
    calls = {name: partial(side.turn, steps if alone else 1) for name, side in sides.items()}
    turns = in_turn(calls, 1 if alone else steps, warm_up=0)
    return {
        name: {
            **{key: statistics.median(turn[key] for turn in turns[name]) for key in turns[name][0]},
            "optimizer_bytes": side.trainer.optimizer.memory_bytes(),
            "peak_bytes": peak_bytes(device),
        }
        for name, side in sides.items()
    }


def summary(trainer: Trainer, ranks: list[dict[str, Any]], peak: float | None) -> dict[str, Any]:
    """Return statistics across ranks: maximum step time and memory, and mean phase times."""
    config = trainer.config
    tokens = config.train.global_batch * config.train.sequence_length
    flops = model_size(config.model, trainer.data.attended_length()).flops_per_token
    seconds = max(rank["step"] for rank in ranks)
    speed = performance(
        tokens=tokens, seconds=seconds, devices=len(ranks), flops_per_token=flops, peak=peak
    )
    phases = {name: sum(rank[name] for rank in ranks) / len(ranks) for name in PHASES}
    total = sum(phases.values())
    mfu = speed.get("perf/mfu")
    return {
        "tokens_per_second": speed["perf/tokens_per_sec"],
        "tokens_per_second_per_device": speed["perf/tokens_per_sec_per_gpu"],
        "mfu": None if mfu is None else mfu / 100,
        "seconds_per_step": seconds,
        "tokens_per_step": tokens,
        "flops_per_token": flops,
        "peak_flops": peak,
        "peak_memory_bytes": max(rank["peak_bytes"] for rank in ranks),
        "optimizer_bytes": max(rank["optimizer_bytes"] for rank in ranks),
        "ranks": len(ranks),
        "phase_seconds": phases,
        "phase_shares": {name: spent / total for name, spent in phases.items()},
    }


def show(result: dict[str, Any]) -> None:
    """Print the config's statistics in human-readable form."""
    mfu = "unknown" if result["mfu"] is None else f"{100 * result['mfu']:.1f}%"
    print(
        f"{result['tokens_per_second']:,.0f} tokens/s on {result['ranks']} x {result['device']}, "
        f"{1000 * result['seconds_per_step']:.1f} ms per step, MFU {mfu}, "
        f"peak {result['peak_memory_bytes'] / 2**30:.2f} GiB"
    )
    seconds, shares = result["phase_seconds"], result["phase_shares"]
    print_table(
        [{"phase": name, "ms": 1e3 * seconds[name], "%": 100 * shares[name]} for name in PHASES]
    )


def compared(sides: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the table rows that compare the config with its variants."""

    def spent(figures: Mapping[str, Any]) -> tuple[float, float]:
        phases = figures["phase_seconds"]
        step = sum(phases.values())
        return step, step - sum(phases[name] for name in PASSES)

    step, update = spent(sides[CONFIG])
    rows = []
    for name, figures in sides.items():
        step_spent, update_spent = spent(figures)
        rows.append(
            {
                "variant": name,
                "step (ms)": 1e3 * step_spent,
                "x": step_spent / step,
                "update (ms)": 1e3 * update_spent,
                "x by update": 1 + (update_spent - update) / step,
                "masters and state (MiB)": figures["optimizer_bytes"] / MIB,
            }
        )
    return rows


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the config and its variants. Print and write the results on rank 0."""
    options = parse(arguments)
    configs = variants(options)
    config = configs[CONFIG]
    check(config, world_size())
    groups = start_groups(config)
    check_backends(config, groups.device)
    clock = time.perf_counter if len(configs) == 1 else time.process_time
    try:
        sides = {name: Side(each, groups, clock) for name, each in configs.items()}
        measured = measure(sides, options.steps)
        peak = options.peak_flops or peak_flops(device_name(groups.device))
        summaries = {
            name: summary(side.trainer, from_all(measured[name]), peak)
            for name, side in sides.items()
        }
        result = summaries[CONFIG] | {"warmup": WARM_UP, "steps": options.steps}
        if groups.rank == 0:
            result = record("scripts/bench/train.py", arguments, groups.device, result)
            show(result)
            if len(summaries) > 1:
                print_table(compared(summaries))
            others = {name: figures for name, figures in summaries.items() if name != CONFIG}
            write_json(options.json, {**result, "variants": others})
    finally:
        process_groups.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
