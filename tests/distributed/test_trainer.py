"""transformers' Trainer with accelerate's FSDP2: models shard, learn, and every head is a unit."""

import pytest
import torch

from tests.launch import run_on_ranks

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")

pytestmark = pytest.mark.slow

HEAD, WIDTH = 8, 32
# Rows of a weight, and the matrices in it: heads of queries, keys and values, or a whole weight.
FUSED = {"gpt2": ("c_attn.weight",), "llama": ("q_proj.weight", "k_proj.weight", "v_proj.weight")}
FUSED["qwen3"] = FUSED["llama"]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_the_trainer_shards_and_every_head_keeps_its_norm(name: str) -> None:
    results = run_on_ranks(2, "tests.distributed.trainer_workers", "trained", {"name": name})
    first = results[0]
    assert first["sharded"] and first["ranks"] == 2
    assert first["losses"][-1] < first["losses"][0]
    for key, weight in first["weights"].items():
        torch.testing.assert_close(results[1]["weights"][key], weight, rtol=0, atol=0)
        if not key.endswith(FUSED[name]):
            continue
        rows = weight.T if name == "gpt2" else weight
        norms = torch.linalg.matrix_norm(rows.double().unflatten(0, (-1, HEAD)), 2)
        # The sphere's radius is the root of rows over columns; power iteration is a little under.
        radius = (HEAD / WIDTH) ** 0.5
        assert len(norms) == len(rows) // HEAD
        torch.testing.assert_close(norms, torch.full_like(norms, radius), rtol=0.02, atol=0)
        # A weight that were stepped as one matrix would have the norm of its own shape.
        together = (len(rows) / WIDTH) ** 0.5
        assert torch.linalg.matrix_norm(rows.double(), 2) < 0.9 * together
