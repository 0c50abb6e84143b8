"""Exchanges of plain values between ranks, in which every rank answers as this one.

Ranks exchange plain values when a run starts and when it is saved. A rehearsed rank receives its
own values; functions that need different values from all ranks are replaced below, by name.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from parallel.checkpoint import state_writer
from parallel.checkpoint.state import check_fits
from parallel.checkpoint.state_writer import StatePlanner
from training.monitor import matrix_figures as figures
from training.rehearsal.program import place, put, replace
from training.rehearsal.trace import Call, Trace


def install(trace: Trace) -> None:
    """Replace exchanges of plain values, for the life of this process."""

    def note(name: str, group: Any = None) -> None:
        """Over NCCL plain values pass through the device, and the host waits for their sizes."""
        group = group or c10d._get_default_group()
        on_device = dist.get_backend(group) == "nccl"
        if on_device:
            trace.synchronize(name)
        trace.calls.append(
            Call(group.ranks, group.channel, name, "", 0, 0, on_device, place=place())
        )

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        note("all_gather_object", group)
        values[:] = [value] * len(values)

    def gather_object(
        value: Any, values: list[Any] | None = None, dst: int | None = None, group: Any = None,
        group_dst: int | None = None,
    ) -> None:  # fmt: skip
        note("gather_object", group)
        if values is not None:
            values[:] = [value] * len(values)

    def broadcast_object_list(values: list[Any], *_: Any, group: Any = None, **__: Any) -> None:
        note("broadcast_object_list", group)

    def first_rank(call: Callable[[], Any]) -> Any:
        """Return the result of `call`: every rehearsed rank counts as the first."""
        note("broadcast_object_list")
        return call()

    for module in (dist, c10d):
        for function in (all_gather_object, gather_object, broadcast_object_list):
            put(module, function.__name__, function)
    replace(state_writer.first_rank, first_rank)
    # Whether all ranks together write everything.
    put(StatePlanner, "create_global_plan", lambda self, plans: (plans, None))
    put(StatePlanner, "stage", _without_files(StatePlanner.stage))
    # Whether all ranks together request everything in a checkpoint.
    replace(check_fits, lambda *_, **__: None)
    # Figures that combine matrices inspected by other ranks.
    put(figures, "pair", lambda units: None)


def _without_files(real: Callable[..., SavePlan]) -> Callable[..., SavePlan]:
    """The copies to the host are real, but no process writes them to files."""

    def stage(self: StatePlanner, *arguments: Any) -> SavePlan:
        real(self, *arguments)
        self.index = Metadata({})  # every rehearsed rank writes it
        return SavePlan([])

    return stage
