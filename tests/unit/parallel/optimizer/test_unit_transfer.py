"""Positions of the pieces of units that are split or replicated across tensor-parallel ranks."""

from typing import Any

import pytest

from models.units import Unit
from parallel.optimizer.unit_transfer import plan_transfers
from parallel.storage.bucket_layout import BucketLayout, BucketPlanner
from spectral.sharded.exchange import Part


def unit_of(local: tuple[int, int], whole: tuple[int, int], **options: Any) -> Unit:
    """Return the unit of a matrix with shape `whole`, of which a rank has a part with shape
    `local`."""
    return Unit(
        name="a", parameter="a", role="o", view_shape=local, index=(), axes=whole, **options
    )


def layout(unit: Unit, data_ranks: int) -> BucketLayout:
    """Return the bucket layout of a unit on two tensor-parallel ranks, with small shards."""
    return BucketPlanner(ranks=data_ranks, alignment=1).layout([unit])


def positions(parts: tuple[Part, ...], tensor_rank: int) -> list[int]:
    """Return the positions, in the flattened matrix, of the parts on one of two tensor-parallel
    ranks."""
    own = (box for part in parts if part.rank % 2 == tensor_rank for box in part.whole)
    return sorted(i for places in own for i in places)


@pytest.mark.parametrize("data_ranks", [1, 3])
def test_every_copy_of_a_replicated_matrix_takes_all_of_the_update(data_ranks: int) -> None:
    copied = unit_of((4, 6), (4, 6), replicated=True)
    (transfer,) = plan_transfers([[copied]] * 2, layout(copied, data_ranks), {"a": 1})
    assert [positions(transfer.targets, rank) for rank in range(2)] == [list(range(24))] * 2
    assert [positions(transfer.sources, rank) for rank in range(2)] == [[], list(range(24))]
