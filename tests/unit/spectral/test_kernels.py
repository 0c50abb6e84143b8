"""Kernels run in Triton's interpreter, are compiled for a GPU on a machine without GPUs, and are
selected by the table."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spectral.kernels import dispatch
from tests.commands import interpreted, output_of


def test_kernels_equal_their_references_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    names = "interpreted", "interpreted_small", "interpreted_gradients"
    interpreted(*(f"tests/kernels/{name}.py" for name in names))


@pytest.mark.slow
def test_kernels_compile_for_hopper() -> None:
    """All kernels fit into shared memory, and all but the IEEE matmuls use tensor cores."""
    pytest.importorskip("triton")
    from tests.kernels import resources

    plain = ("gram ieee", "momentum", "update", "root")
    without = (*plain, "swiglu", "scaled geglu", "heads", "normed heads")
    for name, call in resources.calls().items():
        shared, tensor_cores = resources.compiled(call)
        assert shared <= resources.SHARED_LIMIT and tensor_cores == (name not in without), name


H100, H200 = "NVIDIA H100 80GB HBM3 (sm_90)", "NVIDIA H200 (sm_90)"


def test_small_problems_take_a_kernel_on_listed_devices() -> None:
    pytest.importorskip("triton")
    assert dispatch.small_problem(20, H100) and dispatch.small_problem(dispatch.SMALL, H200)
    assert not dispatch.small_problem(dispatch.SMALL + 1, H200)
    assert not dispatch.small_problem(20, "cpu")


@pytest.mark.parametrize(
    ("batch", "rows", "cols", "dtype", "device", "tile"),
    [
        (1, 4096, 4096, "bfloat16", H100, "128x128x64"),
        (32, 128, 2048, "bfloat16", H200, None),
        (4, 2048, 5632, "float32", H200, "64x64x32 tf32x3"),
        (1, 4096, 4096, "float64", H200, None),
        (1, 4096, 4096, "bfloat16", "NVIDIA B200 (sm_100)", "128x128x64"),
        (1, 4096, 4096, "bfloat16", "cpu", None),
        (0, 4096, 4096, "bfloat16", H200, None),
    ],
)
def test_the_shipped_table(batch, rows, cols, dtype, device, tile) -> None:
    pytest.importorskip("triton")
    found = dispatch.lookup("gram", batch, rows, cols, dtype, device)
    assert (found and str(found)) == tile


def test_a_devices_own_entries_come_before_those_of_its_kind(monkeypatch, tmp_path) -> None:
    row = {"operation": "gram", "dtype": "bfloat16", "batch": 1, "rows": 1024, "cols": 1024}
    tile = {"block": 64, "depth": 32, "warps": 4, "stages": 4}
    kinds = {"sm_90": None, "NVIDIA H100": tile}
    devices = {k: {"measured": None, "entries": [row | {"tile": t}]} for k, t in kinds.items()}
    (tmp_path / "table.json").write_text(json.dumps({"devices": devices}))
    monkeypatch.setattr(dispatch, "TABLE", tmp_path / "table.json")
    dispatch.forget()
    try:
        found = dispatch.lookup("gram", 1, 1024, 1024, "bfloat16", "NVIDIA H100 NVL (sm_90)")
        assert str(found) == ("64x64x32" if find_spec("triton") else "None")
        assert dispatch.lookup("gram", 1, 1024, 1024, "bfloat16", "NVIDIA H20 (sm_90)") is None
        assert not dispatch._keys("NVIDIA A100-SXM4-80GB (sm_80)")
    finally:
        monkeypatch.undo()
        dispatch.forget()


WITHOUT_TRITON = """
import sys
from importlib.util import find_spec
sys.modules["triton"] = None
import torch, spectral
weight = torch.nn.Parameter(torch.randn(4, 8))
weight.grad = torch.randn(4, 8)
before = weight.detach().clone()
for kind in (spectral.Muon, spectral.SpectralSphere):
    kind([weight], lr=0.1).step()
assert not torch.equal(weight.detach(), before)
print([name for name in sys.modules if name.startswith("spectral.kernels.")])
from spectral.kernels import symmetric
"""


def test_on_cpu_nothing_of_triton_is_imported(root: Path) -> None:
    """A step works without triton. Only the last line of the script, which calls a kernel,
    fails."""
    said = output_of(sys.executable, "-c", WITHOUT_TRITON, folder=root, code=1)
    assert said.startswith("['spectral.kernels.library', 'spectral.kernels.dispatch']\n"), said
    assert "import of triton halted" in said


def test_stacks_of_different_columns_are_looked_up_by_their_mean(monkeypatch) -> None:
    pytest.importorskip("triton")
    stacks = [torch.empty(4, 2048, n, device="meta", dtype=torch.bfloat16) for n in (2048, 6144)]
    monkeypatch.setattr(dispatch, "device_name", lambda device: "NVIDIA H200 (sm_90)")
    tile = dispatch.lookup("grouped", 8, 2048, 4096, "bfloat16", "NVIDIA H200 (sm_90)")
    assert str(tile) == "128x128x32" and dispatch.choose("grouped", stacks) == tile
