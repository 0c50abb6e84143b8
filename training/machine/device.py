"""A rank's device and environment: its GPU, environment variables, open file limit, and versions.

With `run.device: auto`, each rank uses a GPU if the machine has any. CUDA, PyTorch's allocator and
NCCL read their environment variables at initialization. Versions cover packages, the commit, the
device, the driver and its libraries. This file must not import megatron-core, whose warnings are
only suppressed by `models.engine.import_engine`.
"""

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, python_version
from typing import Final, Literal

import torch
from torch.backends import cudnn
from torch.utils import deterministic

from training.config import Config
from training.errors import ConfigError, InputError


def device_type(config: Config) -> Literal["cuda", "cpu"]:
    """Return this rank's device type.

    Raises DeviceError if the configured device is not available.
    """
    requested = config.run.device
    if requested == "cpu":
        return "cpu"
    return choose(requested, gpus_here(), int(os.environ.get("LOCAL_RANK", "0")))


NVIDIA: Final = "0x10de"
"""NVIDIA's PCI vendor id."""
DISPLAY: Final = "0x03"
"""PCI class prefix of GPUs."""


class DeviceError(InputError):
    """Raised when the requested device is not available."""


@dataclass(frozen=True)
class Gpus:
    """Facts about this machine's GPUs.

    built    CUDA version of the PyTorch build; None without CUDA
    devices  this machine's NVIDIA devices, usable or not
    problem  error raised by the initialization of CUDA, or None
    usable   number of CUDA devices
    """

    built: str | None
    devices: tuple[str, ...]
    problem: str | None
    usable: int


def choose(
    requested: Literal["auto", "cuda"], gpus: Gpus, local_rank: int
) -> Literal["cuda", "cpu"]:
    """Return the device type to use on local rank `local_rank`.

    `auto` selects cuda if CUDA initializes, and cpu if there is no GPU or PyTorch is built without
    CUDA. Raises DeviceError if a requested GPU is not available, or if there are more ranks than
    GPUs. Also raises DeviceError if CUDA fails to initialize, for example because the driver is too
    old for this PyTorch build, or because a container has no access to the GPUs.
    """
    if gpus.usable:
        if local_rank >= gpus.usable:
            raise DeviceError(
                f"local rank {local_rank} requires a separate GPU, but the number of usable GPUs "
                f"on this machine is {gpus.usable}: start fewer ranks, or set run.device=cpu"
            )
        return "cuda"
    if requested == "auto" and (gpus.built is None or not gpus.devices):
        return "cpu"
    raise DeviceError(
        f"run.device is {requested}, but {reason(gpus)}; to train on CPUs, set run.device=cpu"
    )


def reason(gpus: Gpus) -> str:
    """Return the reason why no GPU is usable."""
    if gpus.built is None:
        return "this PyTorch is built without CUDA"
    if not gpus.devices:
        return "this machine has no NVIDIA device"
    there = f"this machine has NVIDIA devices ({', '.join(gpus.devices)}) and CUDA {gpus.built} "
    return there + f"does not start: {gpus.problem or 'it detects no device'}"


def gpus_here() -> Gpus:
    """Return facts about this machine's GPUs. Initializes CUDA if PyTorch is built with it."""
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

    The driver's device files are listed. If there are no device files, the NVIDIA devices on the
    PCI bus are listed: the bus is visible even in a container without GPU access.
    """
    nodes = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
    if nodes:
        yield from nodes
        return
    for device in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            vendor = (device / "vendor").read_text(encoding="utf-8").strip()
            kind = (device / "class").read_text(encoding="utf-8").strip()
        except OSError:
            continue
        if vendor == NVIDIA and kind.startswith(DISPLAY):
            yield device.name


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Context manager to use PyTorch's deterministic kernels.

    Operations without a deterministic kernel only cause a warning: an error could end a run at an
    operation that tests without a GPU do not cover. Entering the context imports torch's compiler,
    which takes seconds.
    """
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Do not fill uninitialised memory: it is never read, and filling it costs a pass over memory.
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
        deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


OPEN_FILES: Final = (256, 65536)
"""Limits on open files: the minimum that a rank needs, and the maximum that a rank requests."""

WORKERS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
COMPILE_WORKERS: Final = 32
"""Maximum number of compile processes per rank, as in torch."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Current and former names of the environment variable for allocator settings."""


