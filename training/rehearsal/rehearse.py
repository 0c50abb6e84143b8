"""Run a rehearsal of one or more ranks, from the config to a report as text and JSON."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from parallel.plan.devices import RESERVE, Device
from training.config import Config, check
from training.data.build_data import on_mock_tokens
from training.dry_run import device_named, plan_run
from training.errors import ConfigError
from training.planning.plan_commands import warn
from training.rehearsal.fake_driver import GuardError
from training.rehearsal.matching import mismatches
from training.rehearsal.processes import perform
from training.rehearsal.rank import PLAIN_STEP, Job, RankReport, with_known_kernels
from training.rehearsal.trace import OPTIMIZER, PHASES, SETUP, STEP, Counts, merged
from training.report.text import table

SHOWN: Final = 8
BACKWARD: Final = 0.66
"""Fraction of a micro-batch's compute time that is spent in the backward pass."""


@dataclass
class Report:
    """The report of a rehearsal. If several ranks are rehearsed, all values are maxima over ranks.

    error      first error and its source line; None if the run would succeed
    phases     counts for a step without periodic work (forward_backward and optimizer), for the
               additional work in a monitored and logged step (monitors), for a validation with two
               micro-batches from each set, and for a save
    planned_memory_bytes, planned_seconds   memory and step time according to the plan
    modelled_seconds   modelled time of a step without periodic work
    mfu        model FLOPs divided by the FLOPs possible at the device's peak in `modelled_seconds`
    micro_batch_elementwise_bytes   bytes moved by a micro-batch outside matmuls
    """

    gpus: int
    ranks: list[int]
    device: Device
    error: str | None = None
    phases: dict[str, Counts] = field(default_factory=dict)
    setup: Counts = field(default_factory=Counts)
    findings: list[str] = field(default_factory=list)
    microbatches: tuple[int, int] = (0, 0)
    side_stream_pools_bytes: int = 0
    planned_memory_bytes: int = 0
    planned_seconds: float = 0.0
    modelled_seconds: float = 0.0
    mfu: float = 0.0
    micro_batch_elementwise_bytes: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the run would succeed."""
        return self.error is None

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the run in bytes."""
        return max(
            [self.setup.peak_memory_bytes, *(c.peak_memory_bytes for c in self.phases.values())]
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        phases = self.phases.items()
        figures = {k: v for k, v in vars(self).items() if k not in ("setup", "microbatches")}
        return (
            {"ok": self.ok}
            | figures
            | {
                "device": self.device.name,
                "device_memory_bytes": self.device.memory_bytes,
                "peak_memory_bytes": self.peak_memory_bytes,
                "stream_order_findings": len(self.findings),
                "phases": {name: counts.as_dict() for name, counts in phases},
                "host_reads": {name: dict(c.host_reads.most_common()) for name, c in phases},
                "synchronizations": {
                    name: dict(c.synchronizations.most_common()) for name, c in phases
                },
                "roofline": asdict(self.device),
            }
        )


def combined(
    reports: Sequence[RankReport], world: int, device: Device, mismatches: Sequence[str] = ()
) -> Report:
    """Combine the reports of all rehearsed ranks. `mismatches` is the result of
    `matching.mismatches`."""
    report = Report(world, [each.rank for each in reports], device)
    report.phases = {name: Counts() for name in PHASES}
    for each in reports:
        report.setup = merged(report.setup, each.counts.get((0, SETUP), Counts()), max)
        for name, counts in phases_of(each).items():
            report.phases[name] = merged(report.phases[name], counts, max)
        report.findings += [text for text in each.findings if text not in report.findings]
        report.side_stream_pools_bytes = max(report.side_stream_pools_bytes, each.side_pools)
        moved = micro_batch(each, each.counts.get((PLAIN_STEP, STEP), Counts())).elementwise_bytes
        moved = max(moved, report.micro_batch_elementwise_bytes)
        report.micro_batch_elementwise_bytes = moved
        report.microbatches = each.scenario.rehearsed, each.scenario.microbatches
    report.modelled_seconds = step_seconds(reports)
    report.error = first_error(reports, report, mismatches)
    return report


def step_seconds(reports: Sequence[RankReport]) -> float:
    """Return the modelled step time of the slowest rank, including its wait for other stages.

    As in a plan (parallel/plan/step_time.py), gradient reduction overlaps with the backward pass of
    the last micro-batch. Weight gathering overlaps with the forward pass of the first micro-batch.
    """
    slowest, parallel = 0.0, reports[0].scenario.config.parallel
    passes: dict[int, float] = {}
    for report in reports:
        phases = phases_of(report)
        computing, optimizer = phases["forward_backward"], phases["optimizer"]
        each = micro_batch(report, computing)
        both = computing.add(optimizer)
        seconds = both.exposed_seconds
        for kind, share in (("gradients", BACKWARD), ("weights", 1 - BACKWARD)):
            seconds += max(0.0, both.sending.get(kind, 0.0) - share * each.kernel_seconds)
        slowest = max(slowest, seconds)
        stage = report.rank * parallel.pipeline // report.world
        passes[stage] = max(each.exposed_seconds, passes.get(stage, 0.0))
    waiting = (sum(passes.values()) - max(passes.values())) / parallel.virtual_pipeline
    return slowest + waiting


def first_error(
    reports: Sequence[RankReport], report: Report, mismatches: Sequence[str]
) -> str | None:
    """Return a message on the first failure: an error, running out of memory, unordered accesses or
    a hang. Return None if there is no failure."""
    for each in reports:
        if each.error is not None:
            return f"rank {each.rank}: {each.error}"
    if report.peak_memory_bytes > report.device.room:
        sizes = {name: counts.peak_memory_bytes for name, counts in report.phases.items()}
        phase = max(sizes, key=lambda name: sizes[name])
        return (
            f"out of memory in {phase}: {gib(report.peak_memory_bytes)} GiB of tensors, but "
            f"{report.device.name} has {gib(report.device.memory_bytes)} GiB, of which "
            f"{RESERVE:.0%} is reserved"
        )
    if report.findings:
        return f"{len(report.findings)} unordered accesses, the first: {report.findings[0]}"
    return f"ranks disagree: {mismatches[0]}" if mismatches else None


def phases_of(report: RankReport) -> dict[str, Counts]:
    """Return one rank's counts by phase."""
    last = report.scenario.config.train.last

    def counts(step: int, name: str) -> Counts:
        return report.counts.get((step, name), Counts())

    plain = [counts(PLAIN_STEP, name) for name in ("forward_backward", "optimizer")]
    looked = [counts(last, name) for name in ("forward_backward", "optimizer", "monitors")]
    added = looked[0].add(looked[1]).add(looked[2]).add(plain[0], -1).add(plain[1], -1)
    more = report.scenario.microbatches - report.scenario.rehearsed
    phases = {
        "forward_backward": plain[0].add(micro_batch(report, plain[0]), more),
        "optimizer": plain[1],
        "monitors": added,
        "validation": counts(last, "validation"),
        "checkpoint": counts(last, "checkpoint"),
    }
    for name in ("forward_backward", "optimizer"):
        # From step 2 on, memory includes tensors that the monitors keep for comparison.
        phases[name].peak_memory_bytes = counts(1, name).peak_memory_bytes
    return phases


def micro_batch(report: RankReport, counts: Counts) -> Counts:
    """Return the counts for one micro-batch.

    This is the difference between the counts at the last forward pass and the counts one round of
    forward passes earlier, divided by the number of micro-batches per round. If there is only one
    round, `counts` is divided by the number of micro-batches instead.
    """
    stages = report.scenario.config.parallel.pipeline
    round_of = stages * report.scenario.config.parallel.virtual_pipeline
    if len(report.marks) <= round_of:
        return Counts().add(counts, 1 / report.scenario.rehearsed)
    return Counts().add(report.marks[-1].add(report.marks[-1 - round_of], -1), 1 / stages)


def report_text(report: Report) -> str:
    """Format the report as text: a table of phases, memory, time, host syncs, and a verdict."""
    rows = [
        (
            name,
            gib(counts.peak_memory_bytes),
            f"{counts.launches:,}",
            f"{counts.triton_launches:,}",
            f"{counts.collectives:,}",
            f"{counts.collective_bytes / 2**20:,.1f}",
            f"{counts.host_reads.total():,}",
            f"{counts.synchronizations.total():,}",
            f"{1e3 * counts.modelled_seconds:,.1f}",
        )
        for name, counts in report.phases.items()
    ]
    lines = [
        f"rehearsed rank {listed(report.ranks)} of {report.gpus} on {report.device.name}",
        table(HEADER, rows, numbers=True),
        f"peak memory {gib(report.peak_memory_bytes)} of {gib(report.device.memory_bytes)} GiB; "
        f"planned {gib(report.planned_memory_bytes)} GiB; the allocator keeps "
        f"{gib(report.side_stream_pools_bytes)} GiB for side streams",
        "modelled step, for comparing layouts and rules: "
        f"{1e3 * report.modelled_seconds:.4g} ms (planned: {1e3 * report.planned_seconds:.4g} ms), "
        f"MFU {report.mfu:.1%} (on published runs, the model is within 25%)",
        f"a micro-batch moves {report.micro_batch_elementwise_bytes / 1e9:.4g} GB outside matmuls",
    ]
    rehearsed, microbatches = report.microbatches
    if rehearsed < microbatches:
        lines.append(
            f"{rehearsed} of {microbatches} micro-batches were rehearsed; the others are assumed "
            "to be the same"
        )
    plain = [report.phases[name] for name in (STEP, OPTIMIZER)]
    lines += waits("host reads", [counts.host_reads for counts in plain])
    lines += waits("other host waits", [counts.synchronizations for counts in plain])
    lines += [f"unordered: {finding}" for finding in report.findings[:SHOWN]]
    lines.append(
        "passed: the run would succeed" if report.ok else f"the run would fail: {report.error}"
    )
    return "\n".join(lines)


def listed(ranks: Sequence[int]) -> str:
    """Format a list of ranks, truncated to the first `SHOWN`."""
    return ", ".join(map(str, ranks[:SHOWN])) + ", ..." * (len(ranks) > SHOWN)


HEADER: Final = (
    "phase", "GiB", "launches", "Triton's", "collectives", "MiB sent", "host reads",
    "synchronizations", "ms",
)  # fmt: skip


def waits(title: str, counters: Iterable[Counter[str]]) -> list[str]:
    """Return one line for each source line at which a step without periodic work waits for the
    device."""
    counts = sum(counters, Counter())
    return [f"{title} in every step: {count} {place}" for place, count in counts.most_common(SHOWN)]


def gib(size: float) -> str:
    """Format `size` in GiB with two decimals."""
    return f"{size / 2**30:.2f}"


def rehearse(
    config: Config,
    world: int,
    device: Device,
    *,
    ranks: Sequence[int] | None = None,
    compiled: bool = False,
) -> Report:
    """Rehearse `config` on `world` simulated GPUs of the same type.

    `ranks` defaults to the first rank of each pipeline stage. If all ranks are rehearsed, their
    collectives are compared. If `compiled` is True, Triton kernels are compiled. Raises GuardError
    if this machine cannot run rehearsals, and RehearsalError if a process exited without a report.
    """
    ranks = chosen(config, None, world) if ranks is None else ranks
    planned = plan_run(with_known_kernels(config), world, device)
    reports = perform([Job(config, world, rank, device, compiled) for rank in ranks])
    whole = len(ranks) == world and all(each.error is None for each in reports)
    different = mismatches({each.rank: each.calls for each in reports}) if whole else []
    report = combined(reports, world, device, different)
    report.planned_memory_bytes = planned.memory.total
    report.planned_seconds = planned.time.total
    if report.modelled_seconds:
        report.mfu = planned.model_flops / (report.modelled_seconds * planned.peak_flops)
    return report


def run(config: Config, options: argparse.Namespace) -> int:
    """Rehearse, print the report and write it as JSON. Return the exit code: 0 if the run would
    succeed, else 1.

    Raises ConfigError if the config, number of GPUs, rank or device is invalid, or if the machine
    cannot run rehearsals.
    """
    given, config = config, on_mock_tokens(config)
    check(config, options.gpus)
    ranks = chosen(config, options.rank, options.gpus)
    device = device_named(options.device or config.plan.device)
    warn(given)
    some = f"{'ranks' if len(ranks) > 1 else 'rank'} {listed(ranks)}"
    print(f"rehearsing {some} of {options.gpus:,} on {device.name}", file=sys.stderr)
    try:
        report = rehearse(
            config, options.gpus, device, ranks=ranks, compiled=options.compile_kernels
        )
    except GuardError as error:
        raise ConfigError(str(error)) from error
    print(report_text(report))
    if options.json is not None:
        Path(options.json).write_text(
            json.dumps(report.as_dict(), indent=2) + "\n", encoding="utf-8"
        )
    return 0 if report.ok else 1


def chosen(config: Config, rank: int | None, world: int) -> list[int]:
    """Return the ranks to rehearse: the first rank of each pipeline stage if `rank` is None, all
    ranks if `rank` is -1, and otherwise only `rank`."""
    if rank is None:  # the pipeline is the outermost axis of Megatron's ranks
        return list(range(0, world, world // config.parallel.pipeline))
    if rank >= world:
        raise ConfigError(f"--rank must be below --gpus {world}, got {rank}")
    return list(range(world)) if rank < 0 else [rank]
