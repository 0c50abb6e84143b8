"""What the ranks of the tests of scripts/preflight.py do."""

import time
from dataclasses import replace

import torch.distributed as dist

from scripts.preflight import copy_check, over_ranks, start


def with_faults(wrong: int, slow: int) -> tuple[list[str], list[str]]:
    """Copy memory on all ranks, of which one changes a number and one takes longer."""
    device = start()
    check = copy_check(device, 1 << 12)
    rank = dist.get_rank()

    def run() -> None:
        check.run()
        time.sleep(1.0 if rank == slow else 0.1)
        if rank == wrong:
            check.result[7] += 1

    row = over_ranks(replace(check, run=run), device)
    dist.destroy_process_group()
    return row.wrong, row.slow
