#!/usr/bin/env python
"""Check all GPUs, links and collectives of a job before a long run and print a table.

    torchrun --nproc-per-node 8 scripts/preflight.py [--json FILE]
    sbatch --nodes=8 scripts/slurm/preflight.sbatch

Ranks compute and exchange integers, so results can be checked exactly. Each row of the table shows
the slowest and the median rate across ranks, and lists the ranks below 80% of the median. The exit
code is 1 if any result is wrong. If a check hangs, the last line printed names this check.
"""

import argparse
import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor

from scripts.command import add_json, command, new_parser, whole_number, write_whole
from training.command_line import check_launched, check_single
from training.errors import InputError
from training.report.text import table

SLOW = 0.8
"""Ranks below this fraction of the median rate are listed as slow."""
TIMEOUT = datetime.timedelta(seconds=120)
REPEATS = 5
"""Number of timed calls after one warm-up call. Rates are based on the median time."""
# PyTorch 2.13 renamed these functions and warns about the old names.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Check:
    """A check on one rank: `run` writes `result`, which must equal `expected`.

    unit    unit of the rate: TFLOP/s or GB/s
    amount  TFLOPs or GB per run
    source  tensor copied to `result` before each run (not timed)
    """

    name: str
    unit: str
    amount: float
    run: Callable[[], object]
    result: Tensor
    expected: Tensor
    source: Tensor | None = None


@dataclass(frozen=True)
class Row:
    """Results of a check across ranks: rates, and the wrong and slow ranks with their hosts."""

    name: str
    unit: str
    slowest: float
    median: float
    wrong: list[str]
    slow: list[str]


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check on all ranks and print from rank 0. Return 1 if any result is wrong."""
    options = parse(arguments)
    device = start()
    rank, rows = dist.get_rank(), []
    for check in checks(device, options.mebibytes << 20):
        if rank == 0:
            print(f"checking {check.name}", file=sys.stderr, flush=True)
        rows.append(over_ranks(check, device))
    if rank == 0:
        print(report(rows, device))
        if options.json is not None:
            content = {
                "ranks": dist.get_world_size(),
                "device": str(device.type),
                "torch": torch.__version__,
                "checks": [asdict(row) for row in rows],
            }
            write_whole(options.json, json.dumps(content, indent=2) + "\n")
    dist.destroy_process_group()
    return int(any(row.wrong for row in rows))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = new_parser(__doc__)
    default = 256 if torch.cuda.is_available() else 4
    parser.add_argument(
        "--mebibytes", type=whole_number(most=16384), default=default,
        help=f"MiB to send and copy per rank (default on this machine: {default})",
    )  # fmt: skip
    add_json(parser)
    return parser.parse_args(arguments)


def start() -> torch.device:
    """Initialize torch.distributed (one rank without torchrun) and return this rank's device.

    Raises InputError if ranks were started without torchrun, or if this machine's GPUs cannot be
    used.
    """
    from training.machine.device import gpus_here, reason  # deferred: slow import

    check_launched()
    check_single()
    gpus = gpus_here()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    if gpus.built is not None and gpus.devices and not gpus.usable and not hidden:
        raise InputError(f"{reason(gpus)}; to check only CPUs, set CUDA_VISIBLE_DEVICES=")
    if "RANK" not in os.environ:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        os.environ.update(alone)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    # bfloat16 reductions would not be exact.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=TIMEOUT, device_id=device)
    return device


def checks(device: torch.device, size: int) -> Iterator[Check]:
    """Yield the device, link and collective checks, which transfer `size` bytes each."""
    yield matmul_check(device)
    yield copy_check(device, size)
    ranks = dist.get_world_size()
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for shift in range(1, here):
        yield link_check(device, size, shift, here, "within a node")
    if ranks > here:
        yield link_check(device, size, here, ranks, "node to node")
    if ranks > 1:
        yield from collective_checks(device, size)


def matmul_check(device: torch.device) -> Check:
    """Return a check of a matmul. The result is exact, because all entries are -1, 0 or 1."""
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (integers(n, seed).to(device, dtype) for seed in (1, 2))
    exact = integers(n, 1)[:4].long() @ integers(n, 2).long()
    result, expected = torch.empty_like(left), left @ right
    expected[:4] = exact.to(device, dtype)  # the other rows only have to match a second matmul
    name = f"matmul, {str(dtype).removeprefix('torch.')}"
    run = partial(torch.matmul, left, right, out=result)
    return Check(name, "TFLOP/s", 2e-12 * n**3, run, result, expected)


def integers(n: int, seed: int) -> Tensor:
    """Return an `[n, n]` matrix of -1, 0 and 1 that is identical on all ranks."""
    return torch.randint(-1, 2, (n, n), generator=torch.Generator().manual_seed(seed))


def copy_check(device: torch.device, size: int) -> Check:
    """Return a check that copies data within device memory."""
    source = numbers(device, size, 0)
    result = torch.empty_like(source)
    run = partial(result.copy_, source)
    return Check("memory, read and written", "GB/s", 2e-9 * size, run, result, source)


def numbers(device: torch.device, size: int, offset: int) -> Tensor:
    """Return `size` bytes of position-dependent int32 values. `offset` tells ranks apart."""
    return torch.arange(size // 4, dtype=torch.int32, device=device) % 1021 + offset


def link_check(device: torch.device, size: int, shift: int, ring: int, where: str) -> Check:
    """Return a link check: in a ring of `ring` ranks, send to the rank `shift` positions ahead and
    receive from the rank `shift` positions behind."""
    rank = dist.get_rank()
    base = rank - rank % ring
    ahead, behind = (base + (rank - base + sign * shift) % ring for sign in (1, -1))
    sent, expected = numbers(device, size, rank), numbers(device, size, behind)
    result = torch.empty_like(sent)

    def run() -> None:
        sides = [dist.P2POp(dist.isend, sent, ahead), dist.P2POp(dist.irecv, result, behind)]
        for work in dist.batch_isend_irecv(sides):
            work.wait()

    name = f"link, {where}, to rank + {shift}"
    return Check(name, "GB/s", 1e-9 * size, run, result, expected)


def collective_checks(device: torch.device, size: int) -> Iterator[Check]:
    """Yield checks of the collectives used in training, across all ranks. Rates count the bytes
    each rank sends in a ring algorithm."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    piece = max(4, size // ranks // 4 * 4)
    whole, part = numbers(device, piece * ranks, rank), numbers(device, piece, rank)
    plain = whole - rank
    mine = slice(rank * part.numel(), (rank + 1) * part.numel())
    summed = plain * ranks + sum(range(ranks))
    gathered = torch.cat([part - rank + other for other in range(ranks)])
    exchanged = torch.cat([plain[mine] + other for other in range(ranks)])
    large, small, sent = torch.empty_like(whole), torch.empty_like(part), 1e-9 * piece * (ranks - 1)
    run = partial(dist.all_reduce, large)
    yield Check("all-reduce", "GB/s", 2 * sent, run, large, summed, source=whole)
    run = partial(REDUCE_SCATTER, small, whole)
    yield Check("reduce-scatter", "GB/s", sent, run, small, summed[mine])
    yield Check("all-gather", "GB/s", sent, partial(ALL_GATHER, large, part), large, gathered)
    run = partial(dist.all_to_all_single, large, whole)
    yield Check("all-to-all", "GB/s", sent, run, large, exchanged)


