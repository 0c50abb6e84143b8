"""Features specific to Gemma 2, in 16 bits, compared with transformers."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm, Gemma2TextScaledWordEmbedding

from models.blocks.decoder_model import ScaledEmbedding
from models.blocks.norm import zero_centered_rms_norm
from models.families import mean_keys
from parallel.comm.groups import Groups
from tests.models import built
from tests.tiny_families import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_around_one_keep_their_digits(dtype: torch.dtype) -> None:
    theirs = Gemma2RMSNorm(64).to(dtype)
    torch.nn.init.normal_(theirs.weight, std=1e-3)  # bfloat16 cannot distinguish this gain from 1
    x = torch.randn(3, 64, dtype=dtype)
    ours = zero_centered_rms_norm(x, theirs.weight, theirs.eps)
    assert ours.dtype == dtype
    # The same float32 operations in another order, and one rounding to `dtype`.
    rounding = {torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(ours, theirs(x), rtol=rounding, atol=0)
    assert dtype == torch.float32 or (ours != theirs(x)).sum() < 4  # 192 values near a tie


def test_the_embedding_is_scaled_as_in_transformers(world: Groups) -> None:
    """In bfloat16, the factor is rounded as well: sqrt(48) = 6.928 becomes 6.9375."""
    model = tiny_model("gemma2", hidden=48)
    (ours,) = (
        m for m in built(model, torch.bfloat16)[0].modules() if isinstance(m, ScaledEmbedding)
    )
    theirs = Gemma2TextScaledWordEmbedding(model.padded_vocab, 48, 0, embed_scale=48**0.5)
    torch.nn.init.normal_(ours.word_embeddings.weight)
    theirs = theirs.to(torch.bfloat16)
    theirs.weight.data.copy_(ours.word_embeddings.weight)
    tokens = torch.arange(1, 13).view(2, 6)
    found = ours(tokens, torch.zeros_like(tokens))
    assert torch.equal(found, theirs(tokens).transpose(0, 1))


def test_a_token_sees_on_average_what_its_window_lets_through():
    before = torch.linspace(0, 10, 100_001)  # tokens before a place in the sequence
    for window in (1, 5, 10, 11, 40, None):
        model = tiny_model("gemma2", sliding_window=window)
        mean = before.clamp(max=window or 10).mean().item()
        assert mean_keys(model, 0, 10) == pytest.approx(mean, rel=1e-4)
        assert mean_keys(model, 1, 10) == 5
