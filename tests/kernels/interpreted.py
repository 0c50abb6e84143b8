"""Compare kernels with their references in Triton's interpreter.

Importing triton selects the interpreter for the whole process, so these tests run in their own
process: tests/unit/spectral/test_kernels.py starts `TRITON_INTERPRET=1 pytest` on this file.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from scripts.bench import tune
from spectral import Muon, MuonSphere, SpectralSphere, kernels, msign
from spectral.kernels import dispatch, library, symmetric, update
from spectral.kernels.dispatch import Tile
from spectral.rules.base import take_step
from spectral.rules.muon import MuonRule, PolarRule, momentum_of
from spectral.rules.spectral_sphere import SpectralSphereRule
from spectral.stepping import accumulate_

SHIPPED = dispatch.TABLE
TILE = Tile(block=16, depth=16, warps=4, stages=2)
# Rounding of the result relative to its largest entry. float32 sums in another order; float16 and
# bfloat16 are rounded once at the end, and the interpreter truncates bfloat16.
BOUNDS = {torch.float32: 1e-6, torch.float16: 2**-11, torch.bfloat16: 2**-7}
# Sizes that no tile divides, one and several tiles, and fewer columns than a tile.
SHAPES = [(1, 1, 1), (1, 16, 16), (2, 17, 33), (1, 40, 5)]


def stack(batch: int, rows: int, cols: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(batch, rows, cols).to(dtype)


def assert_close(value: Tensor, expected: Tensor) -> None:
    """Check that `value` equals the float64 `expected` up to one rounding to its dtype."""
    assert value.shape == expected.shape
    if expected.numel():
        error = (value.double() - expected).abs().max()
        assert error <= BOUNDS[value.dtype] * expected.abs().max(), float(error)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x = stack(*shape, dtype)
    result = symmetric.product(x, x, TILE)
    assert_close(result, kernels.gram(x.double()))
    assert torch.equal(result, result.mT)


def test_float32_by_three_tensor_core_products() -> None:
    """The interpreter always multiplies in float32, so tests/gpu checks the precision. Here, the
    tile's name is parsed and printed."""
    tile = replace(TILE, precision="tf32x3")
    x = stack(2, 17, 33, torch.float32)
    assert_close(symmetric.product(x, x, tile), kernels.gram(x.double()))
    assert str(tile) == "16x16x16 tf32x3" and tune.parse_tile("16x16:4:2:tf32x3") == tile


@pytest.mark.parametrize("dtype", BOUNDS)
def test_polynomial(dtype: torch.dtype) -> None:
    r = kernels.gram(stack(2, 21, 30, torch.float32)).div(30).to(dtype)
    result = symmetric.product(r, r, TILE, r, alpha=0.5, beta=-1.5, gamma=2.25)
    assert_close(result, kernels.polynomial(r.double(), -1.5, 0.5, 2.25))
    assert torch.equal(result, result.mT)


def test_commuting() -> None:
    r = kernels.gram(stack(2, 21, 30, torch.float32)).div(30)
    p, q = kernels.polynomial(r, 0.5, -0.25, 1.0), kernels.polynomial(r, -0.5, 0.125, 2.0)
    result = symmetric.product(p, q, TILE, gamma=0.75)
    assert_close(result, kernels.commuting(p.double(), q.double(), 0.75))
    assert torch.equal(result, result.mT)


@pytest.mark.parametrize(
    "view",
    [lambda x: x.mT, lambda x: x[:, 1::2, 3:], lambda x: x[::2], lambda x: x[:1].expand(3, -1, -1)],
    ids=["transposed", "strided", "every other matrix", "one matrix thrice"],
)
def test_strides(view: Callable[[Tensor], Tensor]) -> None:
    x = view(stack(3, 19, 22, torch.float32))
    assert_close(symmetric.product(x, x, TILE), kernels.gram(x.double()))


@pytest.mark.parametrize("shape", [(0, 5, 7), (3, 0, 7)])
def test_nothing_to_do(shape: tuple[int, int, int]) -> None:
    x = torch.empty(shape)
    assert symmetric.product(x, x, TILE).shape == (shape[0], shape[1], shape[1])


