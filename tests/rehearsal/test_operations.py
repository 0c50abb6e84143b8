"""Kernel launches of graphs and of operations on lists of tensors (as in PyTorch's
multi_tensor_apply), host syncs of copies, and FLOPs of in-place matmuls and factorisations."""

from itertools import product

import pytest
import torch

from tests.rehearsal.programs import Perform, called
from training.rehearsal.operations import kernels_of, kind_of
from training.rehearsal.trace import PHASES

aten = torch.ops.aten


def meta(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([[meta(10)] * 64, [meta(10)] * 64], 1),
        ([[meta(10)] * 65, [meta(10)] * 65], 2),
        # 320 chunks of 65,536 elements at a time.
        ([[meta(320 * 65536)], [meta(320 * 65536)]], 1),
        ([[meta(320 * 65536 + 1)], [meta(320 * 65536 + 1)]], 2),
        # With two dtypes, tensors are launched separately.
        ([[meta(10)] * 5, [meta(10, torch.bfloat16)] * 5], 5),
    ],
)
def test_sums_of_lists(lists: list[list[torch.Tensor]], expected: int) -> None:
    assert kernels_of(kind_of(aten._foreach_add_.List), lists) == expected


def test_copies_between_types_and_fused_steps_go_together() -> None:
    narrow, wide = [meta(10, torch.bfloat16)] * 5, [meta(10)] * 36
    assert kernels_of(kind_of(aten._foreach_copy_.default), [narrow, wide[:5]]) == 1
    step = kind_of(aten._fused_adamw_.tensor_lr)
    assert kernels_of(step, [wide, wide, wide, wide, [], wide]) == 1
    assert kernels_of(step, [[*wide, meta(1)]] * 4 + [[], [*wide, meta(1)]]) == 2


COPIES = dict(zip(PHASES[1:], product((False, True), repeat=2), strict=True))
"""Maps each phase to whether host memory is pinned, and whether copies are `non_blocking`."""


def copies() -> None:
    """Copy to and from host memory, and into new memory."""
    on_device = torch.empty(8, device="cuda")
    for phase, (pinned, later) in COPIES.items():
        on_host = torch.empty(8).pin_memory() if pinned else torch.empty(8)
        with torch.profiler.record_function(phase):
            on_device.copy_(on_host, non_blocking=later)
            on_host.to("cuda", non_blocking=later)
            on_host.copy_(on_device, non_blocking=later)
            on_device.to("cpu", non_blocking=later)


def test_the_host_waits_for_copies_unless_memory_is_pinned(perform: Perform) -> None:
    """PyTorch pins the memory that it allocates for a `non_blocking` copy to the host."""
    counts = called(perform, copies).counts
    for phase, (pinned, later) in COPIES.items():
        waits = not (pinned and later)
        assert counts[0, phase].synchronizations.total() == 2 * waits
        assert counts[0, phase].host_reads.total() == waits + (not later)


def add_in_place() -> None:
    """Run an operation that returns nothing."""
    tensors = [torch.empty(8, device="cuda") for _ in range(3)]
    with torch.profiler.record_function("optimizer"):
        torch._foreach_add_(tensors, tensors)


def test_an_operation_in_place_on_lists_is_counted(perform: Perform) -> None:
    counts = called(perform, add_in_place).counts[0, "optimizer"]
    assert counts.kernels == {"_foreach_add_": 1}
    assert counts.launches == 1
    assert counts.elementwise_bytes == 3 * 3 * 8 * 4  # both lists are read, the first is written


def moves() -> None:
    """Run operations that do not read each element of their arguments exactly once."""
    rows, index = torch.empty(2, 100, 8, device="cuda"), torch.zeros(5, dtype=torch.long)
    index = index.pin_memory().to("cuda", non_blocking=True)
    with torch.profiler.record_function("optimizer"):
        torch.nn.functional.embedding(index, rows[0])
    with torch.profiler.record_function("monitors"):
        rows[0].copy_(rows[1])
    with torch.profiler.record_function("validation"):
        rows[0] + torch.empty(1, 8, device="cuda").expand(100, 8)


def test_bytes_are_those_of_the_elements_that_are_read_and_written(perform: Perform) -> None:
    counts = called(perform, moves).counts
    row, table = 8 * 4, 100 * 8 * 4
    assert counts[0, "optimizer"].elementwise_bytes == 2 * 5 * row + 5 * 8  # and the indices
    assert counts[0, "monitors"].elementwise_bytes == 2 * table
    assert counts[0, "validation"].elementwise_bytes == 2 * table + row


