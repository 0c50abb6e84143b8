"""GPU types for plans and rehearsals, and a time model for kernel launches and collectives.

Times come from a roofline model with the constants below, not from measurements. The model is
shared by plans, which derive a step's work from the config, and rehearsals, which count the
program's launches. The time of a launch is the maximum of three times: its bytes divided by the
device's copy rate, its FLOPs divided by the achievable FLOP/s for such an operation, and the
minimum launch time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import Field

from models.section import Check, Count, Positive, Section

GIB: Final = 2**30

RESERVE: Final = 0.05
"""Fraction of device memory unavailable to tensors: CUDA context, communicators, libraries, and
fragmentation."""


OPERANDS: Final = ("fp8", "bf16", "tf32", "fp32", "fp64")
"""Operand types of matmuls."""
REQUIRED: Final = ("bf16", "tf32", "fp32", "fp64")
"""Operand types supported by every device."""


class Device(Section):
    """A GPU and its node. Rates are per second."""

    name: str
    """Device name as reported by CUDA."""
    memory_bytes: Count
    """Bytes of memory reported by CUDA before any allocation."""
    capability: tuple[int, int]
    """Compute capability."""
    processors: Count
    """Number of streaming multiprocessors."""
    copy_rate: Positive
    """Bytes per second moved by a copy kernel: bytes read plus bytes written."""
    peak: dict[str, Positive]
    """Dense matmul FLOP/s, by operand type in `OPERANDS`."""
    efficiency: Annotated[float, Field(gt=0, le=1)] = 0.75
    """Fraction of `peak` achieved by a large matmul."""
    launch_seconds: Positive = 5e-6
    """Minimum time of a kernel launched by the host."""
    graph_seconds: Positive = 1.5e-6
    """Minimum time of a kernel launched by a CUDA graph."""
    node_size: Count = 8
    """Number of GPUs per node."""
    node_rate: Positive = 400e9
    """Bytes per second that a GPU can send within its node."""
    network_rate: Positive = 45e9
    """Bytes per second that a GPU can send to other nodes."""
    latency_seconds: Positive = 20e-6
    """Minimum time of a collective."""

    def checks(self) -> Iterator[Check]:
        """Check the operand types of `peak`."""
        wrong = (self.peak.keys() ^ {*OPERANDS}) - {"fp8"}
        rule = f"must have the keys {', '.join(REQUIRED)}, and may have the key fp8"
        yield "peak", wrong, f"{rule}, got {', '.join(self.peak)}"

    @property
    def room(self) -> int:
        """Bytes available for a run's tensors."""
        return int(self.memory_bytes * (1 - RESERVE))


# Peaks are from NVIDIA's data sheets, without sparsity; fp32 is the CUDA core peak, because float32
# matmuls run on CUDA cores unless TF32 is allowed. Copy rates are assumed, not measured: 88 to 90%
# of the memory bandwidth in the data sheets (in TB/s: H100 SXM 3.35, H200 4.8, A100 80GB SXM 2.04,
# B200 8).
DEVICES: Final[Mapping[str, Device]] = {
    "h100": Device(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=79 * GIB,
        capability=(9, 0),
        processors=132,
        copy_rate=3.0e12,
        peak={"fp8": 1979e12, "bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp64": 67e12},
    ),
    "h200": Device(
        name="NVIDIA H200",
        memory_bytes=139 * GIB,
        capability=(9, 0),
        processors=132,
        copy_rate=4.3e12,
        peak={"fp8": 1979e12, "bf16": 989e12, "tf32": 494e12, "fp32": 67e12, "fp64": 67e12},
    ),
    "a100": Device(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=79 * GIB,
        capability=(8, 0),
        processors=108,
        copy_rate=1.8e12,
        peak={"bf16": 312e12, "tf32": 156e12, "fp32": 19.5e12, "fp64": 19.5e12},
        node_rate=240e9,
        network_rate=22e9,
    ),
    "b200": Device(
        name="NVIDIA B200",
        memory_bytes=178 * GIB,
        capability=(10, 0),
        processors=148,
        copy_rate=7.2e12,
        peak={"fp8": 4500e12, "bf16": 2250e12, "tf32": 1125e12, "fp32": 75e12, "fp64": 37e12},
        node_rate=800e9,
    ),
}


SAME_PEAK: Final[Mapping[str, str]] = {
    "B200": "b200", "H200": "h200", "GH200": "h200", "H100": "h100", "H800": "h100",
    "A100": "a100", "A800": "a100",
}  # fmt: skip
"""Maps a word in CUDA's device name to the key of a device with the same bfloat16 peak."""

SLOWER: Final = {"MIG", "NVL", "PCIe"}
"""Words that occur in the names of device variants with lower FLOP/s."""


