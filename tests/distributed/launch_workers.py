"""What the ranks of the tests of the launcher run."""

import os
import time
import warnings

import torch
import torch.distributed as dist

from parallel.comm import groups as process_groups


def summed() -> dict[str, int]:
    """This rank's number, torch's threads, and the sum of all ranks' numbers."""
    process_groups.initialize()
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    found = {"rank": dist.get_rank(), "threads": torch.get_num_threads(), "sum": int(total)}
    process_groups.shutdown()
    return found


def fail(rank: int) -> None:
    """Raise on one rank while the others, which have said that they are here, would wait."""
    process_groups.initialize()
    print(f"rank {os.environ['RANK']} is here", flush=True)
    dist.barrier()
    if os.environ["RANK"] == str(rank):
        raise ValueError("as it was asked to")
    time.sleep(300)


def warn() -> None:
    """Call what a newer release of torch deprecates."""
    warnings.warn("there is a newer way", FutureWarning, stacklevel=1)
