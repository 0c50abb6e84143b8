"""Functions that the ranks run in the tests of scripts/preflight.py."""

import os
import time
from dataclasses import replace
from unittest.mock import patch

import torch.distributed as dist

from scripts.preflight import (
    REPEATS,
    checks,
    copy_check,
    integers,
    matmul_check,
    over_ranks,
    start,
)


def with_faults(wrong: int, slow: int) -> tuple[list[str], list[str], dict[str, float], list[str]]:
    """Copy memory on all ranks, where one rank changes a number once and one rank is slower. Also
    return the amount of data in every check of 3 MB, on one node and on several nodes, and the
    ranks with a wrong product if products are inexact."""
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
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        amounts |= {each.name: each.amount for each in checks(device, 3_000_000)}
    # Products of these integers are rounded in float32.
    with patch("scripts.preflight.integers", lambda *of: 4097 * integers(*of)):
        product = over_ranks(matmul_check(device), device)
    dist.destroy_process_group()
    return row.wrong, row.slow, amounts, product.wrong
