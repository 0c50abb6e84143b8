"""The time of a launch and of a collective: a roofline with stated constants, not a measurement.

It is the one model of time: of plans, which count a step's work from its config, and of rehearsals,
which count what the program launches. A launch takes as long as its bytes at the device's copy
rate, its FLOPs at the share of the peak that their kind reaches, or the least time of a launch,
whichever is longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from parallel.plan.devices import Device

HALF_SIZE: Final = 64
"""Size of one side of a product on tensor cores at which the others reach half of their share of
the peak."""
TENSOR_CORES: Final = ("fp8", "bf16", "tf32", "fp64")
"""Operands of products on tensor cores."""
ATTENTION: Final = 0.45
"""Share of the peak that fused attention reaches, as published for H100 and A100 (cuDNN and
FlashAttention-3 on the one, FlashAttention-2 on the other, causal, heads of 128)."""
OLDER_ATTENTION: Final = 0.32
"""The same of FlashAttention-2 on Hopper, where its forward passes reach 370 TFLOP/s (Shah et al.,
"FlashAttention-3", 2024, figure 5) and its backward passes about 300."""
EXPLICIT_ATTENTION: Final = 0.1
"""The same where scores are computed block by block."""
SYMMETRIC: Final = 0.45
"""The same of the Triton kernels of symmetric products, as measured on an H200 from 4,096 rows or
32 matrices of 2,048 (spectral/kernels/table.json)."""
FACTORS: Final = 0.05
"""Share of the peak that Cholesky factors and triangular solves of `FACTOR_ROWS` rows reach, as
measured in float64 in SSO's step on an H200. Columns follow each other, so smaller ones reach less
in proportion to their rows."""
FACTOR_ROWS: Final = 512
EIGEN_ROW: Final = 120e-6
"""Seconds for each row of an eigenvalue problem, whose columns take many small kernels one after
another: an estimate, 0.25 s for 2,048 rows."""


@dataclass(frozen=True)
class Links:
    """The links of a group of `size` ranks, each `stride` ranks from the next.

    per_node   ranks of the group in one node
    """

    size: int
    stride: int
    device: Device

    @property
    def per_node(self) -> int:
        """Ranks of the group in one node, at least 1."""
        return max(1, min(self.size, self.device.node_size // self.stride))

    @property
    def ring_across(self) -> float:
        """Share of a ring's bytes that leave a node: one rank of each node sends to the next."""
        return 0.0 if self.per_node >= self.size else 1 / self.per_node

    @property
    def all_to_all_across(self) -> float:
        """Share of an all-to-all's bytes that leave a node, if every rank gets equally many."""
        return (self.size - self.per_node) / (self.size - 1) if self.size > 1 else 0.0

    @property
    def ends_across(self) -> float:
        """Share of the bytes between the first and the last rank that leave a node."""
        return float(self.per_node < self.size)

    def seconds(self, size: float, across: float, calls: float = 1.0) -> float:
        """Seconds of `calls` collectives in which a rank sends `size` bytes in all.

        A share `across` of them leaves the node, through this rank's own network adapter.
        """
        if self.size == 1 or size == 0:
            return 0.0
        slowest = max(
            size * (1 - across) / self.device.node_rate, size * across / self.device.network_rate
        )
        return slowest + calls * self.device.latency_seconds


def product_share(device: Device, operands: str, sides: Sequence[float]) -> float:
    """Return the share of the peak that a product with these three sides reaches."""
    share = device.efficiency
    for side in sides if operands in TENSOR_CORES else ():
        share *= side / (side + HALF_SIZE)
    return share


def varying_share(device: Device) -> float:
    """Return the same of FlashAttention 2, which computes attention of variable length."""
    return OLDER_ATTENTION if device.capability >= (9, 0) else ATTENTION


def factor_share(rows: int) -> float:
    """Return the share of the peak that factors of matrices with so many rows reach."""
    return FACTORS * min(rows, FACTOR_ROWS) / FACTOR_ROWS


@dataclass(frozen=True)
class Work:
    """What an operation does to a device.

    size       bytes that it moves
    operands   of its FLOPs, a key of `Device.peak`
    share      of the peak that it reaches, None for that of a large product
    kernels    launches that it takes
    waiting    seconds of steps that follow one another, however little each does
    """

    size: float
    flops: float = 0.0
    operands: str = "fp32"
    share: float | None = None
    kernels: int = 1
    waiting: float = 0.0


def launch_seconds(device: Device, work: Work, *, in_graph: bool = False) -> float:
    """Return the time of an operation."""
    least = work.kernels * (device.graph_seconds if in_graph else device.launch_seconds)
    share = device.efficiency if work.share is None else work.share
    return max(
        work.size / device.copy_rate,
        work.flops / (share * device.peak[work.operands]),
        work.waiting,
        least,
    )


def product_seconds(device: Device, operands: str, rows: float, inner: float, cols: float) -> float:
    """Return the time of `[rows, inner] @ [inner, cols]`."""
    if not rows:
        return 0.0
    share = product_share(device, operands, (rows, inner, cols))
    return launch_seconds(device, Work(0.0, 2 * rows * inner * cols, operands, share))


def collective_seconds(device: Device, kind: str, size: float, ranks: Sequence[int]) -> float:
    """Return the time of a collective in which a rank sends `size` bytes to others of `ranks`."""
    links = Links(len(ranks), abs(ranks[1] - ranks[0]), device)
    across = links.all_to_all_across if kind == "all_to_all" else links.ring_across
    return links.seconds(size, across)
