"""Kernels and backends that a config chooses, and whether a device can run them."""

import importlib.util
import os
import subprocess

import torch

from models.blocks.attention import FLASH_CAPABILITIES, attention_kernel, flash_attention
from models.blocks.compiled import missing_compiler
from models.engine import compiler_problem, has_transformer_engine
from parallel.comm.groups import Groups
from parallel.error_text import first_line, last_line
from spectral.kernels.dispatch import Tile, device_name, has_triton, listed
from spectral.kernels.library import SLOW_ON_CPU
from training.config import Config
from training.errors import ConfigError
from training.machine.device import DeviceError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def optional_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a config's name, None for null."""
    return None if name is None else DTYPES[name]


def exchange_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which momentum and updates of split matrices are sent."""
    return DTYPES[config.optimizer.distributed.exchange_dtype or config.train.precision]


def check_backend(config: Config) -> None:
    """Raise ConfigError if the attention backend or a compiler for kernels is not installed."""
    if config.train.compile == "inductor":
        missing = missing_compiler(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if missing is not None:
            raise ConfigError(
                f"train.compile is inductor, which needs {missing} on this machine: install it or "
                "set train.compile=null"
            )
    if config.train.fused_loss == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "train.fused_loss is liger, which is not installed: pip install liger-kernel, or set "
            "train.fused_loss=null"
        )
    kernel = config.model.attention_kernel
    if kernel != "auto":
        try:
            flash_attention(kernel)
        except ImportError as error:
            raise ConfigError(
                f"model.attention_kernel is {kernel}, whose package cannot be imported "
                f"({last_line(error)}): install it as docs/running.md says, or set "
                "model.attention_kernel=auto"
            ) from error
    if config.train.fused_backward == "triton" and not has_triton():
        raise ConfigError(
            "train.fused_backward is triton, which is not installed: pip install triton, or set "
            "train.fused_backward=null"
        )
    wanted = config.model.attention_backend
    if wanted == "transformer_engine" and not has_transformer_engine():
        raise ConfigError(
            "model.attention_backend is transformer_engine, which is not installed: pip "
            "install transformer-engine[pytorch], or set model.attention_backend=sdpa"
        )


def check_device(config: Config, device: torch.device) -> None:
    """Raise ConfigError if the device lacks something that the config needs, DeviceError if kernels
    do not start on it."""
    if config.optimizer.distributed.cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"optimizer.distributed.cuda_graph must be false on a {device.type}, which records no "
            "graphs, got true"
        )
    profile = config.log.profile
    if profile is not None and profile.memory and device.type != "cuda":
        raise ConfigError(
            f"log.profile.memory must be false on a {device.type}, whose memory has no snapshots, "
            "got true"
        )
    train = config.train
    for key, value in (("fused_loss", train.fused_loss), ("fused_backward", train.fused_backward)):
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if value not in ("auto", None) and device.type == "cpu" and not interpreted:
            raise ConfigError(f"train.{key} must be auto or null on a cpu, got {value}")
    check_kernels(device)
    kernel = config.model.attention_kernel
    if kernel == "auto":
        return
    majors = FLASH_CAPABILITIES[kernel]
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in majors:
        raise ConfigError(
            f"model.attention_kernel {kernel} needs a GPU of compute capability "
            f"{', '.join(f'{m}.x' for m in majors)}, got {device_name(device)}"
        )


TILE = Tile(64, 32, 4, 3)


def check_kernels(device: torch.device) -> None:
    """Compile and launch one kernel where the optimizer would; raise DeviceError if it fails.

    The first launch of a run would otherwise be in its first step.
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
        said = first_line(error)
        raise DeviceError(
            f"a Triton kernel does not start on {device_name(device)}: {said}"
        ) from error


def compile_backend(config: Config, device: torch.device) -> tuple[str | None, str]:
    """Return the backend of torch.compile for a device, None to compile nothing, and what to say of
    it: of auto, why nothing is compiled."""
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


def fused_loss(config: Config, device: torch.device) -> bool:
    """Return whether Liger's kernels compute the loss on a device."""
    if config.train.fused_loss != "auto":
        return config.train.fused_loss == "liger"
    installed = importlib.util.find_spec("liger_kernel") is not None
    return installed and device.type == "cuda" and config.train.loss_chunk is None


def fused_backward(config: Config, device: torch.device) -> bool:
    """Return whether Triton kernels compute gradients of activations and heads on a device."""
    if config.train.fused_backward != "auto":
        return config.train.fused_backward == "triton"
    plain = config.model.attention_backend != "transformer_engine"
    return plain and device.type == "cuda" and missing_compiler(device) is None


def kernel_of(config: Config, groups: Groups) -> str:
    """Return the name of the kernel that computes this rank's attention.

    Raises ConfigError if there is no fused one on a GPU.
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
