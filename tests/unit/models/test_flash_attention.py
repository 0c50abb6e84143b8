"""Attention with the FlashAttention packages, replaced by a fake with the same interface, and
errors."""

import math
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.blocks.attention import FLASH_MODULES, causal_attention
from parallel.comm.groups import Groups
from tests.models import drawn, losses_of
from tests.tiny_families import tiny_model
from training.config import InvalidConfigError, load_config
from training.errors import ConfigError
from training.machine import backends
from training.machine.backends import check_backends, kernel_of

ASKED = ["model.attention_kernel=flash_attention_3", "train.precision=bf16"]


def stand_in(with_sums: bool) -> SimpleNamespace:
    """Return a module whose `flash_attn_func` has the same arguments, layout and mask as in the
    packages. It computes all scores, with a causal mask aligned to the last query and key."""

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        softmax_scale: float | None = None,
        causal: bool = False,
        deterministic: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
        scores = scale * torch.einsum("bshd,bthd->bhst", q, k)
        seen = torch.ones(scores.shape[-2:]).tril(scores.shape[-1] - scores.shape[-2]).bool()
        scores = scores.masked_fill(~seen, -torch.inf) if causal else scores
        out = torch.einsum("bhst,bthd->bshd", scores.softmax(-1), v)
        return (out, scores.logsumexp(-1)) if with_sums else out

    return SimpleNamespace(flash_attn_func=flash_attn_func)


@pytest.mark.parametrize("kernel", FLASH_MODULES)
@pytest.mark.parametrize("family", ["qwen3", "moe"])
def test_a_model_has_the_losses_and_gradients_of_sdpa(family, kernel, world, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", SimpleNamespace())
    monkeypatch.setitem(sys.modules, FLASH_MODULES[kernel], stand_in(kernel == "flash_attention_4"))
    results = []
    for name in ("auto", kernel):
        chunk, _ = drawn(tiny_model(family, attention_kernel=name), torch.float64)
        losses = losses_of(chunk)
        losses.mean().backward()
        results.append([losses.detach(), *(p.grad for p in chunk.parameters())])
    attention = chunk.decoder.layers[0].self_attention.core_attention
    part = torch.randn(3, 2, 4, 8), torch.randn(9, 2, 2, 8), torch.randn(9, 2, 2, 8)
    # The last queries of a sequence, as on ranks of context parallelism.
    torch.testing.assert_close(attention.attend(*part), causal_attention(*part, attention.scale))
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_auto_takes_none_of_them_and_the_log_names_the_one_that_is_asked(
    minimal: Any, world: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "flash_attention", lambda kernel: pytest.fail("imported"))
    config = load_config(minimal, [])
    check_backends(config, torch.device("cpu"))
    assert "flash_attention_" not in kernel_of(config, world)
    assert kernel_of(load_config(minimal, ASKED), world) == "flash_attention_3"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (ASKED[:1], "'flash_attention_3' requires train.precision bf16"),
        ([*ASKED, "model.attention_backend=transformer_engine"], "must be auto with attention_b"),
        ([*ASKED, "model.family=gemma2", "model.sliding_window=4"], "must be auto with latent"),
    ],
)
def test_what_they_do_not_compute_is_refused(minimal: Any, keys: list[str], message: str) -> None:
    with pytest.raises(InvalidConfigError, match=message):
        load_config(minimal, keys)


def test_a_missing_package_or_another_device_is_refused(minimal, monkeypatch) -> None:
    config = load_config(minimal, ASKED)
    with pytest.raises(ConfigError, match=r"cannot be imported: .*flash_attn_interface"):
        check_backends(config, torch.device("cpu"))
    with pytest.raises(ConfigError, match="a GPU with compute capability 8.x, 9.x, got cpu"):
        check_backends(config, torch.device("cpu"))
