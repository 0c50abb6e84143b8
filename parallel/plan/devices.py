"""GPUs that a run can be planned and rehearsed for, without having one."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

GIB: Final = 2**30

RESERVE: Final = 0.05
"""Share of a device's memory that tensors do not get: CUDA's context, communicators, libraries, and
what the allocator cannot use."""


@dataclass(frozen=True)
class Device:
    """One GPU and the node it is in. Rates are per second.

    name            as CUDA reports it
    memory_bytes    that CUDA reports, before anything is allocated
    capability      compute capability
    processors      streaming multiprocessors
    copy_rate       bytes that a copy kernel reads and writes
    peak            FLOPs of dense products by type of the operands
    efficiency      share of `peak` that a large product reaches
    launch_seconds, graph_seconds   least time of a kernel, launched by the host or by a graph
    node_size       GPUs of a node
    node_rate       bytes that a GPU sends to others of its node
    network_rate    bytes that a GPU sends to other nodes
    latency_seconds least time of a collective
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    copy_rate: float
    peak: Mapping[str, float]
    efficiency: float = 0.75
    launch_seconds: float = 5e-6
    graph_seconds: float = 1.5e-6
    node_size: int = 8
    node_rate: float = 400e9
    network_rate: float = 45e9
    latency_seconds: float = 20e-6

    @property
    def room(self) -> int:
        """Bytes that the tensors of a run may take."""
        return int(self.memory_bytes * (1 - RESERVE))


# Peaks are those of NVIDIA's data sheets without sparsity; float32 is that of ordinary units, which
# is what products of float32 use unless TF32 is allowed. The H100's copy rate was read on a device
# (3.0 of 3.35 TB/s); the others have the same share of their data sheets' bandwidth.
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
"""Key of the device with the same bfloat16 peak, by a word of the name that CUDA reports."""

SLOWER: Final = {"MIG", "NVL", "PCIe"}
"""Words of the names of variants with fewer FLOP/s."""


def device_called(name: str) -> Device | None:
    """Return the device with the peak of the one called `name`, None if unknown or only part of a
    GPU.

    `name` is that of torch.cuda.get_device_name(), e.g. `NVIDIA H100 80GB HBM3`.
    """
    words = set(re.split(r"[ -]", name))
    if words & SLOWER:
        return None
    return next((DEVICES[key] for word, key in SAME_PEAK.items() if word in words), None)


def peak_flops(device_name: str) -> float | None:
    """Return the peak dense bf16 FLOP/s of a device, None as `device_called` does."""
    device = device_called(device_name)
    return None if device is None else device.peak["bf16"]


def device_named(text: str) -> Device:
    """Return the device `text` names, or that a YAML file of that name describes: `base` is the
    device that it takes what it leaves out from.

    Raises ValueError for a name that is neither, or a file with unknown keys.
    """
    if text in DEVICES:
        return DEVICES[text]
    path = Path(text)
    if not path.is_file():
        raise ValueError(f"device must be one of {', '.join(DEVICES)} or a file, got {text!r}")
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} must hold keys of a device, got {loaded!r}")
    own = {str(key): value for key, value in loaded.items()}
    base = device_named(str(own.pop("base", "h100")))
    unknown = [key for key in own if key not in {f.name for f in fields(Device)}]
    if unknown:
        raise ValueError(f"{path} has unknown keys {', '.join(unknown)}")
    return replace(base, **own)
