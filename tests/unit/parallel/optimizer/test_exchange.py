"""Transfers: where the pieces of cut, replicated and whole units lie, and who steps them."""

from collections import Counter

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


def transfers(*units: Unit, owner: int, ranks: int = 2):
    """Transfers of units that both of two tensor-parallel ranks declare, over `ranks` replicas."""
    bucket_layout = BucketPlanner(
        ranks=ranks, elementwise=lambda unit: False, tensor_size=2, storage="even", alignment=1
    ).layout(units)
    owners = {unit.name: owner for unit in units}
    return plan_transfers([list(units), list(units)], bucket_layout, owners)


def elements(parts) -> dict[int, int]:
    """Elements by rank of the stage."""
    found: Counter[int] = Counter()
    for part in parts:
        found[part.rank] += part.numel
    return dict(found)


def test_a_cut_matrix_is_sent_from_every_piece_and_updates_every_piece():
    (transfer,) = transfers(cut(0), owner=3)
    assert transfer.tensor_ranks == (0, 1) and not transfer.is_local
    assert elements(transfer.sources) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert transfer.targets == transfer.sources


def test_a_replicated_matrix_is_stepped_once_for_all_its_copies():
    router = Unit(
        name="router", parameter="router", role="router", view_shape=(4, 6), index=ALL, axes=(4, 6),
        replicated=True,
    )  # fmt: skip
    (transfer,) = transfers(router, owner=1, ranks=1)
    assert transfer.tensor_ranks == (1,) and transfer.pieces == 1 and not transfer.is_local
    assert elements(transfer.sources) == {1: 24}
    assert elements(transfer.targets) == {0: 24, 1: 24}


def test_a_matrix_in_its_owners_shard_is_local():
    head = Unit(name="q", parameter="q", role="q", view_shape=(4, 6), index=ALL, axes=(4, 6))
    bucket_layout = BucketPlanner(ranks=1, elementwise=lambda unit: False, tensor_size=1).layout(
        [head]
    )
    (transfer,) = plan_transfers([[head]], bucket_layout, {"q": 0})
    assert transfer.is_local


@pytest.mark.parametrize("axis", [0, 1])
def test_assemble_makes_the_whole_of_the_pieces_and_disassemble_undoes_it(axis):
    (transfer,) = transfers(cut(axis), owner=0)
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
