"""The positions of matrices in a parameter, and a step that equals separate steps of the
matrices."""

from typing import Any

import pytest
import torch
from torch import nn

from spectral import SpectralOptimizer
from spectral.division import Division, intersection, narrowed, relative, sizes_of, span_of
from spectral.polar import WORKSPACE_ELEMENTS

RULES = ["muon", "normuon", "muon_sphere", "spectral_sphere", "muon_plus_plus", "spectral_descent"]


CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], Any]] = {
    "interleaved": ({"stride": 2}, (10, 4), lambda w: [w[0::2], w[1::2]]),
    "heads of interleaved q, k, v": (
        {"stride": 3, "rows": [2]},
        (12, 5),
        lambda w: [w.view(2, 2, 3, 5)[h, :, j] for j in range(3) for h in range(2)],
    ),
    "interleaved experts": (
        {"stacked": True, "transposed": True, "stride": 2},
        (2, 5, 8),
        lambda w: [e[:, j::2].T for e in w for j in range(2)],
    ),
    "rows, transposed and stacked": (
        {"rows": [4, 2], "transposed": True, "stacked": True},
        (2, 5, 12),
        lambda w: [m for e in w for m in e.T.split([4, 2, 4, 2])],
    ),
    "grouped convolution": (
        {"rows": [3]},
        (6, 2, 3),
        lambda w: [part.flatten(1) for part in w.chunk(2)],
    ),
    "convolution": ({}, (6, 2, 2, 2), lambda w: [w.flatten(1)]),
    "transposed convolution": (
        {"transposed": True},
        (5, 3, 2, 2),
        lambda w: [w.transpose(0, 1).flatten(1)],
    ),
    "grouped transposed convolution": (
        {"transposed": True, "groups": 3},
        (6, 2, 4),
        lambda w: [part.transpose(0, 1).flatten(1) for part in w.chunk(3)],
    ),
    "experts in one axis": (
        {"transposed": True, "groups": 2, "rows": [2]},
        (6, 4),
        lambda w: [part[:, i : i + 2].T for part in w.chunk(2) for i in (0, 2)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_divided_parameter_equals_its_matrices_apart(name, monkeypatch) -> None:
    """Compare with plain slices of the weight in float64, for every matrix rule. The workspace
    holds one or two matrices."""
    monkeypatch.setitem(WORKSPACE_ELEMENTS, "cpu", 24)
    units, shape, pieces = CASES[name]
    torch.manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64)
    for rule in RULES:
        together = nn.Parameter(start.clone())
        apart = [nn.Parameter(m.clone()) for m in pieces(start)]
        one = SpectralOptimizer([{"params": [together], "units": units}], rule=rule, lr=0.01)
        each = [SpectralOptimizer([p], rule=rule, lr=0.01) for p in apart]
        for _ in range(3):
            together.grad = torch.randn_like(start)
            one.step()
            for optimizer, p, g in zip(each, apart, pieces(together.grad), strict=True):
                p.grad = g.clone()
                optimizer.step()
        torch.testing.assert_close(pieces(together.detach()), apart, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_matrices_are_written_where_they_were_read(name: str) -> None:
    units, shape, pieces = CASES[name]
    division = Division.of(units)
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    boxes = division.boxes(shape)
    copy = torch.full_like(weight, -1)
    for box, piece in zip(boxes, pieces(weight), strict=True):
        part = narrowed(weight, box)
        assert part.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        assert part.shape == sizes_of(box)
        assert torch.equal(division.matrix(part), piece)
        narrowed(copy, box).copy_(division.part(piece, part.shape))
    assert torch.equal(copy, weight), "every element is in one matrix"


@pytest.mark.parametrize("name", CASES)
def test_shards_hold_parts_of_matrices(name: str) -> None:
    """The part of a matrix in a shard has a position in the shard and a position in the matrix."""
    units, shape, _ = CASES[name]
    weight = torch.arange(torch.Size(shape).numel()).view(shape)
    for axis in range(len(shape)):
        for start, length in ((0, 1), (0, 3), (1, 2), (1, shape[axis] - 1), (shape[axis], 0)):
            held = [*map(range, shape)]
            held[axis] = span_of(start, min(length, shape[axis] - start))
            shard = narrowed(weight, tuple(held))
            covered = torch.zeros_like(shard)
            for box in Division.of(units).boxes(shape):
                common = intersection(box, tuple(held))
                matrix = narrowed(weight, box)
                wanted = torch.isin(shard.contiguous(), matrix.contiguous())
                if common is None:
                    assert not wanted.any()
                    continue
                inside = narrowed(shard, relative(common, tuple(held)))
                assert torch.equal(inside, narrowed(matrix, relative(common, box)))
                assert inside.numel() == wanted.sum()
                narrowed(covered, relative(common, tuple(held))).add_(1)
            assert torch.equal(covered, torch.ones_like(shard))


@pytest.mark.parametrize(
    ("units", "shape", "message"),
    [
        ({"stride": 0}, (4, 4), "units\\['stride'\\] must be a positive integer, got 0"),
        ({"groups": True}, (4, 4), "units\\['groups'\\] must be a positive integer, got True"),
        ({"transposed": "yes"}, (4, 4), "units\\['transposed'\\] must be True or False, got 'yes'"),
        ({"stride": 3}, (4, 4), r"divide the 4 outputs .* with stride 3"),
        ({"stride": 2, "rows": [3]}, (8, 4), r"got \(3,\) with stride 2"),
        (
            {"groups": 3},
            (4, 6),
            r"units\['groups'\] must divide the size of axis 0 .* \(4, 6\), got 3",
        ),
        (
            {"stacked": True, "groups": 3},
            (3, 4, 6),
            r"must divide the size of axis 1 .* \(3, 4, 6\), got 3",
        ),
        ({"groups": 2, "rows": [3]}, (8, 6), r"divide the 4 outputs"),
        ({"stacked": True}, (4, 4), "must have at least 3 dimensions"),
        ({"columns": [3]}, (4, 4), "keys of units must be among .* got columns"),
    ],
)
def test_what_cannot_be_divided_is_refused(units, shape, message) -> None:
    with pytest.raises(ValueError, match=message):
        Division.of(units).boxes(shape)


def test_settings_are_read_again_and_older_ones_too() -> None:
    division = Division(rows=(2, 3), transposed=True, stride=2, groups=3)
    assert Division.of(division.settings()) == division
    assert Division.of({"rows": [2], "transposed": False, "stacked": False}) == Division(rows=(2,))
