"""Tiny programs to rehearse, and checks of their reports."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.plan.devices import DEVICES
from tests.run_configs import tiny_config
from tests.tiny_families import overrides, settings
from training.config import Config, check
from training.rehearsal.rank import PLAIN_STEP, Job, RankReport, error_with_line, install
from training.rehearsal.trace import Trace

H100 = DEVICES["h100"]
Perform = Callable[[Sequence[Job]], list[RankReport]]


@dataclass(frozen=True)
class BrokenJob(Job):
    """A job that first calls `before`, if given, to break the program."""

    before: Callable[[], None] | None = None

    def perform(self, say: Callable[[str], None] = lambda _: None) -> RankReport:
        """Rehearse the broken program."""
        if self.before is not None:
            self.before()
        return super().perform(say)


class ToldJob(Job):
    """A job that writes its progress to a file next to the run folder."""

    def perform(self, say: Callable[[str], None] = lambda _: None) -> RankReport:
        """Rehearse the job."""
        told: list[str] = []
        report = super().perform(told.append)
        Path(f"{self.config.run.dir}.told").write_text("\n".join(told), encoding="utf-8")
        return report


@dataclass(frozen=True)
class TracedCall:
    """A call of a function on one simulated device, without a run."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def perform(self, say: Callable[[str], None] = lambda _: None) -> RankReport:
        """Call the function with simulated device tensors, and count its launches."""
        trace, problem = Trace(H100), None
        try:
            with install(trace, 1):
                self.function(*self.arguments)
        except Exception as error:
            problem = error_with_line(error)
        trace.keep_peak()
        return RankReport(0, None, problem, trace.counts)


ALLOWED_READS = {
    "rows of each expert at models/blocks/experts.py": (
        "an all-to-all wants the rows of each rank in host memory: once per layer and pass"
    )
}
"""Maps the places at which the host may read values between logging steps, given as prefixes, to
reasons."""

SHAPE = {
    "model__hidden": 32,
    "model__ffn": 32,
    "model__kv_heads": 4,
    "train__global_batch": 4,
    "train__micro_batch": 1,
    "train__sequence_length": 32,
    "train__precision": "bf16",
    "train__compile": "null",
    "checkpoint__interval": 2,
    "monitors__interval": 0,
}
MONITORED = {"monitors__interval": 2}
"""Enables the monitors, which take as long as everything else."""


def program(
    folder: Path, world: int, family: str = "llama", rule: str = "muon", **changes: Any
) -> Config:
    """Return the config of a run that trains a tiny model in bf16, validates and saves."""
    values = SHAPE | overrides(settings(family)) | changes
    config = tiny_config(str(folder), rule, **values)
    check(config, world)
    return config


def called(perform: Perform, function: Callable[..., Any], *arguments: Any) -> RankReport:
    """Return the report of a call that must succeed."""
    (report,) = perform([TracedCall(function, arguments)])  # type: ignore[list-item]
    assert report.error is None, report.error
    return report


def plain_waits(report: RankReport) -> Counter[str]:
    """Count the host syncs in a plain step, without allowed reads."""
    found: Counter[str] = Counter()
    for (step, name), counts in report.counts.items():
        if step == PLAIN_STEP and name in ("forward_backward", "optimizer"):
            found += counts.host_reads + counts.synchronizations
    return Counter({p: n for p, n in found.items() if not p.startswith(tuple(ALLOWED_READS))})


def check_rank(report: RankReport) -> None:
    """Fail unless a rank succeeded, with ordered accesses, and without waiting for its device."""
    assert report.error is None, report.error
    assert report.findings == []
    assert not plain_waits(report), plain_waits(report)
    names = {name for _, name in report.counts}
    assert {"forward_backward", "optimizer", "monitors", "validation", "checkpoint"} <= names


def sound(perform: Perform, config: Config, world: int, rank: int = 0) -> RankReport:
    """Return the report of one rank, which must succeed."""
    (report,) = perform([Job(config, world, rank, H100)])
    check_rank(report)
    return report
