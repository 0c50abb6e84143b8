"""The loss computed in chunks of the vocabulary, compared with the loss computed from all
logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.blocks.decoder_model import losses_and_normalizers
from parallel.comm.groups import Groups
from tests.live_bytes import peak_bytes
from tests.models import drawn, tokens_of
from tests.tiny_families import tiny_model


def problem(tokens: int, width: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(rows, (tokens,))


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("chunk", [1, 10, 37, 100])
def test_equals_torch(chunk: int, cap: float | None) -> None:
    """Test chunk sizes that divide the vocabulary size, that do not divide it, and that exceed
    it."""
    hidden, weight, labels = problem(9, 6, 37)
    labels[:2] = torch.tensor([0, 36])
    ours, _ = losses_and_normalizers(hidden, weight, labels, chunk=chunk, group=None, softcap=cap)
    logits = hidden @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    expected = F.cross_entropy(logits, labels, reduction="none")
    gradient = torch.randn(9, dtype=torch.float64)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-13)
    found, wanted = (torch.autograd.grad(x, (hidden, weight), gradient) for x in (ours, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-13)


def test_bfloat16_is_as_near_as_with_all_logits() -> None:
    hidden, weight, labels = problem(64, 32, 500)
    exact = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels), (hidden, weight))

    def errors(losses: Tensor, *operands: Tensor) -> list[float]:
        gradients = torch.autograd.grad(losses.mean(), operands)
        pairs = zip(gradients, exact, strict=True)
        return [float((a.double() - b).norm() / b.norm()) for a, b in pairs]

    h, w = (x.detach().bfloat16().requires_grad_() for x in (hidden, weight))
    ours = errors(losses_and_normalizers(h, w, labels, chunk=100, group=None)[0], h, w)
    whole = errors(F.cross_entropy((h @ w.T).float(), labels, reduction="none"), h, w)
    for a, b in zip(ours, whole, strict=True):
        assert a < 1.1 * b


def test_logits_never_exist_in_full() -> None:
    """All tensors of the forward and backward passes take less memory than one float32 copy of the
    logits."""
    hidden, weight, labels = (x.detach() for x in problem(128, 8, 4096))
    h, w = hidden.float().requires_grad_(), weight.float().requires_grad_()

    def chunked() -> None:
        losses_and_normalizers(h, w, labels, chunk=256, group=None)[0].sum().backward()

    def whole() -> None:
        F.cross_entropy(h @ w.T, labels, reduction="sum").backward()

    logits = 4 * 128 * 4096
    assert peak_bytes(chunked) < 0.6 * logits < 2 * logits < peak_bytes(whole)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_model_is_the_same(name: str, world: Groups) -> None:
    """The losses, the gradients and, without labels, the logits agree. Parameters have Megatron's
    names."""
    results = []
    shape = tiny_model(name)
    for loss_chunk in (None, 7):
        model, parameters = drawn(shape, loss_chunk=loss_chunk)
        tokens, labels = tokens_of(4, 16, 60)
        positions = torch.zeros_like(tokens)
        losses = model(tokens, positions, None, labels=labels)
        losses.mean().backward()
        gradients = {name: p.grad for name, p in parameters.items()}
        results.append((losses, model(tokens, positions, None), gradients))
    (whole, logits, gradients), (losses, same_logits, same_gradients) = results
    assert torch.equal(logits, same_logits)
    # Megatron's loss rounds logits to float32, also of a float64 model.
    torch.testing.assert_close(losses.float(), whole.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(same_gradients, gradients, rtol=0, atol=1e-7)
