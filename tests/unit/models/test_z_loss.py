"""The z-loss in every implementation of the loss, compared with autograd in float64, and runs
without a z-loss."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor

from models.blocks.decoder_model import losses_and_normalizers
from parallel.comm.groups import Groups
from tests.models import drawn, tokens_of
from tests.step_trace import Operations
from tests.tiny_families import tiny_model
from training.step import mean_loss

Z = 0.3
"""A coefficient that makes the gradients of the z-loss as large as the gradients of the loss."""


def by_autograd(logits: Tensor, labels: Tensor, z_loss: float = Z) -> Tensor:
    """Compute the training loss from logits `[..., v]`, by its definition."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return losses + z_loss * logits.logsumexp(-1).square().mean()


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 10, 100])
def test_chunks_equal_autograd(chunk: int, cap: float | None) -> None:
    hidden, weight = (torch.randn(n, 6, dtype=torch.float64, requires_grad=True) for n in (9, 37))
    labels = torch.randint(37, (9,))
    losses, normalizers = losses_and_normalizers(
        hidden, weight, labels, chunk=chunk, group=None, softcap=cap
    )
    ours = losses.mean() + Z * normalizers.square().mean()
    logits = hidden @ weight.T
    expected = by_autograd(logits if cap is None else cap * torch.tanh(logits / cap), labels)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    found, wanted = (torch.autograd.grad(x, (hidden, weight)) for x in (ours, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("loss_chunk", [None, 7])
@pytest.mark.parametrize("name", ["llama", "tied llama", "gemma2"])
def test_models_equal_autograd(name, loss_chunk, dtype, world) -> None:
    """The loss, both metrics and all gradients agree. gemma2 caps its logits."""
    shape = tiny_model(name.removeprefix("tied "), tie_embeddings=name.startswith("tied"))
    model, parameters = drawn(shape, dtype, loss_chunk=loss_chunk, z_loss=True)
    tokens, labels = tokens_of(4, 16, 60)
    positions = torch.zeros_like(tokens)
    weights = list(parameters.values())
    output = model(tokens, positions, None, labels=labels)
    assert output.shape == (2, 4, 16)
    value, figures = mean_loss({}, Z)(output)
    found = torch.autograd.grad(value, weights)
    logits = model(tokens, positions, None)
    expected = by_autograd(logits, labels)
    wanted = torch.autograd.grad(expected, weights)
    # The engine's losses and all means are float32.
    torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    means = F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits.logsumexp(-1).square()
    expected_figures = torch.stack([means[0], means[1].mean()]).detach().double()
    torch.testing.assert_close(figures["loss"].double(), expected_figures, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss_chunk", [None, 7])
def test_validation_is_without_it(loss_chunk: int | None, world: Groups) -> None:
    tokens, labels = tokens_of(4, 16, 60)
    losses = []
    for z_loss in (False, True):
        model, _ = drawn(tiny_model("llama"), loss_chunk=loss_chunk, z_loss=z_loss)
        losses.append(model.eval()(tokens, torch.zeros_like(tokens), None, labels=labels))
    assert losses[0].shape == (4, 16) and torch.equal(*losses)


def test_of_large_logits_and_foreign_labels() -> None:
    """Logits of 1e4 do not overflow. A label that is on no rank has no effect and no gradient."""
    hidden = torch.full((2, 4), 50.0, dtype=torch.float64, requires_grad=True)
    weight = torch.full((8, 4), 50.0, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([3, -100])
    losses, normalizers = losses_and_normalizers(hidden, weight, labels, chunk=3, group=None)
    expected = (hidden @ weight.T).logsumexp(1)
    torch.testing.assert_close(normalizers, expected, rtol=1e-15, atol=0)
    assert losses[1] == normalizers[1]
    found, wanted = (
        torch.autograd.grad(x.square().sum(), (hidden, weight), retain_graph=True)
        for x in (normalizers, expected)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_without_it_the_loss_is_the_engines(world: Groups) -> None:
    """The forward and backward passes run megatron-core's operations. A z-loss adds no pass over
    the logits."""
    _, labels = tokens_of(4, 16, 60)

    def launched(loss: Callable[[Tensor, Tensor], Tensor]) -> Counter[str]:
        logits = torch.randn(16, 4, 64, requires_grad=True)
        with Operations() as operations:
            loss(labels, logits * 1).sum().backward()
        return Counter(name for name, kinds in operations.seen if (16, 4, 64) in shapes(kinds))

    plain, with_z = (
        drawn(tiny_model("llama"), torch.float32, z_loss=z_loss)[0] for z_loss in (False, True)
    )
    engine = launched(partial(GPTModel.compute_language_model_loss, plain))
    assert launched(plain.compute_language_model_loss) == engine
    # One entry per token is read, and one is updated.
    added = {"aten.gather.default": 1, "aten.detach.default": 1, "aten.scatter_add_.default": 1}
    assert launched(with_z.compute_language_model_loss) - engine == added


def shapes(kinds: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors of an operation."""
    return [tuple(shape) for shape, _, _ in kinds]
