"""For any layout and micro-batch size, the z-loss equals that of autograd in one process."""

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.z_loss_workers import LENGTH, SAMPLES
from tests.launch import run_on_ranks
from tests.models import tokens_of
from tests.slow_cases import slow_but
from tests.stepped_models import assign_matrices, parallel_model
from tests.tiny_families import tiny_model

Z = 0.3
CASES = [{"loss_chunk": chunk, "micro_batch": size} for chunk, size in ((None, 1), (7, 2))]
LAYOUTS: dict[str, dict[str, int]] = {
    "data 2": {},
    "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
    "context 2": {"context": 2},
}
# Weights and sums are float64, but the engine computes token losses in float32, as we do means.
TOLERANCE = 1e-6


@pytest.fixture
def expected(world):
    """The z-loss and its gradients, computed by autograd from the logits in one process."""
    model = parallel_model(
        tiny_model("gemma2"), world, assign_matrices("adamw"), sequence_length=LENGTH
    )
    tokens, labels = tokens_of(SAMPLES, LENGTH, 60)
    model.sum_in_products(False)
    logits = model.chunks[0](tokens, torch.arange(LENGTH).expand_as(tokens), None)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    square = logits.logsumexp(-1).square().mean()
    names, parameters = zip(*model.parameters.items(), strict=True)
    found = torch.autograd.grad(loss + Z * square, parameters)
    whole = {p: g.reshape(q.shape) for p, q, g in zip(names, parameters, found, strict=True)}
    gradients = {unit.name: unit.view(whole[unit.parameter]).reshape(unit.shape)
                 for unit in model.units}  # fmt: skip
    return {"means": torch.stack((loss, square)).detach(), "gradients": gradients}


@pytest.mark.parametrize("name", slow_but(("tensor 2", "context 2"), LAYOUTS))
def test_layouts_equal_autograd(name: str, expected) -> None:
    arguments = {"layout": LAYOUTS[name], "cases": CASES, "z_loss": Z}
    for results in run_on_ranks(2, "tests.distributed.z_loss_workers", "gradients", arguments):
        for case, result in zip(CASES, results, strict=True):
            torch.testing.assert_close(
                result["means"], expected["means"], rtol=TOLERANCE, atol=0, msg=str(case)
            )
            for name, gradient in result["gradients"].items():
                wanted = expected["gradients"][name]
                error = (gradient - wanted).norm() / wanted.norm()
                assert error < TOLERANCE, (case, name)
