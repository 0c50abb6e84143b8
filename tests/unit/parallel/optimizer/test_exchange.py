"""Pieces of cut matrices, joined and cut again, and stepped by themselves."""

import pytest
import torch

from models.units import Unit
from parallel.optimizer.exchange import assemble, disassemble_, plan_transfers, shardwise
from parallel.storage.bucket_layout import BucketPlanner

ALL = (slice(None),)


def cut(axis: int) -> Unit:
    """A 4 x 6 matrix whose axis `axis` two tensor-parallel ranks share."""
    local = (2, 6) if axis == 0 else (4, 3)
    return Unit(
        name="cut",
        parameter="cut",
        role="o",
        view_shape=local,
        index=ALL,
        axes=(4, 6),
        shard_axis=axis,
    )


@pytest.mark.parametrize("axis", [0, 1])
def test_assemble_makes_the_whole_of_the_pieces_and_disassemble_undoes_it(axis):
    unit = cut(axis)
    planner = BucketPlanner(ranks=2, elementwise=lambda unit: False, tensor_size=2)
    (transfer,) = plan_transfers([[unit], [unit]], planner.layout([unit]), {"cut": 0})
    whole = torch.arange(24.0).reshape(4, 6)
    pieces = torch.cat([piece.flatten() for piece in whole.chunk(2, dim=axis)])
    assert torch.equal(assemble(transfer, pieces), whole)
    back = torch.empty_like(pieces)
    disassemble_(transfer, whole, back)
    assert torch.equal(back, pieces)


def test_shardwise_pieces_are_matrices_of_their_own():
    (first,), (second,) = shardwise([[cut(1)], [cut(1)]], lambda unit: True)
    assert (first.name, second.name) == ("cut.shard.0", "cut.shard.1")
    assert first.shape == second.shape == (4, 3) and first.shard_axis is None
    ((same,), _) = shardwise([[cut(1)], [cut(1)]], lambda unit: False)
    assert same == cut(1)
