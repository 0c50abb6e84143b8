"""A step's scratch: a few matrices, however many units there are."""

import pytest
import torch

from scripts.bench.live_bytes import peak_bytes
from spectral.kernels import library
from spectral.polar import CHUNK_ELEMENTS
from spectral.rules import RULES


@pytest.fixture(autouse=True)
def products_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 products that make no wider copies, which those of a CPU do."""
    monkeypatch.setattr(library, "is_slow", lambda x: False)


def peak_in_units(name: str, count: int, rows: int, cols: int, **options: object) -> float:
    rule = RULES[name](**options)
    weight, grad = torch.randn(2, count, rows, cols).unbind()
    state = rule.init_state(weight)
    rule.step(weight, grad.clone(), state, lr=0.01)
    peak = peak_bytes(lambda: rule.step(weight, grad, state, lr=0.01))
    return peak / (weight.element_size() * rows * cols)


def test_the_measure_itself() -> None:
    x = torch.randn(50, 50)

    def three_at_once() -> torch.Tensor:
        a = x @ x
        b = a @ a
        c = a @ b
        del a, b
        return c + 1

    assert peak_bytes(three_at_once) == 3 * x.nbytes
    assert peak_bytes(lambda: x.mul_(1).view(-1)) == 0


@pytest.mark.parametrize(
    "shape", [(768, 768), (600, 900), (512, 1024), (1408, 512), (512, 1536), (384, 1536)]
)
@pytest.mark.parametrize(
    "name, options",
    # Without early exit SSO evaluates three times: it keeps the best direction meanwhile.
    [("muon", {}), ("muon_sphere", {}), ("spectral_sphere", {"early_exit": False})],
)
def test_a_large_unit_takes_three_of_its_own_size(
    name: str, options: dict[str, object], shape: tuple[int, int]
) -> None:
    # The twentieth is vectors, and for SSO on squares one block of columns, 1/24.
    assert peak_in_units(name, 1, *shape, **options) <= 3.05


@pytest.mark.parametrize("name", ["muon", "muon_sphere"])
def test_scratch_does_not_grow_with_the_number_of_units(name: str) -> None:
    chunk = CHUNK_ELEMENTS["cpu"] // (128 * 1024)
    few, many = (peak_in_units(name, n * chunk, 128, 1024) for n in (1, 3))
    assert few <= 3 * chunk
    assert many <= few + 1
