"""Metrics computed from sums over blocks equal those of whole matrices."""

import pytest
import torch
from torch.nn.functional import cosine_similarity

from models.blocks.attention import largest_causal_score
from parallel.observe import activations
from spectral import measures
from tests.matrices import penalty_by_definition
from training.monitor import matrix_figures as figures

SHAPES = [(2, 30, 7), (2, 7, 30), (1, 9, 9), (3, 1, 5), (3, 5, 1)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use blocks of a few rows, of which the last block is shorter."""
    monkeypatch.setattr(figures, "BLOCK", 40)


@pytest.mark.parametrize("shape", SHAPES)
def test_weight_figures_are_those_of_whole_matrices(shape):
    weight = torch.randn(shape)
    wide, values = weight.double(), torch.linalg.svdvals(weight.double())
    found = figures.weight_figures(weight)
    # A float64 Gram matrix gives squares of singular values to 1e-16 of the largest.
    close = {"rtol": 1e-9, "atol": 1e-7}
    torch.testing.assert_close(found["spectral_norm"], values[:, 0], **close)
    torch.testing.assert_close(found["stable_rank"], measures.stable_rank_of(values), **close)
    torch.testing.assert_close(found["weight_rms"], wide.square().mean((1, 2)).sqrt(), **close)
    torch.testing.assert_close(found["correlation"], measures.correlation(wide), **close)
    energy = penalty_by_definition(wide)
    torch.testing.assert_close(found["off_diagonal_gram"], energy, **close)


@pytest.mark.parametrize("on_a_cpu", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_and_update_figures_are_those_of_whole_matrices(shape, on_a_cpu, monkeypatch):
    _, before, between, after = weights = [torch.randn(shape) for _ in range(4)]
    kept = [torch.rand(shape[0], 1, 1, dtype=torch.float64) for _ in range(3)]
    last = after.double() - between.double() * kept[2]
    earlier = between.double() - before.double() * kept[1]
    found = figures.update_figures(weights, kept) | figures.update_spectrum(weights, kept)
    values = torch.linalg.svdvals(last)
    # As above.
    close = {"rtol": 1e-9, "atol": 1e-7}
    ranks = measures.stable_rank_of(values)
    torch.testing.assert_close(found["update_stable_rank"], ranks, **close)
    torch.testing.assert_close(found["update_quantiles"][:, -1], values[:, 0], **close)
    torch.testing.assert_close(found["applied_rms"], last.square().mean((1, 2)).sqrt(), **close)
    aligned = cosine_similarity(last.flatten(1), earlier.flatten(1))
    torch.testing.assert_close(found["update_alignment"], aligned, **close)
    assert "update_alignment" not in figures.update_figures([before, between], kept[:1])
    monkeypatch.setattr(figures, "is_known", lambda *_: on_a_cpu)
    found = figures.gradient_figures(before, after)
    values = torch.linalg.svdvals(before.double())
    wanted = measures.nuclear_rank_of(values)
    exact = {"rtol": 1e-9 if on_a_cpu else 1e-5, "atol": 1e-7}  # from float32 products elsewhere
    torch.testing.assert_close(found["gradient_nuclear_rank"], wanted, **exact)
    ranks = measures.stable_rank_of(values)
    torch.testing.assert_close(found["gradient_stable_rank"], ranks, **close)
    aligned = cosine_similarity(*(x.double().flatten(1) for x in (before, after)))
    torch.testing.assert_close(found["gradient_alignment"], aligned, **close)


def test_zero_and_broken_matrices_have_the_figures_of_measures():
    zero = torch.zeros(1, 30, 7)
    found = figures.gradient_figures(zero, torch.ones(1, 30, 7))
    assert found["gradient_alignment"] == found["gradient_rms"] == 0
    found = figures.weight_figures(torch.ones(1, 7, 30).index_fill(2, torch.tensor([3]), torch.nan))
    for name in ("weight_rms", "spectral_norm", "off_diagonal_gram"):
        assert found[name].isnan().all(), name


@pytest.mark.parametrize("shape", [(30, 7), (7, 30)])
def test_outputs_have_the_stable_rank_of_the_product(shape):
    weight, inputs = torch.randn(shape), torch.randn(shape[1], 50).double()
    root = figures.gram_root(inputs @ inputs.mT)
    found = figures.output_figures(weight, root)["output_stable_rank"]
    wanted = measures.stable_rank(weight.double() @ inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=0)  # the shift under the root


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_any_dtype_are_measured_in_float32_or_wider(dtype, monkeypatch):
    monkeypatch.setattr(activations, "CHUNK", 7)
    zeros = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
    inputs = activations.Inputs(torch.zeros(6, 6), zeros[0], None)
    size = activations.Size(*zeros[1:])
    seen = torch.randn(2, 3, 10, 6).to(dtype)
    for part in seen:
        activations.add_gram(inputs, part)
        size.add(part)
    flat = seen.flatten(0, 2).double()
    # Sums in float32; bfloat16 would be off by 1e-2.
    torch.testing.assert_close(inputs.gram.double(), flat.T @ flat, rtol=1e-5, atol=1e-5)
    assert (inputs.tokens, size.number, size.largest) == (60, 360, flat.abs().max())
    assert size.square.item() == pytest.approx(flat.square().sum().item())
    query, key = torch.randn(2, 5, 1, 4, 8).to(dtype)
    scores = torch.einsum("sbhd,tbhd->bhst", query.double(), key.double())
    largest = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf).max().item()
    assert largest_causal_score(query, key, 0.4).item() == pytest.approx(0.4 * largest, rel=1e-6)


def test_zero_inputs_have_a_zero_root():
    assert not figures.gram_root(torch.zeros(5, 5)).any()
