"""Placement: published examples, bounds against brute force, and units that stay where they are."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import ModelConfig
from models.size import all_units
from parallel.optimizer.placement import unit_work
from parallel.storage.bucket_layout import BucketPlanner
from spectral.sharded.placement import (
    Work,
    load_bound,
    loads_of,
    longest_processing_time,
    ping_pong,
    place,
)

COSTS = st.lists(st.integers(1, 30).map(float), min_size=1, max_size=7)
RANKS = st.integers(1, 4)
STRATEGIES = ("auto", "ping_pong")


def dealt(owners, ranks):
    """Items of each rank."""
    return [[i for i, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]


def best_load(costs, ranks):
    """The smallest possible largest load, by trying everything."""
    return min(
        max(loads_of(costs, owners, [0.0] * ranks))
        for owners in product(range(ranks), repeat=len(costs))
    )


@st.composite
def works(draw):
    """`(works, ranks)`: units with random costs, spread over random ranks."""
    ranks = draw(st.integers(1, 12))
    units = []
    for i in range(draw(st.integers(1, 30))):
        holders = draw(st.dictionaries(st.integers(0, ranks - 1), st.integers(1, 9), min_size=1))
        units.append(Work(f"unit.{i}", float(draw(st.integers(1, 50))), holders))
    return units, ranks


def test_ping_pong_is_the_published_example():
    assert dealt(ping_pong(range(10), 4), 4) == [[0, 7, 8], [1, 6, 9], [2, 5], [3, 4]]
    assert dealt(ping_pong([9 - i for i in range(10)], 4), 4) == [
        [1, 2, 9],
        [0, 3, 8],
        [4, 7],
        [5, 6],
    ]


@given(COSTS, RANKS)
def test_longest_processing_time_is_within_four_thirds_of_the_best(costs, ranks):
    load = max(loads_of(costs, longest_processing_time(costs, ranks), [0.0] * ranks))
    best = best_load(costs, ranks)
    assert load <= (4 / 3 - 1 / (3 * ranks)) * best
    assert load_bound(costs, ranks) <= best


def test_the_load_bound_sees_that_large_items_must_share():
    assert load_bound([3.0, 3.0, 2.0], 2) == 5.0
    assert load_bound([2.0] * 5, 2) == 6.0
    assert load_bound([1.0] * 8, 2) == 4.0
    assert load_bound([7.0], 3) == 7.0


@given(works(), st.sampled_from(STRATEGIES))
def test_every_unit_has_one_owner_and_the_figures_agree(case, strategy):
    units, ranks = case
    placed = place(strategy, units, ranks)
    assert set(placed.owners) == {unit.name for unit in units}
    assert len(placed.loads) == ranks
    loads = [0.0] * ranks
    moved = 0
    for unit in units:
        loads[placed.owners[unit.name]] += unit.cost
        moved += sum(n for rank, n in unit.holders.items() if rank != placed.owners[unit.name])
    assert list(placed.loads) == loads and placed.moved == moved
    assert max(placed.loads) >= placed.bound * (1 - 1e-12)
    assert placed.imbalance == pytest.approx(max(loads) * ranks / sum(loads))


@given(works(), st.sampled_from(STRATEGIES))
def test_the_order_of_the_units_does_not_matter(case, strategy):
    units, ranks = case
    placed = place(strategy, units, ranks)
    again = place(strategy, units[::-1], ranks)
    assert placed == again and placed.digest() == again.digest()


@given(works())
def test_auto_gives_up_at_most_the_slack(case):
    units, ranks = case
    costs, none = [unit.cost for unit in units], [0.0] * ranks
    greedy = max(loads_of(costs, longest_processing_time(costs, ranks), none))
    best = min(greedy, max(place("ping_pong", units, ranks).loads))
    chosen = place("auto", units, ranks)
    assert chosen.strategy in ("ping_pong", "longest_processing_time")
    # The strategy that keeps units may itself have given up its slack.
    assert max(chosen.loads) <= best * 1.02 * (1 + 1e-12)


def test_units_stay_where_they_are_held_if_loads_allow():
    units = [Work(f"u{i}", 1.0, {i % 4: 10}) for i in range(16)]
    assert place("auto", units, 4).moved == 0
    crowded = [Work(f"u{i}", 1.0, {0: 10}) for i in range(16)]
    placed = place("auto", crowded, 4)
    assert placed.moved == 120 and placed.imbalance == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fastest", [], 2), "strategy must be one of auto, .*, got 'fastest'"),
        (("auto", [], 0), "ranks must be at least 1, got 0"),
        (
            ("auto", [Work("a", 1.0, {}), Work("a", 1.0, {})], 2),
            "names of units must be unique, got a more than once",
        ),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        place(*arguments)


def test_ranks_with_earlier_loads_get_less():
    units = [Work(f"u{i}", 1.0, {0: 10}) for i in range(5)]
    placed = place("auto", units, 3, base=[4.0, 0.0, 0.0])
    assert placed.loads == (4.0, 3.0, 2.0) and placed.bound == 4.0
    with pytest.raises(ValueError, match="base must have a load for each of 3 ranks, got 2"):
        place("auto", units, 3, base=[1.0, 2.0])


def test_nothing_to_place_is_balanced():
    placed = place("auto", [], 3)
    assert placed.owners == {} and placed.imbalance == 1.0 and placed.moved == 0


@pytest.mark.parametrize("granularity", ["head", "component"])
def test_work_of_a_stage_counts_every_element_of_the_tensor_ranks(granularity):
    model = ModelConfig(layers=2, hidden=16, heads=4, kv_heads=2, ffn=24, vocab_size=40)
    units = [
        all_units(model, qkv_units=granularity, tensor_rank=rank, tensor_size=2)
        for rank in range(2)
    ]

    def elementwise(unit):
        return unit.role in ("embedding", "head", "gain")

    bucket_layout = BucketPlanner(ranks=3, elementwise=elementwise, tensor_size=2).layout(units[0])
    found = unit_work(
        units, bucket_layout, elementwise=elementwise, cost=lambda unit: float(unit.numel)
    )
    whole = {u.name: u for u in all_units(model, qkv_units=granularity) if not elementwise(u)}
    assert [work.name for work in found] == sorted(whole)
    for work in found:
        assert work.numel == work.cost == whole[work.name].numel
        tensor_ranks = {rank % 2 for rank in work.holders}
        cut = granularity == "component" or work.name.split(".")[2] in ("gate", "up", "down", "o")
        assert len(tensor_ranks) == (2 if cut else 1)
