"""Select the kernels and backends for a config, and check that the device supports them."""

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from itertools import chain
from operator import attrgetter

import torch

from models.blocks.attention import FLASH_CAPABILITIES, attention_kernel, flash_attention
from models.blocks.compiled import missing_compiler
from models.engine import compiler_problem, has_transformer_engine
from models.section import Check, problems
from parallel.comm.groups import Groups
from parallel.error_text import first_line, last_line
from spectral.kernels.dispatch import Tile, device_name, has_triton, listed
from spectral.kernels.library import SLOW_ON_CPU
from training.config import Config
from training.errors import ConfigError
from training.machine.device import DeviceError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def optional_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype that is called `name` in the config, or None if `name` is None."""
    return None if name is None else DTYPES[name]


def exchange_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which momentum and updates of sharded matrices are exchanged."""
    return DTYPES[config.optimizer.distributed.exchange_dtype or config.train.precision]


def check_backends(config: Config, device: torch.device) -> None:
    """Raise ConfigError if the installed packages or the device do not support the config; the
    error lists all problems. Raise DeviceError if the device cannot launch Triton kernels."""
    checks = chain(package_checks(config, device), device_checks(config, device))
    if lines := list(problems(config, checks)):
        raise ConfigError("\n".join(lines))
    check_kernels(device)


def package_checks(config: Config, device: torch.device) -> Iterator[Check]:
    """Check that the packages and compilers required by the configured kernels are installed."""
    model, train, engine = config.model, config.train, "model.attention_backend"
    for key, value, package, installed, other in (
        ("train.fused_loss", "liger", "liger-kernel", has_liger, "null"),
        ("train.fused_backward", "triton", "triton", has_triton, "null"),
        (
            engine,
            "transformer_engine",
            "transformer-engine[pytorch]",
            has_transformer_engine,
            "sdpa",
        ),
    ):
        missing = attrgetter(key)(config) == value and not installed()
        rule = f"requires {package}: it is not installed; pip install it, or set {key}={other}"
        yield key, missing, rule
    compiler = missing_compiler(device) if train.compile == "inductor" else None
    yield "train.compile", compiler, f"requires {compiler}: install it, or set train.compile=null"
    if model.attention_kernel != "auto":
        try:
            flash_attention(model.attention_kernel)
        except ImportError as error:
            rule = (
                f"requires a package that cannot be imported: {last_line(error)}; see "
                "docs/running.md for how to install it, or set model.attention_kernel=auto"
            )
            yield "model.attention_kernel", True, rule


def device_checks(config: Config, device: torch.device) -> Iterator[Check]:
    """Check that the device supports the configured kernels, CUDA graphs and memory snapshots."""
    train, kind, kernel = config.train, device.type, config.model.attention_kernel
    graph = config.optimizer.distributed.cuda_graph and kind != "cuda"
    rule = f"must be false on device {kind}: this device does not support CUDA graphs"
    yield "optimizer.distributed.cuda_graph", graph, rule
    snapshot = config.log.profile is not None and config.log.profile.memory and kind != "cuda"
    rule = f"must be false on device {kind}: this device does not support memory snapshots"
    yield "log.profile.memory", snapshot, rule
    plain_cpu = kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"
    for key, value in (("fused_loss", train.fused_loss), ("fused_backward", train.fused_backward)):
        wrong = plain_cpu and value not in ("auto", None)
        yield f"train.{key}", wrong, "must be auto or null on a CPU"
    if kernel != "auto":
        majors = FLASH_CAPABILITIES[kernel]
        there = kind == "cuda" and torch.cuda.get_device_capability(device)[0] in majors
        capability = ", ".join(f"{major}.x" for major in majors)
        needed = f"= {kernel!r} requires a GPU with compute capability {capability}"
        yield "model.attention_kernel", not there, f"{needed}, got {device_name(device)}"


TILE = Tile(64, 32, 4, 3)


