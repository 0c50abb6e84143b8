"""The cost of a unit equals the number of FLOPs that a step of its rule executes."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from spectral import singular_triplets, tangent_model
from spectral.effective_weight import Preconditioner
from spectral.polar import msign, msign_cost
from spectral.rules import RULES
from spectral.rules.base import ELEMENTWISE_FLOPS, take_step
from spectral.rules.spectral_sphere import MEAN_EARLY_EXIT_EVALUATIONS
from spectral.tangent import EVALUATIONS
from spectral.tangent_model import factorization_cost, gram_cost

STEPS = [
    ("muon", {"msign_dtype": "bfloat16"}),
    ("muon", {"steps": 5, "schedule": "simple"}),
    ("muon_sphere", {}),
    ("muon_sphere", {"krylov_steps": 3}),
    ("spectral_sphere", {"early_exit": False}),
    ("spectral_sphere", {"early_exit": False, "max_evaluations": 5}),
    ("muon_plus_plus", {"algorithm": "project"}),
    ("muon_plus_plus", {"algorithm": "project_rescale"}),
    ("muon_plus_plus", {"algorithm": "dual"}),
    ("spectral_descent", {}),
]


def cholesky_flops(shape, *rest, **options):
    """Count n^3 / 3 FLOPs per matrix."""
    return math.prod(shape[:-2]) * shape[-1] ** 3 / 3


def triangular_flops(shape, right, *rest, **options):
    """Count n^2 FLOPs per right-hand side."""
    return math.prod(shape[:-2]) * shape[-1] ** 2 * right[-1]


def product_flops(out, left, right, *rest, **options):
    """Count two FLOPs per multiply-add."""
    return 2 * math.prod(left) * right[-1]


FACTORIZATIONS = {
    torch.ops.aten.baddbmm_: product_flops,  # not covered by PyTorch's formulas
    torch.ops.aten.linalg_cholesky_ex: cholesky_flops,
    torch.ops.aten.linalg_solve_triangular: triangular_flops,
}


def executed(rule, shape):
    """Return the FLOPs of the matmuls that one step executes."""
    weight = torch.randn(1, *shape)
    state = rule.init_state(weight)
    # Fills the caches of later steps.
    take_step(rule, weight, torch.randn(1, *shape), state, lr=0.1)
    with FlopCounterMode(display=False, custom_mapping=FACTORIZATIONS) as counter:
        take_step(rule, weight, torch.randn(1, *shape), state, lr=0.1)
    return counter.get_total_flops()


def products(rule, shape):
    """Return the FLOPs of matmuls in the cost that a rule returns."""
    return rule.cost(shape) - ELEMENTWISE_FLOPS * shape[0] * shape[1]


@pytest.mark.parametrize("shape", [(128, 512), (300, 130)])
@pytest.mark.parametrize(("name", "settings"), STEPS)
def test_a_step_costs_what_it_executes(name, settings, shape, monkeypatch):
    # Costs are those of a GPU.
    monkeypatch.setattr(tangent_model, "block_rows", lambda rows, device: tangent_model.BLOCK)
    rule = RULES[name](**settings)
    # The cost leaves out the small dense algebra of Krylov spaces and of the solver's model.
    assert products(rule, shape) == pytest.approx(executed(rule, shape), rel=0.025)


@pytest.mark.parametrize("rows", [40, 300, 1100])
def test_the_model_of_a_solve_costs_what_it_executes(rows, monkeypatch):
    on_a_gpu = {"block_rows": tangent_model.BLOCK, "joined_blocks": tangent_model.JOINED}
    for name, value in on_a_gpu.items():
        monkeypatch.setattr(tangent_model, name, lambda *_, value=value: value)
    monkeypatch.setattr(tangent_model, "CPU_TRIANGLE", tangent_model.TRIANGLE)
    with FlopCounterMode(display=False, custom_mapping=FACTORIZATIONS) as counter:
        tangent_model.factorized_(torch.eye(rows)[None])
        factor = counter.get_total_flops()
        tangent_model._grams([torch.zeros(1, rows, rows + 8)])
    assert factorization_cost(rows) == pytest.approx(factor)
    assert gram_cost(rows, rows + 8) == counter.get_total_flops() - factor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("shape", [(16, 16), (16, 20), (64, 16)])
def test_msign_costs_exactly_what_it_executes(shape, steps, dtype):
    with FlopCounterMode(display=False) as counter:
        msign(torch.randn(shape), steps=steps, dtype=dtype)
    assert msign_cost(*sorted(shape), steps=steps, dtype=dtype) == counter.get_total_flops()


def test_an_early_exit_costs_its_expected_evaluations():
    fixed, early = (RULES["spectral_sphere"](early_exit=exit) for exit in (False, True))
    shape = (256, 1024)
    msign_flops = msign_cost(256, 1024, steps=8, dtype=torch.float32)
    saved = fixed.cost(shape) - early.cost(shape)
    assert saved == pytest.approx((EVALUATIONS - MEAN_EARLY_EXIT_EVALUATIONS) * msign_flops)
    # The default counts as on a GPU, where it does not exit early.
    assert RULES["spectral_sphere"]().cost(shape) == fixed.cost(shape)


@pytest.mark.parametrize("shape", [(40, 40), (200, 64), (64, 200)])
@pytest.mark.parametrize("level", [1, 4, "over_flattening"])
def test_preconditioning_is_counted_as_it_runs(shape, level, monkeypatch):
    monkeypatch.setattr(singular_triplets, "EXACT_ROWS", 0)  # costs are those of a GPU
    preconditioner = Preconditioner(level=level, steps=4)
    weight, gradient = torch.randn(2, 1, *shape)
    u, v = preconditioner.cold_pair(weight)
    gamma = torch.ones(1)
    with FlopCounterMode(display=False) as counter:
        preconditioner.effective(weight, u, v, gamma)
        preconditioner.vjp(gradient, weight, u, v, gamma)
        preconditioner.refresh_(weight, u, v)
    # The cost leaves out products of vectors and of the small Krylov basis.
    assert preconditioner.cost(shape) == pytest.approx(counter.get_total_flops(), rel=0.1)
