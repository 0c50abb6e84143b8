"""The device on which a rank trains, chosen before CUDA starts.

With `run.device: auto`, each rank uses a GPU if the machine has GPUs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from torch.utils import deterministic

from training.config import Config
from training.errors import InputError


def device_type(config: Config) -> Literal["cuda", "cpu"]:
    """Return the type of this rank's device.

    Raises DeviceError if the configured device is not available.
    """
    requested = config.run.device
    if requested == "cpu":
        return "cpu"
    return choose(requested, gpus_here(), int(os.environ.get("LOCAL_RANK", "0")))


RequestedDevice = Literal["auto", "cuda", "cpu"]

NVIDIA: Final = "0x10de"
"""PCI vendor id of NVIDIA."""
DISPLAY: Final = "0x03"
"""Prefix of the PCI class of GPUs."""


class DeviceError(InputError):
    """A requested device that is not available."""


@dataclass(frozen=True)
class Gpus:
    """Facts about this machine's GPUs.

    built    CUDA version of the PyTorch build, None without CUDA
    devices  NVIDIA devices of this machine, usable or not
    problem  reason why CUDA does not start, None if it starts or was not tried
    usable   number of CUDA devices
    """

    built: str | None
    devices: tuple[str, ...]
    problem: str | None
    usable: int


def choose(requested: RequestedDevice, gpus: Gpus, local_rank: int) -> Literal["cuda", "cpu"]:
    """Return the device type of local rank `local_rank`.

    `auto` selects cuda if CUDA starts, and cpu if there is no GPU or PyTorch is built without CUDA.
    Raises DeviceError if a requested GPU is not available, if CUDA does not start (the driver is
    too old for this PyTorch, or a container has no access to its GPUs), or if there are more ranks
    than GPUs.
    """
    if requested == "cpu":
        return "cpu"
    if gpus.usable:
        if local_rank >= gpus.usable:
            raise DeviceError(
                f"local rank {local_rank} needs its own GPU, got {gpus.usable} GPUs for all ranks "
                "of this machine: start fewer ranks, or set run.device=cpu"
            )
        return "cuda"
    if requested == "auto" and (gpus.built is None or not gpus.devices):
        return "cpu"
    raise DeviceError(
        f"run.device is {requested}, but {reason(gpus)}; run.device=cpu trains on CPUs"
    )


def reason(gpus: Gpus) -> str:
    """Return the reason why no GPU can be used."""
    if gpus.built is None:
        return "this PyTorch is built without CUDA"
    if not gpus.devices:
        return "this machine has no NVIDIA device"
    there = f"this machine has NVIDIA devices ({', '.join(gpus.devices)}) and CUDA {gpus.built} "
    return there + f"does not start: {gpus.problem or 'it detects no device'}"


def gpus_here() -> Gpus:
    """Return facts about this machine's GPUs; start CUDA if PyTorch is built with CUDA."""
    built = torch.version.cuda
    if built is None:
        return Gpus(None, tuple(nvidia_devices()), None, 0)
    problem: str | None = None
    try:
        torch.cuda.init()
        usable = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        problem, usable = " ".join(str(error).split()), 0
    return Gpus(built, tuple(nvidia_devices()), problem, usable)


def nvidia_devices() -> Iterator[str]:
    """Yield the system's NVIDIA devices, usable or not.

    These are the device files of the driver, or if there are none, the devices on the PCI bus,
    which are visible even in a container without access to GPUs.
    """
    nodes = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
    if nodes:
        yield from nodes
        return
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        kind = {name: _first_line(device / name) for name in ("vendor", "class")}
        if kind["vendor"] == NVIDIA and kind["class"].startswith(DISPLAY):
            yield device.name


def _first_line(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@contextmanager
def repeatable() -> Iterator[None]:
    """Use PyTorch's deterministic kernels within a context.

    An operation without a deterministic kernel causes only a warning, because an error could end a
    run in a step that tests without a GPU do not cover. The setting imports torch's compiler, which
    takes seconds.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Do not fill uninitialised memory: no code reads it, and filling costs a pass over memory.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
