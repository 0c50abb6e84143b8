"""Rehearse one rank in this process, which cannot be used for anything else afterwards.

The rehearsal runs the config for a few steps. The last step includes all periodic work.
"""

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from models import initialize as initial_weights
from parallel.comm import groups
from parallel.plan.devices import Device
from spectral.kernels.dispatch import has_triton
from training.build import build_trainer
from training.config import Config
from training.data.build_data import on_mock_tokens
from training.dry_run import compiled_on_gpu, fused_on_gpu
from training.machine.backends import has_liger
from training.monitor.monitors import steps_compared
from training.planning.layout_search import changed
from training.rehearsal import fake_cuda, fake_kernels, process_groups
from training.rehearsal.device_tensors import DeviceTensors
from training.rehearsal.program import name_of, replace_everywhere
from training.rehearsal.trace import DEFAULT_STREAM, OPTIMIZER, STEP, Call, Counts, Trace
from training.run import train
from training.step import Trainer

PLAIN_STEP = 2
"""The step that represents all plain steps, i.e. steps without periodic work."""

MICROBATCHES = 4
"""Maximum number of micro-batches per step in a rehearsal without pipeline parallelism. Further
micro-batches are assumed to be the same."""


@dataclass(frozen=True)
class Scenario:
    """A config modified for a rehearsal. The last step is monitored, validated and saved.

    microbatches   number of micro-batches per step and rank in the real run
    rehearsed      number of rehearsed micro-batches per step and rank
    """

    config: Config
    microbatches: int
    rehearsed: int


def scenario(config: Config, world: int, folder: Path) -> Scenario:
    """Return the scenario for `config` on `world` ranks. All output goes to `folder`."""
    config = on_mock_tokens(with_known_kernels(config))
    parallel, train = config.parallel, config.train
    data = world // parallel.model_ranks
    microbatches = train.global_batch // (train.micro_batch * data)
    enough = 3 * parallel.pipeline if parallel.pipeline > 1 else MICROBATCHES
    rehearsed = min(microbatches, enough)
    # The last step is monitored. At least one plain step and, with a CUDA graph, one replay come
    # before it.
    compared = 0 if config.monitors.interval == 0 else steps_compared(config.monitors)
    graph = 4 if config.optimizer.distributed.cuda_graph else 0
    due = max(PLAIN_STEP + 1, compared + 1, graph)
    changes = {
        "run.dir": str(folder / "run"),
        "data.workers": 0,
        "data.tokenizer": None,
        "train.steps": max(train.steps, due),
        "train.exit_step": due,
        "train.global_batch": rehearsed * train.micro_batch * data,
        "train.batch_ramp": (),
        "checkpoint.interval": due if config.checkpoint.interval else 0,
        "checkpoint.initialize_from": None,
        "stop.slurm_margin_seconds": None,
        "watchdog.hang_seconds": None,
        "log.interval": due,
        "log.trackers": (),
        "log.profile": None,
        "monitors.interval": 0 if config.monitors.interval == 0 else due,
        "tasks.interval": 0,
        "validation.interval": 0,
        "validation.samples": 2 * train.micro_batch * data,
    }
    return Scenario(changed(config, changes), microbatches, rehearsed)


def with_known_kernels(config: Config) -> Config:
    """Return `config` with kernels that rehearsals support.

    The aot_eager backend replaces inductor. If liger-kernel is not installed on this machine, the
    loss is rehearsed operation by operation. If triton is not installed, backward passes are also
    compiled.
    """
    compiled = compiled_on_gpu(config) and config.train.compile != "aot_eager"
    train = replace(config.train, compile="aot_eager" if compiled else None)
    if train.fused_backward == "auto":
        kernels = fused_on_gpu(config) and has_triton()
        train = replace(train, fused_backward="triton" if kernels else None)
    if not has_liger():
        train = replace(train, fused_loss=None)
    # PyTorch's attention kernel has the same bytes and FLOPs, and requires no package.
    return replace(config, train=train, model=replace(config.model, attention_kernel="auto"))