def check_kernels(device: torch.device) -> None:
    """Compile and launch one of the optimizer's kernels. Raise DeviceError if this fails.

    Without this check, a kernel that cannot be launched would only fail at the run's first step.
    """
    if not (listed(device_name(device)) and has_triton()):
        return
    problem = compiler_problem()
    if problem is not None:
        raise DeviceError(
            f"Triton cannot compile kernels for {device_name(device)} without {problem}; if you "
            "uninstall triton, the optimizer falls back to torch's kernels"
        )
    from spectral.kernels import symmetric

    try:
        ones = torch.ones(1, 64, 64, device=device)
        symmetric.product(ones, ones, TILE)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise DeviceError(
            f"a Triton kernel cannot be launched on {device_name(device)}: {first_line(error)}"
        ) from error


def compile_backend(config: Config, device: torch.device) -> tuple[str | None, str]:
    """Return the torch.compile backend for a device (None for eager mode) and a description of it.

    If `auto` disables compilation on a GPU, the description states the reason.
    """
    if config.train.compile != "auto":
        return config.train.compile, config.train.compile or "none"
    if device.type == "cpu":
        return None, "none"
    if config.model.attention_backend != "sdpa":
        return None, f"none, because {config.model.attention_backend} fuses the operations"
    missing = missing_compiler(device)
    if missing is not None:
        return None, f"none, because inductor requires {missing}"
    return "inductor", "inductor"


def has_liger() -> bool:
    """Return whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def fused_loss(config: Config, device: torch.device) -> bool:
    """Return whether liger-kernel computes the loss on `device`."""
    if config.train.fused_loss != "auto":
        return config.train.fused_loss == "liger"
    return has_liger() and device.type == "cuda" and config.train.loss_chunk is None


def fused_backward(config: Config, device: torch.device) -> bool:
    """Return whether Triton kernels compute the gradients of gated activations and attention heads
    on `device`."""
    if config.train.fused_backward != "auto":
        return config.train.fused_backward == "triton"
    plain = config.model.attention_backend != "transformer_engine"
    return plain and device.type == "cuda" and missing_compiler(device) is None


def kernel_of(config: Config, groups: Groups) -> str:
    """Return the name of this rank's attention kernel.

    Raises ConfigError if the device is a GPU and PyTorch has no fused attention kernel for the
    config on this GPU.
    """
    model, ranks = config.model, groups.tensor.size
    if model.attention_backend != "sdpa":
        return f"selected by {model.attention_backend}"
    if model.explicit_scores:
        return "blockwise attention scores"
    if model.attention_kernel != "auto":
        return model.attention_kernel
    latent = model.latent is not None
    try:
        return attention_kernel(
            model.heads // ranks,
            model.heads // ranks if latent else max(1, model.query_groups // ranks),
            model.head_size,
            model.value_head_size,
            dtype=DTYPES[config.train.precision],
            device=groups.device,
            documents=config.data.document_mask,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"PyTorch has no fused attention kernel for head dimension {model.head_size}, value "
            f"dimension {model.value_head_size} and {config.train.precision} on this GPU: {error}"
        ) from error


def slow_precision(precision: str, device: torch.device) -> str | None:
    """Return a note on the cost of `train.precision` if the device has to emulate this precision,
    else None."""
    if precision != "bf16" or device.type != "cpu" or torch.bfloat16 not in SLOW_ON_CPU:
        return None
    return (
        "with train.precision bf16, a CPU without AVX-512 runs matmuls in float32 and rounds the "
        "results, which is slower than train.precision=fp32"
    )


def slow_attention(kernel: str, device: torch.device) -> str | None:
    """Return a note if the device has a faster attention kernel than `kernel`, else None."""
    if kernel not in ("flash_attention", "efficient_attention") or device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    return (
        "cuDNN's kernel would take about two thirds of this kernel's time on this GPU, but the "
        "installed cuDNN does not support this head dimension"
    )