def test_nan_reaches_what_depends_on_it_and_no_other_matrix() -> None:
    x = stack(2, 20, 18, torch.float32)
    x[0, 17, 3] = float("nan")
    result = symmetric.product(x, x, TILE)
    assert torch.equal(result.isnan(), kernels.gram(x).isnan())
    assert result[0, 17].isnan().all() and not result[1].isnan().any()


def test_a_result_does_not_depend_on_the_rest_of_the_batch() -> None:
    x = stack(3, 20, 40, torch.bfloat16)
    together = symmetric.product(x, x, TILE)
    assert all(
        torch.equal(symmetric.product(x[i : i + 1], x[i : i + 1], TILE)[0], together[i])
        for i in range(3)
    )


@pytest.mark.parametrize("other", [torch.float64, torch.int32])
def test_dtypes_that_no_kernel_takes(other: torch.dtype) -> None:
    with pytest.raises(ValueError, match="must both be float32, both bfloat16"):
        symmetric.product(*[torch.ones(1, 4, 4, dtype=other)] * 2, TILE)


def test_a_matrix_that_32_bits_cannot_address() -> None:
    with pytest.raises(ValueError, match="fewer than 2\\^31 elements"):
        symmetric.product(*[torch.empty(1, 1, 2**31 + 1, device="meta")] * 2, TILE)


PROBLEM = {"batch": 2, "rows": 20, "cols": 28, "dtype": "float32"}