def over_ranks(check: Check, device: torch.device) -> Row:
    """Run a check on all ranks and gather the results."""
    seconds, right = [], True
    for _ in range(1 + REPEATS):
        check.result.zero_() if check.source is None else check.result.copy_(check.source)
        wait(device)
        dist.barrier()
        begin = time.perf_counter()
        check.run()
        wait(device)
        seconds.append(time.perf_counter() - begin)
        right = right and torch.equal(check.result, check.expected)
    rate = check.amount / median(seconds[1:])
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (f"(host {socket.gethostname()})", rate, right))
    rates = [rate for _, rate, _ in results]
    middle = median(rates)
    wrong = [f"rank {i} {host}" for i, (host, _, right) in enumerate(results) if not right]
    slow = [f"rank {i} {host}" for i, (host, rate, _) in enumerate(results) if rate < SLOW * middle]
    return Row(check.name, check.unit, min(rates), middle, wrong, slow)


def wait(device: torch.device) -> None:
    """Wait for all work queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def report(rows: Sequence[Row], device: torch.device) -> str:
    """Return the table, followed by a line with the verdict and a note about unchecked GPUs."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    title = f"{dist.get_world_size()} ranks, {name}"
    cells = []
    for row in rows:
        parts = [("WRONG on", row.wrong), ("slow:", row.slow)]
        remark = "; ".join(f"{word} {', '.join(ranks)}" for word, ranks in parts if ranks)
        cells.append((row.name, f"{row.slowest:.3g}", f"{row.median:.3g}", row.unit, remark))
    wrong = [row.name for row in rows if row.wrong]
    verdict = f"WRONG: {', '.join(wrong)}" if wrong else "all results are correct"
    lines = table(("check", "slowest", "median", "", ""), cells)
    used = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    there = torch.cuda.device_count() if device.type == "cuda" else used
    unchecked = (
        f"\nonly {used} of {there} GPUs of this machine were checked: start one rank per GPU with "
        f"torchrun --nproc-per-node {there}"
    )
    return f"{title}\n{lines}\n{verdict}{unchecked if there > used else ''}"


if __name__ == "__main__":
    sys.exit(main())
