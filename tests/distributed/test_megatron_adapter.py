"""The adapter for Megatron-LM with tensor and data parallelism."""

import torch

from tests.launch import run_on_ranks


def test_a_gpt_on_four_ranks_equals_one() -> None:
    """Compare ten float64 steps of SSO on four ranks (tensor 2, data 2) with one process."""
    workers = "tests.distributed.megatron_workers"
    (alone,) = run_on_ranks(1, workers, "ten_steps", {"tensor": 1})
    for weights in run_on_ranks(4, workers, "ten_steps", {"tensor": 2}):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-6)
