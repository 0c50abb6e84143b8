"""Run a rehearsal of one or more ranks, from the config to a report as text and JSON."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, Final

from parallel.plan.devices import RESERVE, Device
from parallel.plan.planner import Plan
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


@dataclass(frozen=True)
class Report:
    """The report of a rehearsal. If several ranks are rehearsed, all values are maxima over ranks.

    planned      plan of the same run
    reports      reports of the rehearsed ranks
    mismatches   result of `matching.mismatches`, if all ranks are rehearsed
    """

    planned: Plan
    reports: Sequence[RankReport]
    mismatches: Sequence[str] = ()

    @cached_property
    def phases(self) -> dict[str, Counts]:
        """Counts of a step without periodic work (forward_backward and optimizer), of the
        additional work in a monitored and logged step (monitors), of a validation with two
        micro-batches from each set, and of a save."""
        of_ranks = [each.phases for each in self.reports]
        return {name: maxima(phases[name] for phases in of_ranks) for name in PHASES}

    @property
    def findings(self) -> list[str]:
        """Distinct messages about unordered accesses and float32 matmuls in TF32."""
        return list(dict.fromkeys(text for each in self.reports for text in each.findings))

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the run in bytes."""
        setups = (each.part(0, SETUP) for each in self.reports)
        return max(counts.peak_memory_bytes for counts in (*setups, *self.phases.values()))

    @property
    def side_stream_pools_bytes(self) -> int:
        """Bytes that the allocator reserves for streams other than the default stream."""
        return max(each.side_pools for each in self.reports)

    @property
    def micro_batch_elementwise_bytes(self) -> float:
        """Bytes moved by a micro-batch outside matmuls."""
        return max(
            each.micro_batch(each.part(PLAIN_STEP, STEP)).elementwise_bytes for each in self.reports
        )

    @property
    def mfu(self) -> float:
        """Model FLOPs divided by the FLOPs possible at the device's peak in `modelled_seconds`."""
        possible = self.modelled_seconds * self.planned.peak_flops
        return self.planned.model_flops / possible if possible else 0.0

    @cached_property
    def modelled_seconds(self) -> float:
        """Modelled time of a step without periodic work on the slowest rank, including its wait for
        other stages.

        As in a plan (parallel/plan/step_time.py), gradient reduction overlaps with the backward
        pass of the last micro-batch. Weight gathering overlaps with the forward pass of the first
        micro-batch.
        """
        slowest, parallel = 0.0, self.reports[0].scenario.config.parallel
        passes: dict[int, float] = {}
        for report in self.reports:
            computing, optimizer = report.phases[STEP], report.phases[OPTIMIZER]
            each = report.micro_batch(computing)
            both = computing.add(optimizer)
            seconds = both.exposed_seconds
            for kind, share in (("gradients", BACKWARD), ("weights", 1 - BACKWARD)):
                seconds += max(0.0, both.sending.get(kind, 0.0) - share * each.kernel_seconds)
            slowest = max(slowest, seconds)
            stage = report.rank * parallel.pipeline // self.planned.gpus
            passes[stage] = max(each.exposed_seconds, passes.get(stage, 0.0))
        waiting = (sum(passes.values()) - max(passes.values())) / parallel.virtual_pipeline
        return slowest + waiting

    @property
    def error(self) -> str | None:
        """Message on the first failure: an error and its source line, running out of memory,
        unordered accesses or a hang. None if the run would succeed."""
        for each in self.reports:
            if each.error is not None:
                return f"rank {each.rank}: {each.error}"
        device = self.planned.device
        if self.peak_memory_bytes > device.room:
            phase = max(self.phases, key=lambda name: self.phases[name].peak_memory_bytes)
            return (
                f"out of memory in {phase}: {gib(self.peak_memory_bytes)} GiB of tensors, but "
                f"{device.name} has {gib(device.memory_bytes)} GiB, of which {RESERVE:.0%} is "
                "reserved"
            )
        if self.findings:
            return f"{len(self.findings)} unordered accesses, the first: {self.findings[0]}"
        return f"ranks disagree: {self.mismatches[0]}" if self.mismatches else None

    def as_dict(self) -> dict[str, Any]:
        """Return the contents of the JSON file."""
        phases, device = self.phases.items(), self.planned.device
        return {
            "ok": self.error is None,
            "gpus": self.planned.gpus,
            "ranks": [each.rank for each in self.reports],
            "device": device.name,
            "error": self.error,
            "phases": {name: counts.as_dict() for name, counts in phases},
            "findings": self.findings,
            "side_stream_pools_bytes": self.side_stream_pools_bytes,
            "planned_memory_bytes": self.planned.memory.total,
            "planned_seconds": self.planned.time.total,
            "modelled_seconds": self.modelled_seconds,
            "mfu": self.mfu,
            "micro_batch_elementwise_bytes": self.micro_batch_elementwise_bytes,
            "device_memory_bytes": device.memory_bytes,
            "peak_memory_bytes": self.peak_memory_bytes,
            "stream_order_findings": len(self.findings),
            "host_reads": {name: dict(c.host_reads.most_common()) for name, c in phases},
            "synchronizations": {
                name: dict(c.synchronizations.most_common()) for name, c in phases
            },
            "roofline": asdict(device),
        }


def maxima(counts: Iterable[Counts]) -> Counts:
    """Return the maximum of every count."""
    return reduce(lambda one, other: merged(one, other, max), counts, Counts())


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
    planned, device = report.planned, report.planned.device
    ranks = [each.rank for each in report.reports]
    lines = [
        f"rehearsed rank {listed(ranks)} of {planned.gpus} on {device.name}",
        table(HEADER, rows, numbers=True),
        f"peak memory {gib(report.peak_memory_bytes)} of {gib(device.memory_bytes)} GiB; "
        f"planned {gib(planned.memory.total)} GiB; the allocator keeps "
        f"{gib(report.side_stream_pools_bytes)} GiB for side streams",
        "modelled step, for comparing layouts and rules: "
        f"{1e3 * report.modelled_seconds:.4g} ms (planned: {1e3 * planned.time.total:.4g} ms), "
        f"MFU {report.mfu:.1%} (on published runs, the model is within 25%)",
        f"a micro-batch moves {report.micro_batch_elementwise_bytes / 1e9:.4g} GB outside matmuls",
    ]
    scenario = report.reports[0].scenario
    if scenario.rehearsed < scenario.microbatches:
        lines.append(
            f"{scenario.rehearsed} of {scenario.microbatches} micro-batches were rehearsed; the "
            "others are assumed to be the same"
        )
    plain = [report.phases[name] for name in (STEP, OPTIMIZER)]
    lines += waits("host reads", [counts.host_reads for counts in plain])
    lines += waits("other host waits", [counts.synchronizations for counts in plain])
    lines += [f"unordered: {finding}" for finding in report.findings[:SHOWN]]
    lines.append(
        "passed: the run would succeed"
        if report.error is None
        else f"the run would fail: {report.error}"
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
    return Report(planned, reports, different)


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
    return 0 if report.error is None else 1


def chosen(config: Config, rank: int | None, world: int) -> list[int]:
    """Return the ranks to rehearse: the first rank of each pipeline stage if `rank` is None, all
    ranks if `rank` is -1, and otherwise only `rank`."""
    if rank is None:  # the pipeline is the outermost axis of Megatron's ranks
        return list(range(0, world, world // config.parallel.pipeline))
    if rank >= world:
        raise ConfigError(f"--rank must be below --gpus {world}, got {rank}")
    return list(range(world)) if rank < 0 else [rank]