def allow_open_files() -> None:
    """Raise this process's open file limit as far as the system allows.

    Raises ConfigError if the limit is too low for a rank's sockets and files.
    """
    fewest, most = OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if allowed < fewest:
        raise ConfigError(
            f"the limit on open files (ulimit -n) must be at least {fewest}, got {allowed}"
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def required_variables(config: Config) -> dict[str, str]:
    """Return the environment variables required for a run on GPUs.

    expandable segments   allow large tensors to reuse memory that earlier steps have freed
    one connection        with tensor or context parallelism, kernels must start in launch order, so
                          that communication overlaps with matmuls; with more queues, a matmul might
                          start first
    fixed workspaces      make cuBLAS deterministic, for run.deterministic
    compile workers       this rank's share of the machine's processors; by default, each rank
                          starts one worker per processor, up to 32
    no registration       NCCL must not register the buffers of a CUDA graph, because buffers in
                          expandable segments cannot be registered
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = min(COMPILE_WORKERS, max(1, len(os.sched_getaffinity(0)) // ranks))
    variables = {ALLOCATOR[0]: "expandable_segments:True", WORKERS: str(workers)}
    if config.parallel.tensor > 1 or config.parallel.context > 1:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if config.optimizer.distributed.cuda_graph:
        variables["NCCL_GRAPH_REGISTER"] = "0"
    if config.run.deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return variables


def missing_variables(config: Config, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from `required_variables` that are not set in `environment`."""
    variables = required_variables(config)
    if any(name in environment for name in ALLOCATOR):
        del variables[ALLOCATOR[0]]
    return {name: value for name, value in variables.items() if name not in environment}


def prepare(config: Config) -> None:
    """Set missing environment variables. Call this before CUDA is initialized; later calls have no
    effect.

    Raises ConfigError if a variable overrides the precision of GPU matmuls.
    """
    if config.run.device == "cpu":
        # PyTorch and megatron-core query CUDA in many places; this hides all GPUs from them.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    if os.environ.get("NVIDIA_TF32_OVERRIDE", "0") == "1":
        raise ConfigError(
            "NVIDIA_TF32_OVERRIDE must not be 1: cuBLAS would round the operands of all float32 "
            "matmuls to TF32, even in the optimizer; unset it. For TF32 in the forward pass only, "
            'call torch.set_float32_matmul_precision("high")'
        )
    variables = missing_variables(config, os.environ)
    os.environ.update(variables)
    if ALLOCATOR[0] in variables:  # PyTorch has read it on import
        torch._C._accelerator_setAllocatorSettings(variables[ALLOCATOR[0]])
    compiler = sys.modules.get("torch._inductor.config")
    if WORKERS in variables and compiler is not None:  # PyTorch has already read the variable
        compiler.compile_threads = int(variables[WORKERS])  # type: ignore[attr-defined]


def environment_variables() -> dict[str, str]:
    """Return this process's CUDA, PyTorch, NCCL and Transformer Engine environment variables."""
    prefixes = ("CUDA_", "CUBLAS_", "NVIDIA_TF32_", "NCCL_", "TORCH", "PYTORCH_", "NVTE_")
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(prefixes)}


ROOT: Final = Path(__file__).resolve().parent.parent.parent
PACKAGES: Final = ("torch", "megatron-core", "transformer-engine", "triton", "numpy", "spectrain")
DRIVER: Final = Path("/proc/driver/nvidia/version")

Facts = dict[str, str | None]


def versions() -> Facts:
    """Return `library_versions`, and the commit if this is a git checkout."""
    return library_versions() | {"commit": commit()}


def library_versions() -> Facts:
    """Return the versions of Python and of all packages in `PACKAGES`. A package that is not
    installed has version None.

    The torch version includes the build, e.g. `2.13.0+cu130`, which the metadata of some wheels
    omit.
    """
    versions: Facts = {"python": python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions | {"torch": str(torch.__version__)}


def commit() -> str | None:
    """Return the commit of this git checkout, or None outside a git checkout."""
    if not (ROOT / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    return None


def device_facts(device: torch.device) -> Facts:
    """Return the device name and, for a GPU, its memory and the versions of the driver, CUDA, cuDNN
    and NCCL."""
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
    # A simulated device has no libraries to query.
    with contextlib.suppress(RuntimeError):
        facts["cudnn"] = str(cudnn.version()) if cudnn.is_available() else None
    with contextlib.suppress(AttributeError, RuntimeError):
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def driver() -> str | None:
    """Return the NVIDIA driver version, or None if unknown."""
    with contextlib.suppress(OSError):
        words = DRIVER.read_text(encoding="utf-8").partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None


def device_line(device: torch.device) -> str:
    """Return a one-line description of the device, printed at the start of a run."""
    facts = device_facts(device) | {"torch": torch.__version__}
    first = facts.pop("device")
    words = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if device.type == "cuda":
        words += [f"{name}={value}" for name, value in environment_variables().items()]
    return ", ".join([str(first), *words])