@dataclass(frozen=True)
class RankReport:
    """The report of one rank.

    error    first error and its source line; None if there was no error
    counts   counts by step and phase
    marks    counts at the start of each forward pass in step `PLAIN_STEP`
    findings messages about unordered accesses and float32 matmuls in TF32
    calls    collectives in program order
    side_pools        bytes reserved by the allocator for streams other than the default stream
    """

    rank: int
    scenario: Scenario
    error: str | None = None
    counts: dict[tuple[int, str], Counts] = field(default_factory=dict)
    marks: list[Counts] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    side_pools: int = 0

    def part(self, step: int, phase: str) -> Counts:
        """Return the counts of a phase of a step."""
        return self.counts.get((step, phase), Counts())

    @cached_property
    def phases(self) -> dict[str, Counts]:
        """The rank's counts for each phase in `Report.phases`."""
        last = self.scenario.config.train.last
        plain = [self.part(PLAIN_STEP, name) for name in (STEP, OPTIMIZER)]
        looked = [self.part(last, name) for name in (STEP, OPTIMIZER, "monitors")]
        added = looked[0].add(looked[1]).add(looked[2]).add(plain[0], -1).add(plain[1], -1)
        more = self.scenario.microbatches - self.scenario.rehearsed
        phases = {
            STEP: plain[0].add(self.micro_batch(plain[0]), more),
            OPTIMIZER: plain[1],
            "monitors": added,
            "validation": self.part(last, "validation"),
            "checkpoint": self.part(last, "checkpoint"),
        }
        for name in (STEP, OPTIMIZER):
            # From step 2 on, memory includes tensors that the monitors keep for comparison.
            phases[name].peak_memory_bytes = self.part(1, name).peak_memory_bytes
        return phases

    def micro_batch(self, counts: Counts) -> Counts:
        """Return the counts for one micro-batch.

        This is the difference between the counts at the last forward pass and the counts one round
        of forward passes earlier, divided by the number of micro-batches per round. If there is
        only one round, `counts` is divided by the number of micro-batches instead.
        """
        parallel = self.scenario.config.parallel
        round_of = parallel.pipeline * parallel.virtual_pipeline
        if len(self.marks) <= round_of:
            return Counts().add(counts, 1 / self.scenario.rehearsed)
        latest = self.marks[-1].add(self.marks[-1 - round_of], -1)
        return Counts().add(latest, 1 / parallel.pipeline)


@dataclass(frozen=True)
class Job:
    """A rehearsal of one rank.

    compiled   whether Triton kernels are also compiled for the device
    """

    config: Config
    world: int
    rank: int
    device: Device
    compiled: bool = False

    def perform(self, say: Callable[[str], None] = lambda _: None) -> RankReport:
        """Rehearse the rank in this process, reporting progress through `say`."""
        trace = Trace(self.device, self.rank)
        mode = install(trace, self.world, compiled=self.compiled)
        problem = None
        with tempfile.TemporaryDirectory(prefix="rehearsal-") as folder:
            rehearsed = scenario(self.config, self.world, Path(folder))
            trace.moved = lambda: say(place_in_run(trace, rehearsed))
            say(f"rank {self.rank}: building the model")
            try:
                with mode, torch.autograd.set_multithreading_enabled(False):
                    run(rehearsed, trace)
            except Exception as error:
                problem = error_with_line(error)
        trace.keep_peak()
        pools = trace.memory.pools
        return RankReport(
            self.rank,
            rehearsed,
            problem,
            counts=trace.counts,
            marks=trace.marks.get(PLAIN_STEP, []),
            findings=[*trace.order.findings, *sorted(trace.imprecise)],
            calls=trace.calls,
            side_pools=sum(size for stream, size in pools.items() if stream != DEFAULT_STREAM),
        )


def install(trace: Trace, world: int, *, compiled: bool = False) -> DeviceTensors:
    """Until this process exits, simulate the GPU and all other ranks."""
    os.environ |= {
        "RANK": str(trace.rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(trace.rank % trace.device.node_size),
        "LOCAL_WORLD_SIZE": str(min(world, trace.device.node_size)),
    }
    os.environ.pop("MASTER_ADDR", None)
    mode = DeviceTensors(trace)
    mode.install()
    fake_cuda.install(trace)
    process_groups.install(trace, world)
    fake_kernels.install(trace, mode, compiled=compiled)
    # The copy of initial weights to the device affects the report, but their values do not.
    replace_everywhere(
        initial_weights.draws, lambda units, *_, **__: (torch.empty(unit.shape) for unit in units)
    )
    return mode


def run(rehearsed: Scenario, trace: Trace) -> None:
    """Start the process groups and run the scenario."""
    config = rehearsed.config
    layout = groups.initialize(config.parallel.layout, device_type="cuda")
    real = build_trainer

    def observed(*arguments: Any, **options: Any) -> Trainer:
        trainer = real(*arguments, **options)
        for chunk in trainer.model.chunks:
            chunk.register_forward_pre_hook(lambda *_: trace.mark())
        return trainer

    replace_everywhere(build_trainer, observed)
    train(config, layout, resume="none")


def place_in_run(trace: Trace, rehearsed: Scenario) -> str:
    """Describe the progress of a rehearsal: rank, step, phase, and number of the forward pass."""
    text = f"rank {trace.rank}: step {trace.step} of {rehearsed.config.train.last}, {trace.phase}"
    if trace.phase == STEP:
        passes = len(trace.marks.get(trace.step, ()))
        chunks = rehearsed.config.parallel.virtual_pipeline
        text += f", forward pass {passes} of {rehearsed.rehearsed * chunks}"
    return text


def error_with_line(error: BaseException) -> str:
    """Format an error: its type, its message, and the innermost source line in the project or
    megatron-core."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [f"{name}:{f.lineno}" for f in frames if (name := name_of(f.filename)) is not None]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}" + (f" (at {places[-1]})" if places else "")
