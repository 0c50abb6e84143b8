"""Modules wait for the new weights that they use, and for no others."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.pc_config import PCConfig
from parallel.storage import bucket_layout
from tests.models import tokens_of
from tests.stepped_models import assign_matrices, figures_of, parallel_model
from tests.tiny_families import MODELS, mixture

IN_GRAPH = PCConfig(level=4, evaluator="in_graph")
CASES: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    **{name: (model, {}) for name, model in MODELS.items()},
    "grouped experts": (mixture(backend="grouped"), {}),
    "loss by chunks": (MODELS["tied"], {"loss_chunk": 16}),
    "one function of heads": (MODELS["qwen3"], {"fused_backward": True}),
    "in the graph": (MODELS["llama"], {"pc": IN_GRAPH}),
}


class Arriving:
    """An all-gather of a bucket, which contains NaN until `wait` is called."""

    def __init__(self, flat: Tensor) -> None:
        self.flat, self.values = flat, flat.clone()
        flat.fill_(torch.nan)

    def wait(self) -> None:
        """Write the weights to the bucket."""
        self.flat.copy_(self.values)


@pytest.mark.parametrize("name", CASES)
def test_modules_wait_for_the_weights_that_they_use(name, world, monkeypatch) -> None:
    """Each parameter has its own bucket, so no module waits for the weights of another."""

    monkeypatch.setattr(bucket_layout, "bucket_parameters", lambda sizes: [[n] for n in sizes])
    model, options = CASES[name]
    built = parallel_model(model, world, assign_matrices("muon"), dtype=torch.float32, **options)
    tokens, labels = tokens_of(2, 8, 60)
    batch = {"tokens": tokens, "labels": labels}
    expected = figures_of(built, batch, train=False)
    for part in built.domains:
        for i, flat in enumerate(part.parameters):
            part.gathers[i] = Arriving(flat)  # type: ignore[assignment]
    found = figures_of(built, batch, train=False)
    assert found[0]["loss"].isfinite() and found == expected
    assert not any(part.gathers for part in built.domains)
