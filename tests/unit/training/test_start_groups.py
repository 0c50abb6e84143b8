"""Messages about ranks that differ."""

from parallel.comm.collectives import differing


def test_the_ranks_that_differ_are_those_that_few_agree_with() -> None:
    facts = [{"seed": 1}, {"seed": 7}, {"seed": 7}, {"seed": 7}]
    hosts = ["a", "b", "c", "d"]
    assert list(differing(facts, hosts)) == [
        "seed differs between ranks: 1 on rank 0 (host a), 7 on the other 3"
    ]
    assert list(differing(facts[:2], hosts)) == [
        "seed differs between ranks: 1 on rank 0 (host a), 7 on rank 1 (host b)"
    ]
    many = [{"seed": 7}] * 30 + [{}] * 20
    (line,) = differing(many, ["a"] * 50)
    assert line.startswith("seed differs between ranks: absent on rank 30 (host a)")
    assert line.endswith("rank 37 (host a) and 12 more, 7 on the other 30")
