"""Journeys: where pieces of cut, replicated and whole units lie, and where they are stepped."""

import pytest
import torch

from models.units import Unit
from parallel.optimizer.exchange import assemble, disassemble_, plan_journeys, shardwise
from parallel.storage.bucket_layout import plan_layout

ALL = (slice(None),)


def cut(axis: int) -> Unit:
    """A 4 x 6 matrix whose axis `axis` two tensor-parallel ranks share."""
    local = (2, 6) if axis == 0 else (4, 3)
    return Unit(
        name="cut", parameter="cut", role="o", layout=local, index=ALL, axes=(4, 6), shard_axis=axis
    )


def journeys(*units: Unit, home: int, mode: str = "home", ranks: int = 2):
    """Journeys of units that both of two tensor-parallel ranks declare, over `ranks` replicas."""
    layout = plan_layout(
        units,
        ranks=ranks,
        elementwise=lambda unit: False,
        tensor_size=2,
        storage="even",
        alignment=1,
    )
    homes = {unit.name: home for unit in units}
    return plan_journeys([list(units), list(units)], layout, homes, mode)


def held(holdings) -> dict[int, int]:
    """Elements by rank of the stage."""
    return {holding.rank: holding.numel for holding in holdings}


def test_a_cut_matrix_comes_from_every_piece_and_returns_to_it():
    (journey,) = journeys(cut(0), home=3)
    assert journey.sources == (0, 1) and not journey.stays
    assert held(journey.holdings) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert journey.returns == journey.holdings


def test_a_duplicated_matrix_is_stepped_by_each_tensor_rank_beside_its_home():
    first, second = journeys(cut(1), home=3, mode="duplicated")
    assert (first.home, second.home) == (2, 3)
    assert held(first.holdings) == held(second.holdings) == {0: 6, 1: 6, 2: 6, 3: 6}
    assert held(first.returns) == {0: 6, 2: 6} and held(second.returns) == {1: 6, 3: 6}


def test_a_replicated_matrix_is_stepped_once_for_all_its_copies():
    router = Unit(
        name="router", parameter="router", role="router", layout=(4, 6), index=ALL, axes=(4, 6),
        replicated=True,
    )  # fmt: skip
    (journey,) = journeys(router, home=1, ranks=1)
    assert journey.sources == (1,) and journey.pieces == 1 and not journey.stays
    assert held(journey.holdings) == {1: 24}
    assert held(journey.returns) == {0: 24, 1: 24}


def test_a_matrix_its_home_owns_stays():
    head = Unit(name="q", parameter="q", role="q", layout=(4, 6), index=ALL, axes=(4, 6))
    layout = plan_layout([head], ranks=1, elementwise=lambda unit: False, tensor_size=1)
    (journey,) = plan_journeys([[head]], layout, {"q": 0})
    assert journey.stays


@pytest.mark.parametrize("axis", [0, 1])
def test_assemble_makes_the_whole_of_the_pieces_and_disassemble_undoes_it(axis):
    (journey,) = journeys(cut(axis), home=0)
    whole = torch.arange(24.0).reshape(4, 6)
    pieces = torch.stack([piece.flatten() for piece in whole.chunk(2, dim=axis)])
    assert torch.equal(assemble(journey, pieces), whole)
    back = torch.empty_like(pieces)
    disassemble_(journey, whole, back)
    assert torch.equal(back, pieces)


def test_shardwise_pieces_are_matrices_of_their_own():
    (first,), (second,) = shardwise([[cut(1)], [cut(1)]], lambda unit: True)
    assert (first.name, second.name) == ("cut.shard.0", "cut.shard.1")
    assert first.shape == second.shape == (4, 3) and first.shard_axis is None
    ((same,), _) = shardwise([[cut(1)], [cut(1)]], lambda unit: False)
    assert same == cut(1)
