"""The temporary memory of a step is a few matrices, whatever the number of units."""

import pytest
import torch
import torch.distributed as dist

from spectral.gram_penalty import gram_penalty_and_grad
from spectral.kernels.library import SLOW_ON_CPU
from spectral.optimizer import SpectralOptimizer
from spectral.polar import WORKSPACE_ELEMENTS
from spectral.rules import RULES
from spectral.rules.base import take_step
from tests.launch import run_on_ranks
from tests.live_bytes import peak_bytes


def peak_in_units(name: str, count: int, rows: int, cols: int, **options: object) -> float:
    rule = RULES[name](**options)
    weight, grad = torch.randn(2, count, rows, cols).unbind()
    state = rule.init_state(weight)
    take_step(rule, weight, grad.clone(), state, lr=0.01)
    peak = peak_bytes(lambda: take_step(rule, weight, grad, state, lr=0.01))
    return peak / (weight.element_size() * rows * cols)


SHAPES = [(768, 768), (600, 900), (1408, 512), (384, 1536)]
# Without early exit SSO evaluates three times and keeps the best direction.
RULES_OF_MATRICES: dict[str, dict[str, object]] = {
    "muon": {}, "muon_sphere": {}, "spectral_sphere": {"early_exit": False},
}  # fmt: skip


def peaks_of_large_units() -> dict[str, float]:
    peaks = {
        f"{name} {shape}": peak_in_units(name, 1, *shape, **options)
        for name, options in RULES_OF_MATRICES.items()
        for shape in SHAPES
    }
    return peaks | {"first step of replicas": largest_allocation()}


def largest_allocation() -> float:
    """The largest tensor that the first step of replicas allocates, in units of the gradient."""
    dist.init_process_group("gloo")
    parameter = torch.nn.Parameter(torch.randn(512, 512))
    parameter.grad = torch.randn(512, 512)
    optimizer = SpectralOptimizer([parameter], rule="adamw", replicas=dist.group.WORLD)
    cpu = torch.profiler.ProfilerActivity.CPU  # counts copies made within an operation, too
    with torch.profiler.profile(activities=[cpu], profile_memory=True) as profiler:
        optimizer.step()
    dist.destroy_process_group()
    return max(e.self_cpu_memory_usage for e in profiler.events()) / parameter.nbytes


def test_the_comparison_of_replicas_copies_no_gradient(peaks) -> None:
    assert peaks["first step of replicas"] < 0.01  # norms and flags


# E's gradient, its scaled copy or the Gram matrix times W, and the difference with "frobenius".
@pytest.mark.parametrize(("normalize", "most"), [(None, 3), ("size", 3), ("frobenius", 4)])
def test_the_gram_penalty_takes_a_few_matrices(normalize, most) -> None:
    w = torch.randn(1024, 256)
    peak = peak_bytes(lambda: gram_penalty_and_grad(w, power=1, normalize=normalize))
    assert peak / w.nbytes <= most + 0.01  # values


@pytest.fixture(scope="module")
def peaks() -> dict[str, float]:
    """Results of `peaks_of_large_units`, which runs in a separate process, because the same steps
    take up to 1.5 units more memory after certain other tests."""
    (found,) = run_on_ranks(1, __name__, "peaks_of_large_units", {})
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", RULES_OF_MATRICES)
def test_a_large_unit_takes_three_of_its_own_size(name, shape, peaks) -> None:
    # The 5% are vectors, and for SSO on square matrices one block of columns, 1/24.
    assert peaks[f"{name} {shape}"] <= 3.05


@pytest.mark.parametrize("name", ["muon", "muon_sphere"])
def test_scratch_does_not_grow_with_the_number_of_units(name: str) -> None:
    def peak(count: int) -> float:
        parameters = [torch.nn.Parameter(torch.randn(128, 1024)) for _ in range(count)]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = SpectralOptimizer(parameters, rule=name)
        optimizer.step()
        return peak_bytes(optimizer.step) / parameters[0].nbytes

    chunk = WORKSPACE_ELEMENTS["cpu"] // (128 * 1024)
    few, many = (peak(n * chunk) for n in (1, 3))
    # Weights, gradients and momenta are stacked; some CPUs multiply in float32.
    assert few <= (7 if torch.bfloat16 in SLOW_ON_CPU else 6) * chunk
    assert many <= few + 1
