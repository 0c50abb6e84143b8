"""Start of a rank: limit of open files, environment variables, process groups, and comparison of
settings, code, versions and data between ranks.

CUDA, PyTorch's allocator and NCCL read their environment variables when they start. Versions
include packages, the commit, the device, the driver and its libraries.
"""

import contextlib
import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import machine, python_version
from typing import Any, Final

import torch
from torch.backends import cudnn

from parallel.comm.collectives import disagreements
from parallel.comm.groups import Groups, initialize
from training.config import Config
from training.config.yaml_files import flat
from training.errors import ConfigError, InputError
from training.machine.device import device_type

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
    no registration       NCCL must not register the buffers of a CUDA graph, because expandable
                          segments do not support it
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
    """Set missing environment variables before CUDA starts; later calls have no effect.

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
        words = DRIVER.read_text(encoding="utf-8").splitlines()[0].split()
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


FOLDERS: Final = ("spectral", "models", "parallel", "training")
"""Folders whose files must be equal on all ranks."""


class RanksDifferError(InputError):
    """A difference between the ranks of a run in settings, code, versions or data."""


def start_groups(config: Config, **options: str) -> Groups:
    """Start the process groups of the config's layout; `parallel.comm.groups.shutdown` ends them.

    Raises RanksDifferError if ranks differ in settings, `options`, code or versions, ConfigError if
    `check_restarts` or `allow_open_files` does.
    """
    check_restarts()
    allow_open_files()
    facts = {**dict(flat(asdict(config))), **options, **program()}
    prepare(config)
    return initialize(
        config.parallel.layout,
        timeout_seconds=config.parallel.timeout_seconds,
        device_type=device_type(config),
        agree=partial(require_agreement, facts),
    )


def check_restarts() -> None:
    """Raise ConfigError if torchrun may restart ranks of several nodes with one shared store.

    Each node counts its own restarts, so ranks could wait for each other in different attempts.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared and restarts and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE must be 1 in torchrun's environment for "
            "--max-restarts on several nodes, got "
            f"{os.environ.get('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', 'nothing')}"
        )


def program() -> dict[str, Any]:
    """Return a hash of the files of each package, and the versions of libraries."""
    facts: dict[str, Any] = {f"code of {name}": source_hash(ROOT / name) for name in FOLDERS}
    return facts | {f"version of {name}": version for name, version in library_versions().items()}


def source_hash(folder: Path) -> str:
    """Return a hash of the paths and contents of all Python and JSON files in a folder."""
    digest = hashlib.sha256()
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


def require_agreement(facts: Mapping[str, Any]) -> None:
    """Raise RanksDifferError on all ranks if a fact differs, with one line per differing fact;
    collective."""
    lines = disagreements(facts)
    if lines:
        raise RanksDifferError("\n".join(lines))