def device_called(name: str) -> Device | None:
    """Return the device with the same peak as `name`, or None for unknown devices and GPU
    partitions.

    `name` is the result of torch.cuda.get_device_name(), e.g. `NVIDIA H100 80GB HBM3`.
    """
    words = set(re.split(r"[ -]", name))
    if words & SLOWER:
        return None
    return next((DEVICES[key] for word, key in SAME_PEAK.items() if word in words), None)


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak dense bf16 FLOP/s, or None for unknown devices and GPU partitions."""
    device = device_called(device_name)
    return None if device is None else device.peak["bf16"]


HALF_SIZE: Final = 64
"""Dimension at which a tensor core matmul achieves half the FLOP/s of a large one."""
TENSOR_CORES: Final = ("fp8", "bf16", "tf32", "fp64")
"""Operand types of tensor core matmuls."""
ATTENTION: Final = 0.45
"""Fraction of the peak achieved by fused attention, as published for H100 (cuDNN, FlashAttention-3)
and A100 (FlashAttention-2), both causal with head dimension 128."""
OLDER_ATTENTION: Final = 0.32
"""Fraction of the peak achieved by FlashAttention-2 on Hopper: 370 TFLOP/s in the forward pass
(Shah et al., "FlashAttention-3", 2024, figure 5), about 300 in the backward pass."""
EXPLICIT_ATTENTION: Final = 0.1
"""Fraction of the peak achieved by attention that computes scores block by block."""
SYMMETRIC: Final = 0.45
"""Fraction of the peak achieved by the Triton kernels for symmetric matmuls, measured on an H200
for matrices with at least 4,096 rows, and for batches of 32 matrices with 2,048 rows
(spectral/kernels/table.json)."""
FACTORS: Final = 0.05
"""Fraction of the peak achieved by Cholesky factorizations and triangular solves with `FACTOR_ROWS`
rows, measured in float64 in SSO's step on an H200. With fewer rows, the fraction is proportional to
the number of rows, because columns are processed sequentially."""
FACTOR_ROWS: Final = 512
EIGEN_ROW: Final = 120e-6
"""Estimated seconds per row of an eigendecomposition (0.25 s for 2,048 rows), which processes the
columns sequentially with many small kernels."""


@dataclass(frozen=True)
class Links:
    """Links within a group of `size` ranks. Consecutive global ranks of the group differ by
    `stride`."""

    size: int
    stride: int
    device: Device

    @property
    def per_node(self) -> int:
        """Number of the group's ranks on each node, at least 1."""
        return max(1, min(self.size, self.device.node_size // self.stride))

    @property
    def ring_across(self) -> float:
        """Fraction of a ring's bytes that leave a node. One rank per node sends to the next
        node."""
        return 0.0 if self.per_node >= self.size else 1 / self.per_node

    @property
    def all_to_all_across(self) -> float:
        """Fraction of an all-to-all's bytes that leave a node, if all ranks send the same number of
        bytes."""
        return (self.size - self.per_node) / (self.size - 1) if self.size > 1 else 0.0

    @property
    def ends_across(self) -> float:
        """Fraction of the bytes that leave a node if the group's first rank sends to the last
        rank."""
        return float(self.per_node < self.size)

    def seconds(self, size: float, across: float, calls: float = 1.0) -> float:
        """Return the time in seconds of `calls` collectives in which a rank sends `size` bytes in
        total.

        A fraction `across` of the bytes leaves the node, through the rank's own network adapter.
        """
        if self.size == 1 or size == 0:
            return 0.0
        slowest = max(
            size * (1 - across) / self.device.node_rate, size * across / self.device.network_rate
        )
        return slowest + calls * self.device.latency_seconds


def product_share(device: Device, operands: str, sides: Sequence[float]) -> float:
    """Return the fraction of the peak achieved by a matmul with the dimensions `sides`."""
    share = device.efficiency
    for side in sides if operands in TENSOR_CORES else ():
        share *= side / (side + HALF_SIZE)
    return share


def varying_share(device: Device) -> float:
    """Return the fraction of the peak achieved by FlashAttention 2, used for variable-length
    attention."""
    return OLDER_ATTENTION if device.capability >= (9, 0) else ATTENTION


def factor_share(rows: int) -> float:
    """Return the fraction of the peak achieved by factorizations of matrices with `rows` rows."""
    return FACTORS * min(rows, FACTOR_ROWS) / FACTOR_ROWS


@dataclass(frozen=True)
class Work:
    """The work of an operation on a device.

    size       bytes moved
    operands   operand type, a key of `Device.peak`
    share      fraction of the peak achieved by the operation; None: `Device.efficiency`
    kernels    number of kernel launches
    waiting    minimum time in seconds, if the operation consists of sequential steps
    """

    size: float
    flops: float = 0.0
    operands: str = "fp32"
    share: float | None = None
    kernels: int = 1
    waiting: float = 0.0


def launch_seconds(device: Device, work: Work, *, in_graph: bool = False) -> float:
    """Return the time of an operation in seconds."""
    least = work.kernels * (device.graph_seconds if in_graph else device.launch_seconds)
    share = device.efficiency if work.share is None else work.share
    return max(
        work.size / device.copy_rate,
        work.flops / (share * device.peak[work.operands]),
        work.waiting,
        least,
    )


def product_seconds(device: Device, operands: str, rows: float, inner: float, cols: float) -> float:
    """Return the time of `[rows, inner] @ [inner, cols]` in seconds."""
    if not rows:
        return 0.0
    share = product_share(device, operands, (rows, inner, cols))
    return launch_seconds(device, Work(0.0, 2 * rows * inner * cols, operands, share))


def collective_seconds(device: Device, kind: str, size: float, ranks: Sequence[int]) -> float:
    """Return the time in seconds of a collective in which each rank in `ranks` sends `size`
    bytes."""
    links = Links(len(ranks), abs(ranks[1] - ranks[0]), device)
    across = links.all_to_all_across if kind == "all_to_all" else links.ring_across
    return links.seconds(size, across)
