"""Kernels and backends of a config, and checks that a device can run them."""

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
    """Return the dtype with a config's name, or None for null."""
    return None if name is None else DTYPES[name]


def exchange_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which momentum and updates of split matrices are sent."""
    return DTYPES[config.optimizer.distributed.exchange_dtype or config.train.precision]


def check_backends(config: Config, device: torch.device) -> None:
    """Raise ConfigError, with all problems, if installed packages or the device do not support the
    config; DeviceError if kernels do not start on the device."""
    checks = chain(package_checks(config, device), device_checks(config, device))
    if lines := list(problems(config, checks)):
        raise ConfigError("\n".join(lines))
    check_kernels(device)


def package_checks(config: Config, device: torch.device) -> Iterator[Check]:
    """Check that the chosen kernels' packages and compilers are installed."""
    model, train = config.model, config.train
    for key, value, package, installed, other in (
        ("train.fused_loss", "liger", "liger-kernel", has_liger, "null"),
        ("train.fused_backward", "triton", "triton", has_triton, "null"),
        (
            "model.attention_backend",
            "transformer_engine",
            "transformer-engine[pytorch]",
            has_transformer_engine,
            "sdpa",
        ),
    ):
        missing = attrgetter(key)(config) == value and not installed()
        rule = f"needs {package}, which is not installed: pip install it, or set {key}={other}"
        yield key, missing, rule
    compiler = missing_compiler(device) if train.compile == "inductor" else None
    yield "train.compile", compiler, f"needs {compiler} here: install it, or set train.compile=null"
    if model.attention_kernel != "auto":
        try:
            flash_attention(model.attention_kernel)
        except ImportError as error:
            yield (
                "model.attention_kernel",
                True,
                f"needs a package that cannot be imported ({last_line(error)}): install it as "
                "docs/running.md says, or set model.attention_kernel=auto",
            )


def device_checks(config: Config, device: torch.device) -> Iterator[Check]:
    """Check that the device supports the config's kernels and recordings."""
    train, kind, kernel = config.train, device.type, config.model.attention_kernel
    graph = config.optimizer.distributed.cuda_graph and kind != "cuda"
    rule = f"must be false on a {kind}, which records no graphs"
    yield "optimizer.distributed.cuda_graph", graph, rule
    snapshot = config.log.profile is not None and config.log.profile.memory and kind != "cuda"
    rule = f"must be false on a {kind}, whose memory has no snapshots"
    yield "log.profile.memory", snapshot, rule
    plain_cpu = kind == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"
    for key, value in (("fused_loss", train.fused_loss), ("fused_backward", train.fused_backward)):
        wrong = plain_cpu and value not in ("auto", None)
        yield f"train.{key}", wrong, "must be auto or null on a cpu"
    if kernel != "auto":
        majors = FLASH_CAPABILITIES[kernel]
        there = kind == "cuda" and torch.cuda.get_device_capability(device)[0] in majors
        capability = ", ".join(f"{major}.x" for major in majors)
        yield (
            "model.attention_kernel",
            not there,
            f"{kernel} needs a GPU of compute capability {capability}, got {device_name(device)}",
        )


TILE = Tile(64, 32, 4, 3)


def check_kernels(device: torch.device) -> None:
    """Compile and launch one of the optimizer's kernels; raise DeviceError if it fails.

    Otherwise a kernel that fails would only do so in the first step of the run.
    """
    if not listed(device_name(device)) or importlib.util.find_spec("triton") is None:
        return
    problem = compiler_problem()
    if problem is not None:
        raise DeviceError(
            f"kernels for {device_name(device)} are compiled on this machine, which lacks "
            f"{problem}; without triton the optimizer uses the library's kernels"
        )
    from spectral.kernels import symmetric

    try:
        ones = torch.ones(1, 64, 64, device=device)
        symmetric.product(ones, ones, TILE)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        raise DeviceError(
            f"a Triton kernel does not start on {device_name(device)}: {first_line(error)}"
        ) from error


def compile_backend(config: Config, device: torch.device) -> tuple[str | None, str]:
    """Return the backend of torch.compile for a device, or None to compile nothing, and a
    description.

    With auto, the description states why nothing is compiled.
    """
    if config.train.compile != "auto":
        return config.train.compile, config.train.compile or "none"
    if device.type == "cpu":
        return None, "none"
    if config.model.attention_backend != "sdpa":
        return None, f"none, {config.model.attention_backend} fuses them"
    missing = missing_compiler(device)
    if missing is not None:
        return None, f"none, inductor needs {missing}"
    return "inductor", "inductor"


def has_liger() -> bool:
    """Return whether liger-kernel is installed."""
    return importlib.util.find_spec("liger_kernel") is not None


def fused_loss(config: Config, device: torch.device) -> bool:
    """Return whether Liger's kernels compute the loss on a device."""
    if config.train.fused_loss != "auto":
        return config.train.fused_loss == "liger"
    return has_liger() and device.type == "cuda" and config.train.loss_chunk is None


def fused_backward(config: Config, device: torch.device) -> bool:
    """Return whether Triton kernels compute gradients of activations and heads on a device."""
    if config.train.fused_backward != "auto":
        return config.train.fused_backward == "triton"
    plain = config.model.attention_backend != "transformer_engine"
    return plain and device.type == "cuda" and missing_compiler(device) is None


def kernel_of(config: Config, groups: Groups) -> str:
    """Return the name of the kernel that computes this rank's attention.

    Raises ConfigError if the device is a GPU without a fused kernel for the config.
    """
    model, ranks = config.model, groups.tensor.size
    if model.attention_backend != "sdpa":
        return f"chosen by {model.attention_backend}"
    if model.explicit_scores:
        return "products of blocks of scores"
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
            f"no fused kernel of PyTorch computes attention with heads of {model.head_size} and "
            f"values of {model.value_head_size} in {config.train.precision} here: {error}"
        ) from error


def slow_precision(precision: str, device: torch.device) -> str | None:
    """Return the cost of `train.precision` on a device without instructions for it, else None."""
    if precision != "bf16" or device.type != "cpu" or torch.bfloat16 not in SLOW_ON_CPU:
        return None
    return (
        "bf16 on a CPU without AVX-512 computes products in float32 and rounds them, which is "
        "slower than train.precision=fp32"
    )


def slow_attention(kernel: str, device: torch.device) -> str | None:
    """Return a note if a faster attention kernel exists on a device, else None."""
    if kernel not in ("flash_attention", "efficient_attention") or device.type != "cuda":
        return None
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    return (
        "cuDNN's kernel takes about two thirds of the time on this GPU, but the installed cuDNN "
        "does not support heads of this size"
    )