def average_in_place() -> None:
    """Run a kernel that reads and writes both of its tensors."""
    gradient, mean = torch.empty(2, 8, device="cuda").unbind()
    active = torch.ones((), dtype=torch.bool, device="cuda")
    from spectral.kernels.update import average_

    with torch.profiler.record_function("optimizer"):
        average_(gradient, mean, 0.95, active, nesterov=True)


def test_a_kernel_in_place_moves_its_tensors_twice(perform: Perform) -> None:
    pytest.importorskip("triton")
    counts = called(perform, average_in_place).counts[0, "optimizer"]
    assert counts.kernels == {"momentum_kernel": 1}
    assert counts.elementwise_bytes == 2 * 2 * 8 * 4 + 1  # and the predicate


def replays() -> None:
    """Replay a graph of two kernels twice, and launch the same kernels twice without the graph."""
    from spectral.kernels.update import average_

    gradient, mean, out = torch.empty(3, 8, 8, device="cuda").unbind()
    active = torch.ones((), dtype=torch.bool, device="cuda")

    def launch() -> None:
        average_(gradient, mean, 0.95, active, nesterov=True)
        out.addmm_(gradient, mean)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for name, run in (("optimizer", graph.replay), ("monitors", launch)):
        with torch.profiler.record_function(name):
            run()
            run()


def test_a_graph_is_one_launch_of_all_its_work(perform: Perform) -> None:
    pytest.importorskip("triton")
    counts = called(perform, replays).counts
    graph, plain = counts[0, "optimizer"], counts[0, "monitors"]
    assert (plain.launches, plain.triton_launches) == (4, 2)
    assert (graph.launches, graph.triton_launches, graph.kernels) == (2, 0, {"graph": 2})
    assert graph.flops == plain.flops == 2 * 2 * 8**3
    assert graph.elementwise_bytes == plain.elementwise_bytes > 0


def products_in_place() -> None:
    """Run matmuls and factorisations for which PyTorch has no FLOP formula."""
    a, b = torch.empty(3, 8, 4, device="cuda"), torch.empty(3, 4, 6, device="cuda")
    with torch.profiler.record_function("optimizer"):
        torch.empty(3, 8, 6, device="cuda").baddbmm_(a, b)
        torch.empty(8, 6, device="cuda").addmm_(a[0], b[0])
        factor = torch.linalg.cholesky_ex(torch.empty(3, 6, 6, device="cuda")).L
        torch.linalg.solve_triangular(factor, b.mT, upper=False)


def test_products_in_place_and_factorisations_have_flops(perform: Perform) -> None:
    report = called(perform, products_in_place)
    products, factors, solutions = 4 * (2 * 8 * 4 * 6), 3 * 6**3 / 3, 3 * 6**2 * 4
    assert report.counts[0, "optimizer"].flops == products + factors + solutions


def checked_factors() -> None:
    """Run factorisations that check an error code, and factorisations that do not."""
    x = torch.empty(2, 6, 6, device="cuda")
    with torch.profiler.record_function("optimizer"):
        for name in ("cholesky", "inv", "eigvals", "svdvals"):
            getattr(torch.linalg, name)(x)
        torch.linalg.solve(x, x)
    with torch.profiler.record_function("monitors"):
        torch.linalg.cholesky_ex(x)
        torch.linalg.qr(x)


def test_the_host_waits_for_errors_of_factorisations(perform: Perform) -> None:
    counts = called(perform, checked_factors).counts
    assert counts[0, "optimizer"].host_reads.total() == 5
    assert not counts[0, "monitors"].host_reads


def factorisations() -> None:
    """Run small factorisations, and compute the eigenvalues of two matrices."""
    wide = {"dtype": torch.float64, "device": "cuda"}
    with torch.profiler.record_function("optimizer"):
        torch.linalg.cholesky_ex(torch.empty(90, 512, 512, **wide))
        torch.linalg.cholesky_ex(torch.empty(90, 256, 256, **wide))
    with torch.profiler.record_function("monitors"):
        torch.linalg.eigvalsh(torch.empty(2, 2048, 2048, **wide))


def test_factorisations_are_far_slower_than_products(perform: Perform) -> None:
    report = called(perform, factorisations)
    # 5% of 67 TFLOP/s, and half of this at half the size.
    seconds = 90 * 512**3 / 3 / 3.35e12 + 90 * 256**3 / 3 / 1.675e12
    assert report.counts[0, "optimizer"].kernel_seconds == pytest.approx(seconds, rel=0.01)
    # The matrices' columns run in sequence, with many kernels per column.
    assert 0.4 < report.counts[0, "monitors"].kernel_seconds < 1
