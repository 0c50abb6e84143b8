"""The device and environment of a rank: its GPU, environment variables, open files, and versions.

With `run.device: auto`, each rank uses a GPU if the machine has GPUs. CUDA, PyTorch's allocator and
NCCL read their environment variables when they start. Versions include packages, the commit, the
device, the driver and its libraries. This file must not import megatron-core, because only
`models.engine.import_engine` suppresses its warnings.
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
    """Return the type of this rank's device.

    Raises DeviceError if the configured device is not available.
    """
    requested = config.run.device
    if requested == "cpu":
        return "cpu"
    return choose(requested, gpus_here(), int(os.environ.get("LOCAL_RANK", "0")))


NVIDIA: Final = "0x10de"
"""PCI vendor id of NVIDIA."""
DISPLAY: Final = "0x03"
"""Prefix of the PCI class of GPUs."""


class DeviceError(InputError):
    """Error for a requested device that is not available."""


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


def choose(
    requested: Literal["auto", "cuda"], gpus: Gpus, local_rank: int
) -> Literal["cuda", "cpu"]:
    """Return the device type of local rank `local_rank`.

    `auto` selects cuda if CUDA initializes, and cpu without a GPU or if PyTorch is built without
    CUDA. Raises DeviceError if a requested GPU is not available, if CUDA does not initialize (the
    driver is too old for this PyTorch, or a container has no access to its GPUs), or if there are
    more ranks than GPUs.
    """
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
    """Return facts about this machine's GPUs. Start CUDA if PyTorch is built with CUDA."""
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

    These are the device files of the driver. If there are none, they are the devices on the PCI
    bus, which are visible even in a container without access to GPUs.
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


@contextlib.contextmanager
def repeatable() -> Iterator[None]:
    """Use PyTorch's deterministic kernels within a context.

    An operation without a deterministic kernel causes only a warning. An error could end a run at
    an operation that no test without a GPU covers. The setting imports torch's compiler, which
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


OPEN_FILES: Final = (256, 65536)
"""Smallest allowed limit of open files per rank, and the largest limit that a rank requests."""

WORKERS: Final = "TORCHINDUCTOR_COMPILE_THREADS"
COMPILE_WORKERS: Final = 32
"""Largest number of compile processes per rank, as in torch."""

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Current and former name of the environment variable with the allocator's settings."""


def allow_open_files() -> None:
    """Raise this process's limit of open files as far as the system allows.

    Raises ConfigError if the limit is too low for the sockets and files of a rank.
    """
    fewest, most = OPEN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if allowed < fewest:
        raise ConfigError(
            f"the limit of open files (ulimit -n) must be at least {fewest}, got {allowed}"
        )
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def required_variables(config: Config) -> dict[str, str]:
    """Return the environment variables that a run on GPUs needs.

    expandable segments   allow memory freed in one step to be used for large tensors in another
    one connection        with tensor or context parallelism, kernels must start in launch order, so
                          that communication overlaps with matrix products; with more queues, a
                          product might start first
    fixed workspaces      make cuBLAS deterministic, for run.deterministic
    compile workers       this rank's share of the machine's processors; by default each rank starts
                          one worker per processor, up to 32
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
    """Return the variables of `required_variables` that are not set in `environment`."""
    variables = required_variables(config)
    if any(name in environment for name in ALLOCATOR):
        del variables[ALLOCATOR[0]]
    return {name: value for name, value in variables.items() if name not in environment}


def prepare(config: Config) -> None:
    """Set missing environment variables before CUDA starts. Later calls have no effect.

    Raises ConfigError if a variable overrides the precision of a GPU's matrix products.
    """
    if config.run.device == "cpu":
        # PyTorch and megatron-core query CUDA in many places; this variable hides all GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return
    if os.environ.get("NVIDIA_TF32_OVERRIDE", "0") == "1":
        raise ConfigError(
            "NVIDIA_TF32_OVERRIDE must not be 1: cuBLAS would round the operands of all float32 "
            "products to TF32, even in the optimizer; unset it. For TF32 in the forward pass only, "
            'call torch.set_float32_matmul_precision("high")'
        )
    variables = missing_variables(config, os.environ)
    os.environ.update(variables)
    if ALLOCATOR[0] in variables:  # PyTorch read the variable when it was imported
        torch._C._accelerator_setAllocatorSettings(variables[ALLOCATOR[0]])
    compiler = sys.modules.get("torch._inductor.config")
    if WORKERS in variables and compiler is not None:  # PyTorch has already read the variable
        compiler.compile_threads = int(variables[WORKERS])  # type: ignore[attr-defined]


def settings() -> dict[str, str]:
    """Return this process's environment variables of CUDA, PyTorch, NCCL and Transformer Engine."""
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
    """Return the versions of Python and packages, None for a package that is not installed.

    The version of torch includes the build, as in `2.13.0+cu130`, which the metadata of some wheels
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
    """Return the name of the device, and for a GPU its memory and the versions of the driver, CUDA,
    cuDNN and NCCL."""
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
    """Return the version of the NVIDIA driver, or None if unknown."""
    with contextlib.suppress(OSError):
        words = DRIVER.read_text(encoding="utf-8").partition("\n")[0].split()
        return next((word for word in words if word[0].isdigit() and "." in word), None)
    return None


def described(device: torch.device) -> str:
    """Return one line about the device, printed at the start of a run."""
    facts = device_facts(device) | {"torch": torch.__version__}
    first = facts.pop("device")
    words = [f"{name} {value}" for name, value in facts.items() if value is not None]
    if device.type == "cuda":
        words += [f"{name}={value}" for name, value in settings().items()]
    return ", ".join([str(first), *words])
