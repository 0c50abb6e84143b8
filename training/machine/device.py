"""The device that a rank trains on: chosen and prepared before CUDA starts.

If the config does not name a device, each rank uses a GPU if there is one.
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
from training.machine import environment


def prepare(config: Config) -> None:
    """Set the required environment variables before CUDA starts; later calls have no effect."""
    if config.run.device == "cpu":
        # PyTorch and the engine query CUDA in many places; with this variable they find no GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment.prepare(config)


def start(config: Config) -> Literal["cuda", "cpu"]:
    """Prepare the environment, and return the type of this rank's device.

    Raises DeviceError if the config's device is not available.
    """
    prepare(config)
    requested = config.run.device
    if requested == "cpu":
        return "cpu"
    return choose(requested, gpus_here(), int(os.environ.get("LOCAL_RANK", "0")))


RequestedDevice = Literal["auto", "cuda", "cpu"]

NVIDIA: Final = "0x10de"
"""Vendor of a PCI device."""
DISPLAY: Final = "0x03"
"""Prefix of the class of PCI devices that are GPUs."""


class DeviceError(InputError):
    """The requested device is not available."""


@dataclass(frozen=True)
class Gpus:
    """Facts about this machine's GPUs.

    built    CUDA version that PyTorch was built with, None if it was built without CUDA
    devices  NVIDIA devices of this machine, usable or not
    problem  why CUDA does not start, None if it does or was not tried
    usable   number of CUDA devices
    """

    built: str | None
    devices: tuple[str, ...]
    problem: str | None
    usable: int


def choose(requested: RequestedDevice, gpus: Gpus, local_rank: int) -> Literal["cuda", "cpu"]:
    """Return the device type for rank `local_rank` of this machine.

    `auto` is a GPU if CUDA starts, and a CPU if there is no GPU or PyTorch is built without CUDA.
    Raises DeviceError for a requested GPU that is not available, for a GPU that does not start (a
    driver too old for this PyTorch, a container without its GPUs), and for more ranks than GPUs.
    """
    if requested == "cpu":
        return "cpu"
    if gpus.usable:
        if local_rank >= gpus.usable:
            raise DeviceError(
                f"rank {local_rank} of this machine needs a GPU of its own, got {gpus.usable} for "
                "all: start fewer processes, or set run.device=cpu"
            )
        return "cuda"
    if requested == "auto" and (gpus.built is None or not gpus.devices):
        return "cpu"
    raise DeviceError(
        f"run.device is {requested}, but {reason(gpus)}; run.device=cpu trains on CPUs"
    )


def reason(gpus: Gpus) -> str:
    """Return why no GPU can be used."""
    if gpus.built is None:
        return "this PyTorch is built without CUDA"
    if not gpus.devices:
        return "this machine has no NVIDIA device"
    there = f"this machine has NVIDIA devices ({', '.join(gpus.devices)}) and CUDA {gpus.built} "
    return there + f"does not start: {gpus.problem or 'it finds none of them'}"


def gpus_here() -> Gpus:
    """Return the facts about this machine's GPUs; starts CUDA if there are GPUs."""
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

    These are the driver's devices, else the devices on the PCI bus, which a container sees even
    without access to them.
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

    An operation without such a kernel only causes a warning, as an error could end a run at a step
    that tests without a GPU do not cover. The setting loads torch's compiler, which takes seconds.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Uninitialised memory is not filled: no code reads it, and filling would cost a pass.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
