"""What a run is made with and runs on: packages, commit, device, driver, libraries."""

import contextlib
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, python_version
from typing import Final

import torch
from torch.backends import cudnn

from spectral.kernels.library import SLOW_ON_CPU
from training.machine.environment import settings

ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("torch", "megatron-core", "transformer-engine", "triton", "numpy", "spectrain")
DRIVER: Final = Path("/proc/driver/nvidia/version")

Facts = dict[str, str | None]


def versions() -> Facts:
    """Return `library_versions`, and the commit if this is a git checkout."""
    return library_versions() | {"commit": commit()}


def library_versions() -> Facts:
    """Return versions of Python and packages, None for a package that is not installed.

    That of torch names its build, such as `2.13.0+cu130`, which its wheel does not everywhere.
    """
    versions: Facts = {"python": python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions | {"torch": str(torch.__version__)}


def commit() -> str | None:
    """The commit of this checkout, None if it is none."""
    if not (ROOT / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


def device_facts(device: torch.device) -> Facts:
    """What the run runs on: device, and on a GPU its driver, CUDA, cuDNN and NCCL."""
    if device.type != "cuda":
        return {"device": f"{device.type} ({machine()})"}
    facts: Facts = {
        "device": torch.cuda.get_device_name(device),
        "memory": f"{torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB",
        "driver": driver(),
        "cuda": torch.version.cuda,
        "cudnn": None,
        "nccl": None,
    }
    # A CUDA build whose device is pretended has no libraries to ask.
    with contextlib.suppress(RuntimeError):
        facts["cudnn"] = str(cudnn.version()) if cudnn.is_available() else None
    with contextlib.suppress(AttributeError, RuntimeError):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def driver(file: Path = DRIVER) -> str | None:
    """The version of NVIDIA's driver, None if it does not say."""
    with contextlib.suppress(OSError):
        words = file.read_text(encoding="utf-8").splitlines()[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None


def slow_precision(precision: str, device: torch.device) -> str | None:
    """Say what `train.precision` costs on a device without instructions for it, None on others."""
    if precision != "bf16" or device.type != "cpu" or torch.bfloat16 not in SLOW_ON_CPU:
        return None
    return (
        "bf16 on a CPU without AVX-512, which makes its products in float32 and rounds them: "
        "slower than train.precision=fp32"
    )


def slow_attention(kernel: str, device: torch.device) -> str | None:
    """Say that a kernel of attention is not the fastest on a device, None for the fastest."""
    if kernel not in ("flash_attention", "efficient_attention") or device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    return (
        "cuDNN's takes about two thirds of the time on this GPU, but not these heads, or not with "
        "this cuDNN"
    )


def described(device: torch.device) -> str:
    """One line for the beginning of a run."""
    facts = device_facts(device) | {"torch": torch.__version__}
    first = facts.pop("device")
    words = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if device.type == "cuda":
        words += [f"{name}={value}" for name, value in settings().items()]
    return ", ".join([str(first), *words])
