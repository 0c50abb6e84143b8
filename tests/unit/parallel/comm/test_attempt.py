"""Ranks of one attempt agree on a name in a store that holds what earlier attempts have left."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from parallel.comm.attempt import attempt_name


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt(store: TCPStore, ranks: list[int], size: int, seconds: float = 30.0) -> list[str]:
    """What each of some ranks is told, each with a connection of its own."""

    def one(rank: int) -> str:
        mine = TCPStore("127.0.0.1", store.port, is_master=False)
        try:
            return attempt_name(mine, rank, size, seconds)
        except TimeoutError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(one, ranks))


def test_every_attempt_has_a_name_of_its_own(store: TCPStore) -> None:
    names = [attempt(store, [0, 1, 2], 3) for _ in range(4)]
    assert all(len(set(each)) == 1 for each in names)
    assert len({each[0] for each in names}) == 4


def test_an_attempt_that_broke_off_leaves_nothing_behind(store: TCPStore) -> None:
    # Rank 2 was killed before it came, then rank 0, then all but rank 1.
    assert attempt(store, [0, 1], 3, 0.5)[0] == "1 of 3 ranks did not come in 0.5 s: 2"
    said = attempt(store, [1, 2], 3, 0.5)
    assert said == [f"rank {rank} had no reply of rank 0 in 0.5 s" for rank in (1, 2)]
    attempt(store, [1], 3, 0.2)
    (name,) = set(attempt(store, [2, 0, 1], 3))
    assert len(name) == 32


def test_one_rank_needs_nobody(store: TCPStore) -> None:
    assert len(attempt_name(store, 0, 1, 0.0)) == 32
