"""Backward passes by our Triton kernels: losses in the interpreter, selection, and refusals."""

from typing import Any

import pytest
import torch

from models.blocks.activation import ACTIVATIONS, with_one_gradient
from tests.commands import interpreted
from training.config import InvalidConfigError, load_config
from training.errors import ConfigError
from training.machine import backends
from training.machine.backends import check_backends, fused_backward

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.slow
def test_losses_are_those_without_them_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    interpreted("tests/kernels/interpreted_backward.py")


def test_auto_takes_them_on_gpus_with_triton(minimal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(minimal, [])
    monkeypatch.setattr(backends, "missing_compiler", lambda device: None)
    assert fused_backward(config, GPU) and not fused_backward(config, CPU)
    assert not fused_backward(load_config(minimal, ["train.fused_backward=null"]), GPU)
    engine = load_config(minimal, ["model.attention_backend=transformer_engine"])
    assert not fused_backward(engine, GPU)
    monkeypatch.setattr(backends, "missing_compiler", lambda device: "a C compiler")
    assert not fused_backward(config, GPU)


def test_what_cannot_run_is_refused(minimal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = "model.attention_backend=transformer_engine"
    with pytest.raises(InvalidConfigError, match="fused_backward must be auto or null with"):
        load_config(minimal, ["train.fused_backward=triton", engine])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for key, value in (("fused_backward", "triton"), ("fused_loss", "liger")):
        config = load_config(minimal, [f"train.{key}={value}"])
        with pytest.raises(ConfigError, match=f"train.{key} must be auto or null on a cpu"):
            check_backends(config, CPU)
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="fused_backward needs triton, which is not installed"):
        check_backends(load_config(minimal, ["train.fused_backward=triton"]), CPU)


def test_an_activation_without_a_kernel_stays_as_it_is() -> None:
    activation = ACTIVATIONS["relu2"]
    assert with_one_gradient(activation, activation.block) is activation.block
