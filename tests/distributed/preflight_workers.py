"""Functions that the ranks run in the tests of scripts/preflight.py."""

import time
from dataclasses import replace

import torch.distributed as dist

from scripts.preflight import REPEATS, checks, copy_check, over_ranks, start


def with_faults(wrong: int, slow: int) -> tuple[list[str], list[str], dict[str, float]]:
    """Copy memory on all ranks; one rank changes a number once and one is slower. Also return the
    amount of every check of 3 MB."""
    device = start()
    check = copy_check(device, 1 << 12)
    rank, turns = dist.get_rank(), iter(range(1 + REPEATS))

    def run() -> None:
        check.run()
        time.sleep(1.0 if rank == slow else 0.1)
        if next(turns) == 1 and rank == wrong:
            check.result[7] += 1

    row = over_ranks(replace(check, run=run), device)
    amounts = {each.name: each.amount for each in checks(device, 3_000_000)}
    dist.destroy_process_group()
    return row.wrong, row.slow, amounts
