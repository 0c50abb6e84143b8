"""What one process rehearses."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from parallel.plan.devices import Device
from training.config import Config
from training.rehearsal.rank import RankReport, rehearse_call, rehearse_rank


@dataclass(frozen=True)
class Job:
    """One rank of one config.

    compiled   whether Triton's kernels are compiled for the device as well
    before     `module:function` that is called first, None for nothing: tests break things by it
    continued  run folder whose newest checkpoint is loaded, None for a new run
    """

    config: Config
    world: int
    rank: int
    device: Device
    compiled: bool = False
    before: str | None = None
    continued: str | None = None


@dataclass(frozen=True)
class TracedCall:
    """A function that is called on one pretended device, with nothing of a run around it.

    function   `module:name`
    arguments  of the call
    """

    function: str
    arguments: tuple[Any, ...]
    device: Device


def perform(job: Job | TracedCall) -> RankReport:
    """Rehearse it, in this process."""
    if isinstance(job, TracedCall):
        module, name = job.function.split(":")
        return rehearse_call(getattr(import_module(module), name), job.arguments, job.device)
    if job.before is not None:
        module, name = job.before.split(":")
        getattr(import_module(module), name)()
    return rehearse_rank(
        job.config,
        job.world,
        job.rank,
        job.device,
        compiled=job.compiled,
        continued=job.continued,
    )