@pytest.fixture
def to_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the dispatcher select kernels for all float32 operations on this device."""
    use_table(dispatch.OPERATIONS, tmp_path, monkeypatch)
    yield
    dispatch.forget()


def use_table(
    operations: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch, tile: Tile = TILE
) -> None:
    """Make the dispatcher select kernels for the given float32 operations on this device."""
    entries = [{"operation": name, "tile": asdict(tile), **PROBLEM} for name in operations]
    path = folder / "table.json"
    path.write_text(json.dumps({"devices": {"cpu": {"measured": None, "entries": entries}}}))
    monkeypatch.setattr(dispatch, "TABLE", path)
    dispatch.forget()


@pytest.mark.parametrize("rows", [28, 80], ids=["plain", "gram"])
def test_msign_by_the_kernels(to_kernels: None, rows: int) -> None:
    """Run the whole iteration on a tall matrix, which is transposed. float64 has no table entry, so
    it uses the library."""
    x = stack(1, rows, 20, torch.float32)
    assert str(dispatch.choose("gram", [x.mT])) == "16x16x16"
    assert dispatch.choose("gram", [x.double()]) is None
    expected = msign(x.double(), steps=4)
    # Rounding of Gaussian matrices, amplified by four steps.
    torch.testing.assert_close(msign(x, steps=4).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("gate", "scale"),
    [([True, True], None), ([False, True], torch.tensor([0.5, 3.0])), ([False, False], None)],
    ids=["all", "one, scaled", "none"],
)
@pytest.mark.parametrize("dtype", BOUNDS)
def test_update(dtype: torch.dtype, gate: list[bool], scale: Tensor | None) -> None:
    """Test more elements than one program processes, a transposed direction, learning rates per
    matrix, a scale, and cautious decay. If a step is refused, the weight stays the same bit for
    bit."""
    tall = cautious = dtype == torch.float32
    weight, direction = torch.randn(2, 70, 90), stack(2, 70, 90, dtype)
    direction = direction.mT.contiguous().mT if tall else direction
    active = torch.tensor(gate)
    direction[~active] = torch.nan
    factor, step = torch.tensor([0.75, 0.5]), torch.tensor([0.125, 0.25])
    before = weight.clone()
    start = weight.double() if scale is None else scale[:, None, None] * weight.double()
    decays = ~(weight * direction.float() < 0) | torch.tensor(not cautious)
    kept = torch.where(decays, factor[:, None, None].double(), 1.0)
    moved = kept * start - step[:, None, None] * direction.double()
    square = update.update_(weight, direction, factor, step, active, scale, cautious)
    assert torch.equal(weight[~active], before[~active])
    torch.testing.assert_close(weight[active].double(), moved[active], rtol=0, atol=1e-6)
    sums = direction.float().square().sum((1, 2))
    torch.testing.assert_close(square, sums, rtol=1e-5, atol=0, equal_nan=True)


@pytest.mark.parametrize("active", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(1, 7), (2, 70, 90), (1, 2 * update.BLOCK), (0,)])
def test_momentum(shape: tuple[int, ...], nesterov: bool, active: bool) -> None:
    """Test a part of a block and several blocks. A skipped step keeps the mean, whatever the
    gradient."""
    grad, mean = torch.randn(2, *shape)
    grad, before = (grad if active else torch.full(shape, torch.nan)), mean.clone()
    rule = MuonRule(momentum=0.9, nesterov=nesterov)
    if active:
        expected, along = momentum_of(rule, grad.double(), {"momentum": mean.double()})
    else:
        expected = along = before.double()
    update.average_(grad, mean, rule.momentum, torch.tensor(active), nesterov=nesterov)
    torch.testing.assert_close(mean.double(), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(grad.double(), along, rtol=0, atol=1e-6)
    assert active or torch.equal(mean, before) and torch.equal(grad, before)


@pytest.mark.parametrize("active", [True, False])
def test_regions_of_a_shard_are_averaged_by_the_kernel(to_kernels: None, active: bool) -> None:
    """The results equal those of the library in one process, also for 16-bit and noncontiguous
    means."""
    rule, gate = MuonRule(), torch.tensor(active)
    shard, means = torch.randn(90), torch.randn(90)
    states = [means[3:40], means[40:], means[:6].bfloat16(), means[40:].clone()[::5]]
    grads = [shard[3:40].clone(), shard[40:].clone(), shard[:6].clone(), shard[40::5].clone()]
    for grad, mean in zip(grads, states, strict=True):
        kept = [x.clone() for x in (grad, mean)]
        plain = kept[0].double()
        accumulate_(rule, [grad], [{"momentum": mean}], gate)
        accumulate_(rule, [plain], [{"momentum": kept[1]}], gate)
        torch.testing.assert_close(grad.double(), plain, rtol=0, atol=1e-6)
        torch.testing.assert_close(mean, kept[1], rtol=0, atol=1e-6)


MUON, CAUTIOUS = MuonRule(steps=2), MuonRule(steps=2, cautious_decay=True)
SSO = SpectralSphereRule(steps=2)


@pytest.mark.parametrize(
    ("rule", "active"),
    [
        *((MUON, None), (MUON, True), (MUON, False)),
        *((CAUTIOUS, True), (SSO, True), (SSO, False)),
    ],
)
def test_a_step_by_the_kernels(to_kernels, monkeypatch, rule, active) -> None:
    """The weights and the reported norm equal the results of the library."""
    weight, gradient = torch.randn(1, 28, 20), torch.randn(1, 28, 20)
    gate = None if active is None else torch.tensor(active)
    results = []
    for table in (dispatch.TABLE, SHIPPED):
        monkeypatch.setattr(dispatch, "TABLE", table)
        dispatch.forget()
        w = weight.clone()
        state = rule.init_state(w)
        lr, decay = torch.tensor(0.1), 0.5
        grad = gradient.clone()
        report = take_step(rule, w, grad, state, lr=lr, weight_decay=decay, active=gate)
        results.append((w, report["update_rms"]))
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)
    assert torch.equal(results[0][0], weight) == (active is False)


@pytest.mark.parametrize("kind", [Muon, MuonSphere, SpectralSphere])
def test_optimizer_joins_shapes_by_the_kernels(kind, to_kernels, monkeypatch) -> None:
    """Four parameters of three shapes have the same shorter side, and one of them is tall. A step
    of all parameters equals the same steps one shape at a time. Launches for joined weights and
    Gram matrices are counted."""
    shapes = [(5, 16), (5, 16), (20, 5), (5, 11), (6, 24)]
    values = [(torch.randn(s), torch.randn(s)) for s in shapes]

    def stepped() -> list[Tensor]:
        parameters = [torch.nn.Parameter(w.clone()) for w, _ in values]
        for parameter, (_, gradient) in zip(parameters, values, strict=True):
            parameter.grad = gradient.clone()
        kind(parameters, steps=2, **dtype).step()
        return [p.detach() for p in parameters]

    dtype = {"msign_dtype": "float32"} if kind is Muon else {}  # the interpreter is slow
    joined_products: list[int] = []
    launch = symmetric.grams
    monkeypatch.setattr(
        symmetric, "grams", lambda x, t: joined_products.append(len(x)) or launch(x, t)
    )
    by_kernel = PolarRule._update_by_kernel
    with patch.object(
        PolarRule, "_update_by_kernel", autospec=True, side_effect=by_kernel
    ) as passes:
        joined = stepped()
        assert [len(call.args[1]) for call in passes.call_args_list] == [3, 1]  # without 6 x 24
        assert not dtype or set(joined_products) == {3}
        monkeypatch.setattr(dispatch, "TABLE", SHIPPED)
        dispatch.forget()
        torch.testing.assert_close(joined, stepped(), rtol=0, atol=1e-5)
        assert passes.call_count == 2


def test_quacks_product_is_chosen_where_it_runs_and_gives_the_librarys(
    to_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test replaces quack-kernels by a function with the interface of version 0.6.5 that
    computes with PyTorch."""

    def gemm_symmetric(
        A: Tensor, B: Tensor, C: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
    ) -> Tensor:
        product = alpha * (A.float() @ B.float())
        return (product if C is None else product + beta * C.float()).to(A.dtype)

    use_table(dispatch.OPERATIONS[:3], tmp_path, monkeypatch, dispatch.QUACK)
    x = torch.randn(2, 16, 24) / 20
    assert dispatch.choose("gram", [x]) is None  # not installed
    monkeypatch.setattr(dispatch, "has_quack", lambda: True)
    dispatch.forget()
    assert dispatch.choose("gram", [x]) == dispatch.QUACK
    assert dispatch.choose("gram", [x[:, 1:]]) is None  # only rows of 16 bytes
    module = SimpleNamespace(gemm_symmetric=gemm_symmetric)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(gemm_interface=module))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", module)
    r = kernels.gram(x)
    p = kernels.polynomial(r, -2.9, 0.5, 4.1)
    torch.testing.assert_close(r, library.symmetric(x))
    torch.testing.assert_close(p, library.symmetric(r, r, r, alpha=0.5, beta=-2.9, diagonal=4.1))
    torch.testing.assert_close(kernels.commuting(p, r, 0.3), library.symmetric(p, r, diagonal=0.3))


