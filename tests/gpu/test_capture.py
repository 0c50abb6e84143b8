"""A step replayed from a CUDA graph equals the same step launched operation by operation."""

import warnings

import pytest
import torch

from spectral.cuda_graph import WARM_UP, CapturedStep
from spectral.optimizer import SpectralOptimizer
from tests.update_cases import OPTIMIZERS, library_optimizer

STEPS = WARM_UP + 4


def fill(optimizer: SpectralOptimizer, turn: int) -> None:
    """Set the gradients and the learning rate of a step. In one step, a gradient contains NaN."""
    generator = torch.Generator("cuda").manual_seed(turn)
    optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + turn))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad.normal_(generator=generator)
    if turn == STEPS - 2:
        optimizer.param_groups[0]["params"][0].grad[0, 0] = torch.nan


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_replayed_step_is_the_launched_one(kind):
    plain, recorded = library_optimizer(kind, "cuda"), library_optimizer(kind, "cuda")
    step = CapturedStep(recorded)
    for turn in range(STEPS):
        fill(plain, turn)
        fill(recorded, turn)
        plain.step()
        step()
    assert plain.skipped_steps.item() == recorded.skipped_steps.item() == 1
    for one, other in zip(plain.param_groups, recorded.param_groups, strict=True):
        for a, b in zip(one["params"], other["params"], strict=True):
            # The same kernels on the same values; libraries may choose others under capture.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    step.release()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_does_not_wait_for_the_device(kind):
    optimizer = library_optimizer(kind, "cuda")
    for turn in range(2):
        fill(optimizer, turn)
        optimizer.step()
    fill(optimizer, 2)
    with warnings.catch_warnings(action="ignore"):  # the warning that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
