"""Matching and mismatching collectives on several ranks."""

from dataclasses import replace

from training.rehearsal.matching import mismatches
from training.rehearsal.trace import Call

REDUCE = Call((0, 1), "data", "all_reduce", "torch.float32", 8, 8, True, "SUM", place="a.py:1")
SEND = Call((0, 1), "pipe", "send", "torch.bfloat16", 8, 16, True, peer=1, place="b.py:2")
RECEIVE = replace(SEND, kind="receive", peer=0)


def test_equal_sequences_fit():
    assert mismatches({0: [REDUCE, REDUCE], 1: [REDUCE, REDUCE]}) == []


def test_another_size_operation_or_number_does_not():
    for other in (
        [replace(REDUCE, numel=4)],
        [replace(REDUCE, detail="MAX")],
        [replace(REDUCE, kind="all_gather")],
        [REDUCE, REDUCE],
        [],
    ):
        (sentence,) = mismatches({0: [REDUCE], 1: other})
        assert "group data" in sentence and " at a.py:1 on rank " in sentence


def test_other_groups_may_come_in_between():
    third = replace(REDUCE, group=(0, 2), channel="other")
    calls = {0: [REDUCE, third, REDUCE], 1: [REDUCE, REDUCE], 2: [third]}
    assert mismatches(calls) == []


def test_sends_meet_receives():
    assert mismatches({0: [SEND], 1: [RECEIVE]}) == []
    for calls in ({0: [SEND], 1: []}, {0: [], 1: [RECEIVE]}):
        (sentence,) = mismatches(calls)
        assert "ranks 0 and 1" in sentence and "nothing on rank" in sentence
        assert "(at b.py:2)" in sentence and "of 8 torch.bfloat16 on rank" in sentence
    assert mismatches({0: [SEND], 1: [replace(RECEIVE, numel=4)]})


def test_sends_towards_each_other_fit_in_one_batch_only():
    """If the calls are separate, both ranks wait for a receive that has not started."""
    there, back = replace(SEND, batch=1), replace(RECEIVE, peer=1, batch=1)
    mine = [there, back]
    theirs = [replace(SEND, peer=0, batch=1), replace(RECEIVE, batch=1)]
    assert mismatches({0: mine, 1: theirs}) == mismatches({0: mine, 1: theirs[::-1]}) == []
    apart = [replace(call, batch=None) for call in mine]
    assert mismatches({0: apart, 1: [replace(call, batch=None) for call in theirs]})


def test_what_one_rank_sends_to_all_the_others_must_expect():
    call = replace(REDUCE, kind="all_to_all", detail="", numel=0)
    one = replace(call, out=(1, 2), into=(1, 3))
    other = replace(call, out=(3, 4), into=(2, 4))
    assert mismatches({0: [one], 1: [other]}) == []
    (sentence,) = mismatches({0: [one], 1: [replace(other, into=(5, 4))]})
    assert "rank 0 sends 2 elements to rank 1, which expects 5" in sentence
    (sentence,) = mismatches({0: [replace(one, into=(1, 5))], 1: [other]})
    assert "rank 1 sends 3 elements to rank 0, which expects 5" in sentence


def passed(rank: int) -> list[Call]:
    """Return the calls of one of three ranks: a send to the next rank, and a receive from the
    previous rank."""
    send = replace(SEND, group=(0, 1, 2), peer=(rank + 1) % 3)
    return [send, replace(send, kind="receive", peer=(rank - 1) % 3)]


def test_ranks_that_wait_in_a_circle_never_go_on():
    """Each send blocks the receive after it, which would match a send of another rank."""
    circle = {rank: passed(rank) for rank in range(3)}
    sentences = mismatches(circle)
    assert len(sentences) == 3 and "receive at b.py:2 on rank 0 never starts" in sentences[0]
    assert mismatches(circle | {1: passed(1)[::-1]}) == []


def test_a_call_of_all_that_one_rank_reaches_late_may_be_a_circle():
    everybody = replace(REDUCE, channel="world", waits=True)
    calls = {0: [SEND, replace(everybody, after=(0,))], 1: [everybody, RECEIVE]}
    assert len(mismatches(calls)) == 2
    assert mismatches(calls | {1: [RECEIVE, everybody]}) == []
