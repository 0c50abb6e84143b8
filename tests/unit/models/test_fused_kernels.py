"""Liger's loss and Spectrain's backward kernels in Triton: results in the interpreter, and
errors."""

import importlib.util

import pytest
import torch

from models.blocks.activation import ACTIVATIONS, with_one_gradient
from tests.commands import interpreted
from training.config import InvalidConfigError, load_config
from training.errors import ConfigError
from training.machine import backends
from training.machine.backends import check_backends

CPU = torch.device("cpu")
ENGINE = "model.attention_backend=transformer_engine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "script"), [("liger_kernel", "loss"), ("triton", "backward")], ids=["loss", "ours"]
)
def test_losses_are_those_without_them_in_the_interpreter(library, script) -> None:
    pytest.importorskip(library)
    interpreted(f"tests/kernels/interpreted_{script}.py")


def test_what_cannot_run_is_refused(minimal, monkeypatch) -> None:
    for message, *options in (
        ("loss_chunk must be null with fused_loss liger", "train.fused_loss=liger",
         "train.loss_chunk=8"),
        ("fused_backward must be auto or null with", "train.fused_backward=triton", ENGINE),
    ):  # fmt: skip
        with pytest.raises(InvalidConfigError, match=message):
            load_config(minimal, options)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    liger = load_config(minimal, ["train.fused_loss=liger"])
    ours = load_config(minimal, ["train.fused_backward=triton"])
    for key, config in (("fused_backward", ours), ("fused_loss", liger)):
        with pytest.raises(ConfigError, match=f"train.{key} must be auto or null on a CPU"):
            check_backends(config, CPU)
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    with pytest.raises(ConfigError, match="= 'triton' requires triton: it is not installed"):
        check_backends(ours, CPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match="'liger' requires liger-kernel: it is not installed; pip"
    ):
        check_backends(liger, CPU)


def test_an_activation_without_a_kernel_stays_as_it_is() -> None:
    activation = ACTIVATIONS["relu2"]
    assert with_one_gradient(activation, activation.block) is activation.block
