"""A rehearsal from the config to the report: which ranks, in which processes."""

from collections.abc import Sequence

from parallel.plan.devices import Device
from training.config import Config
from training.dry_run import plan_run
from training.rehearsal.job import Job
from training.rehearsal.matching import mismatches
from training.rehearsal.processes import Processes
from training.rehearsal.report import Report, combined
from training.rehearsal.scenario import with_known_kernels


def rehearse(
    config: Config,
    world: int,
    device: Device,
    *,
    ranks: Sequence[int] | None = None,
    compiled: bool = False,
    before: str | None = None,
    processes: Processes | None = None,
) -> Report:
    """Rehearse `config` on `world` pretended GPUs of a kind.

    `ranks` None is the first rank of every pipeline stage. Where all ranks of the world are
    rehearsed, their collectives are compared. `compiled` also compiles Triton's kernels, `before`
    is that of `Job`, and `processes` where to rehearse. Raises GuardError if this machine cannot,
    RehearsalError if a process ended without a report."""
    chosen = first_ranks(config, world) if ranks is None else list(ranks)
    jobs = [Job(config, world, rank, device, compiled, before) for rank in chosen]
    if processes is None:
        with Processes() as some:
            reports = some.perform(jobs)
    else:
        reports = processes.perform(jobs)
    whole = len(chosen) == world and all(each.error is None for each in reports)
    different = mismatches({each.rank: each.calls for each in reports}) if whole else []
    report = combined(reports, world, device, different)
    planned = plan_run(with_known_kernels(config), world, device)
    report.planned, report.planned_seconds = planned.memory.total, planned.time.total
    return report


def first_ranks(config: Config, world: int) -> list[int]:
    """The first rank of every pipeline stage: Megatron numbers stages last."""
    stages = config.parallel.pipeline
    return [stage * (world // stages) for stage in range(stages)]