def test_tuning_writes_what_the_dispatcher_reads(tmp_path: Path) -> None:
    """The interpreter is a thousand times slower than the library, so the table must select the
    library."""
    path = tmp_path / "table.json"
    command = ["--device", "cpu", "--problems", "1x20x28", "--dtypes", "float16", "--repeats", "1"]
    assert tune.main([*command, "--tiles", "16x16:4:2", "--output", str(path)]) == 0
    shipped, table = (json.loads(p.read_text())["devices"] for p in (dispatch.TABLE, path))
    entries = table.pop("cpu")["entries"]
    assert table == shipped
    assert [(e["operation"], e["cols"], e["tile"]) for e in entries] == [
        ("gram", 28, None), ("commuting", 20, None), ("polynomial", 20, None),
        ("grouped", 21, None),
    ]  # fmt: skip


def test_a_wrong_result_is_never_chosen() -> None:
    x = stack(1, 8, 8, torch.float32)
    assert tune.agrees(kernels.gram(x), kernels.gram(x))
    assert not tune.agrees(kernels.gram(x) * 1.001, kernels.gram(x))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize(
    "sizes",
    [[(2, 5)], [(1, 33), (2, 16)], [(1, 3), (0, 9), (2, 20), (1, 0), (1, 17)]],
    ids=["one stack", "two", "more than a launch takes, one empty, one without columns"],
)
def test_several_stacks_in_one_launch(sizes: list[tuple[int, int]], dtype: torch.dtype) -> None:
    stacks = [torch.randn(batch, 18, cols).to(dtype) for batch, cols in sizes]
    stacks[-1] = stacks[-1].mT.contiguous().mT
    result = symmetric.grams(stacks, TILE)
    assert_close(result, kernels.gram(*[x.double() for x in stacks]))
    assert torch.equal(result, result.mT)


def test_nan_stays_in_its_matrix_of_its_stack() -> None:
    stacks = [torch.randn(2, 17, 4), torch.randn(1, 17, 20)]
    stacks[0][1, 16, 2] = float("nan")
    result = symmetric.grams(stacks, TILE)
    assert torch.equal(result.isnan(), kernels.gram(*stacks).isnan())
    assert result[1, 16].isnan().all() and not result[[0, 2]].isnan().any()
