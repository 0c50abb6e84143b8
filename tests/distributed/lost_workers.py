"""Functions that the ranks run in the tests of lost ranks: one rank exits, and the others call a
collective."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from parallel.checkpoint.state_writer import first_rank
from parallel.comm.collectives import CollectiveError, disagreements, from_all, on_first
from parallel.observe.activations import gathered
from parallel.observe.weight_watch import different
from parallel.optimizer.distributed_optimizer import check_agreement
from tests.distributed.state_workers import started


def left_alone() -> dict[str, str]:
    """Return rank 0's error messages for collectives that rank 1 never calls, because it has
    exited. Rank 1 returns nothing."""
    for _, groups in started([{}]):
        calls: dict[str, Callable[[], object]] = {
            "from_all": lambda: from_all("x"),
            "first_rank": lambda: first_rank(lambda: "x"),
            "on_first": lambda: on_first("x"),
            "settings": lambda: disagreements({"x": 1}),
            "owners": lambda: check_agreement(["x"], groups.dense.replicas),  # noqa: B023
            "activations": lambda: gathered(torch.ones(2, 3), groups.dense.replicas),  # noqa: B023
            "copies": lambda: different({"x": torch.ones(2)}, groups.dense.replicas),  # noqa: B023
        }
        dist.barrier()
        if groups.rank == 1:
            dist.destroy_process_group()
            return {}
        return {name: error_of(call) for name, call in calls.items()}
    raise AssertionError("no layout")


def error_of(call: Callable[[], object]) -> str:
    """Return the message of the CollectiveError that a call raises."""
    try:
        for _ in range(3):  # sending before the other rank has left raises no error
            call()
    except CollectiveError as error:
        return str(error)
    raise AssertionError("no error")
