"""A tied embedding gets the gradient of both uses, in whatever order megatron-core sums them."""

from dataclasses import replace

import pytest
import torch

from parallel.model import ParallelModel
from tests.models import tokens_of
from tests.stepped_models import TINY, assign_matrices, figures_of, gradient_of, parallel_model

LENGTH = 8


def gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return each unit's gradient, summed over two micro-batches."""
    tokens, labels = tokens_of(4, LENGTH, 60)
    model.zero_gradients()
    for part in (slice(0, 2), slice(2, 4)):
        figures_of(model, {"tokens": tokens[part], "labels": labels[part]})
    return {unit.name: gradient_of(model, unit).clone() for unit in model.units}


@pytest.mark.parametrize("chunk", [None, 13])
def test_the_gradient_is_the_sum_of_the_gradients_of_embedding_and_head(chunk, world) -> None:
    # The engine's products only accumulate float32.
    options = {"sequence_length": LENGTH, "loss_chunk": chunk, "dtype": torch.float32}
    assign = assign_matrices("adamw")
    apart = parallel_model(TINY, world, assign, **options)
    with torch.no_grad():
        apart.parameters["head"].copy_(apart.parameters["embedding"])
    apart.sum_in_products(False)
    expected = gradients(apart)
    both = expected["embedding"] + expected.pop("head")
    tied = parallel_model(replace(TINY, tie_embeddings=True), world, assign, **options)
    for in_products in (False, True):
        tied.sum_in_products(in_products)
        found = gradients(tied)
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            wanted = both if name == "embedding" else expected[name]
            # float32 in another order of sums.
            assert (gradient - wanted).norm() < 1e-6 * wanted.norm(), name
