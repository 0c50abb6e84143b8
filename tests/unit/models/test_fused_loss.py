"""The loss by Liger's kernels: results in Triton's interpreter, selection, and refusals."""

import importlib.util
from typing import Any

import pytest
import torch

from tests.commands import interpreted
from training.config import InvalidConfigError, load_config
from training.errors import ConfigError
from training.machine.backends import check_backends, fused_loss

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.slow
def test_it_is_the_plain_loss_in_the_interpreter() -> None:
    pytest.importorskip("liger_kernel")
    interpreted("tests/kernels/interpreted_loss.py")


def test_auto_takes_it_on_gpus_where_it_is_installed(minimal, monkeypatch) -> None:
    config = load_config(minimal, [])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert fused_loss(config, GPU) and not fused_loss(config, CPU)
    assert not fused_loss(load_config(minimal, ["train.loss_chunk=8"]), GPU)
    assert not fused_loss(load_config(minimal, ["train.fused_loss=null"]), GPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not fused_loss(config, GPU)


def test_what_cannot_be_had_is_refused(minimal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError, match="loss_chunk must be null with fused_loss liger"):
        load_config(minimal, ["train.fused_loss=liger", "train.loss_chunk=8"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="liger-kernel, which is not installed: pip install it"):
        check_backends(load_config(minimal, ["train.fused_loss=liger"]), CPU)
