"""The kernels selected on a device, and the reasons and costs that a run reports."""

import importlib.util

import pytest
import torch

from tests.run_configs import tiny_config
from training.dry_run import compiled_on_gpu, fused_on_gpu
from training.machine import backends

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ENGINE = {"model__attention_backend": "transformer_engine"}


@pytest.fixture
def machine(monkeypatch):
    """A function that sets which compiler is missing, and whether liger-kernel is installed."""

    def choose(missing: str | None = None, liger: bool = True) -> None:
        monkeypatch.setattr(backends, "missing_compiler", lambda device: missing)
        there = {"liger_kernel"} if liger else set()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in there or None)

    return choose


@pytest.mark.parametrize(
    ("keys", "device", "missing", "backend"),
    [
        ({}, CPU, None, (None, "none")),
        ({}, GPU, None, ("inductor", "inductor")),
        ({}, GPU, "gcc", (None, "none, because inductor requires gcc")),
        (ENGINE, GPU, None, (None, "none, because transformer_engine fuses the operations")),
        ({"train__compile": "null"}, GPU, None, (None, "none")),
        ({"train__compile": "aot_eager"}, CPU, None, ("aot_eager", "aot_eager")),
        ({"train__compile": "inductor"}, GPU, "gcc", ("inductor", "inductor")),
        ({"train__compile": "inductor"}, GPU, None, ("inductor", "inductor")),
    ],
)
def test_the_compile_backend_has_a_reason(keys, device, missing, backend, machine, tmp_path):
    machine(missing)
    config = tiny_config(str(tmp_path), **keys)
    assert backends.compile_backend(config, device) == backend
    if device == GPU and missing is None:
        assert compiled_on_gpu(config) is (backend[0] is not None)  # in a plan


@pytest.mark.parametrize(
    ("keys", "device", "liger", "fused"),
    [
        ({}, GPU, True, True),
        ({}, GPU, False, False),
        ({}, CPU, True, False),
        ({"train__loss_chunk": 64}, GPU, True, False),
        ({"train__fused_loss": "null"}, GPU, True, False),
        ({"train__fused_loss": "liger"}, GPU, True, True),
    ],
)
def test_the_loss_is_fused_if_liger_computes_all(keys, device, liger, fused, machine, tmp_path):
    machine(liger=liger)
    assert backends.fused_loss(tiny_config(str(tmp_path), **keys), device) is fused


@pytest.mark.parametrize(
    ("keys", "device", "missing", "fused"),
    [
        ({}, GPU, None, True),
        ({}, GPU, "gcc", False),
        ({}, CPU, None, False),
        (ENGINE, GPU, None, False),
        ({"train__fused_backward": "null"}, GPU, None, False),
        ({"train__fused_backward": "triton"}, GPU, None, True),
    ],
)
def test_gradients_are_fused_where_triton_compiles(keys, device, missing, fused, machine, tmp_path):
    machine(missing)
    config = tiny_config(str(tmp_path), **keys)
    assert backends.fused_backward(config, device) is fused
    if device == GPU and missing is None:
        assert fused_on_gpu(config) is fused  # in a plan


def test_slow_bf16_is_noted_on_cpus_alone(monkeypatch):
    for slow, device, precision, noted in (
        ({torch.float16, torch.bfloat16}, CPU, "bf16", True),
        ({torch.float16, torch.bfloat16}, CPU, "fp32", False),
        ({torch.float16, torch.bfloat16}, GPU, "bf16", False),
        ({torch.float16}, CPU, "bf16", False),
    ):
        monkeypatch.setattr(backends, "SLOW_ON_CPU", slow)
        note = backends.slow_precision(precision, device)
        assert ("slower than train.precision=fp32" in str(note)) is noted


@pytest.mark.parametrize(
    ("kernel", "capability", "noted"),
    [
        ("flash_attention", (9, 0), True),
        ("efficient_attention", (10, 3), True),
        ("flash_attention", (8, 9), False),
        ("cudnn_attention", (9, 0), False),
        ("blockwise attention scores", (9, 0), False),
    ],
)
def test_slow_attention_is_noted_where_cudnn_is_faster(kernel, capability, noted, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert ("cuDNN" in str(backends.slow_attention(kernel, GPU))) is noted
    assert backends.slow_attention(kernel, CPU) is None
