"""transformers' Trainer with FSDP2 from accelerate: the optimizer steps each head of a sharded
model separately."""

import pytest
import torch

from tests.launch import run_on_ranks

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

pytestmark = pytest.mark.slow

HEAD, WIDTH = 8, 32
FUSED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
"""Weights that consist of several heads, each of which is a matrix."""


def test_the_trainer_shards_and_every_head_keeps_its_norm() -> None:
    first, second = run_on_ranks(2, "tests.distributed.trainer_workers", "trained", {})
    assert first["sharded"] and first["ranks"] == 2
    assert first["losses"][-1] < first["losses"][0]
    for key, weight in first["weights"].items():
        torch.testing.assert_close(second["weights"][key], weight, rtol=0, atol=0)
        if not key.endswith(FUSED):
            continue
        norms = torch.linalg.matrix_norm(weight.double().unflatten(0, (-1, HEAD)), 2)
        # The sphere's radius is the root of rows over columns; power iteration gives slightly less.
        radius = (HEAD / WIDTH) ** 0.5
        assert len(norms) == len(weight) // HEAD
        torch.testing.assert_close(norms, torch.full_like(norms, radius), rtol=0.02, atol=0)
        # A weight stepped as one matrix would have the norm of its whole shape.
        together = (len(weight) / WIDTH) ** 0.5
        assert torch.linalg.matrix_norm(weight.double(), 2) < 0.9 * together
