"""The order of memory accesses from several streams."""

from hypothesis import example, given
from hypothesis import strategies as st

from training.rehearsal.stream_order import Part, StreamOrder

KINDS = ["read", "write", "write", "follow", "follow", "record", "wait", "synchronize", "host_wait"]
STREAMS = range(3)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from(STREAMS),
        st.sampled_from(STREAMS),
        st.integers(0, 1),  # event
        st.integers(0, 1),  # first byte
        st.integers(1, 2),  # number of bytes
    ),
    min_size=5,
    max_size=16,
)


WRITE, READ = ("write", 0, 0, 0, 0, 2), ("read", 1, 0, 0, 0, 2)


@example([WRITE, ("follow", 0, 1, 0, 0, 1), READ, WRITE], False)
@example([WRITE, ("follow", 0, 2, 0, 0, 1), ("follow", 2, 1, 0, 0, 1), READ], False)
@example([("write", 0, 0, 0, 0, 1), ("write", 1, 0, 0, 1, 1)], False)
@example([WRITE, ("record", 0, 0, 0, 0, 1), WRITE, ("wait", 1, 0, 0, 0, 1), READ], False)
@example([READ, ("read", 0, 0, 0, 0, 2), WRITE], False)
@given(STEPS, st.booleans())
def test_a_finding_is_a_conflict_that_no_event_orders(steps, freed) -> None:
    """Compare with a reference that stores, for each stream, all accesses that precede the stream's
    next work."""
    order, unordered = StreamOrder(), False
    order.allocate(7, STREAMS[0])
    accesses: list[tuple[range, bool]] = []
    known: list[set[int]] = [set() for _ in STREAMS]
    recorded: dict[int, set[int]] = {}
    for kind, stream, other, event, first, size in steps:
        if kind in ("read", "write"):
            part, place = Part(7, first, first + size), range(first, first + size)
            writes = kind == "write"
            order.access(stream, [] if writes else [part], [part] if writes else [], kind, "here")
            unordered |= any(
                i not in known[stream] and (writes or wrote) and bool({*place} & {*before})
                for i, (before, wrote) in enumerate(accesses)
            )
            known[stream].add(len(accesses))
            accesses.append((place, writes))
        elif kind == "follow":  # `other` waits for `stream`
            order.record(2, stream)
            order.wait(2, other)
            known[other] |= known[stream]
        elif kind == "record":
            order.record(event, stream)
            recorded[event] = set(known[stream])
        elif kind == "wait":
            order.wait(event, stream)
            known[stream] |= recorded.get(event, set())
        else:
            everything = event == 1 and kind == "synchronize"
            if kind == "host_wait":
                order.host_wait(event)
                waited = recorded.get(event, set())
            else:
                order.synchronize(None if everything else stream)
                waited = set().union(*known) if everything else set(known[stream])
            for each in known:
                each |= waited
    if freed:  # the stream that allocated the memory may reuse it
        order.free(7)
        unordered |= any(i not in known[STREAMS[0]] for i in range(len(accesses)))
    assert bool(order.findings) == unordered


def test_a_finding_names_both_accesses() -> None:
    order = StreamOrder()
    order.allocate(7, 1)
    order.access(1, [], [Part(7, 0, 100)], "write", "here")
    order.access(2, [Part(7, 0, 100)], [], "read", "there")
    (finding,) = order.findings
    assert finding == "read at there reads memory without waiting for write at here"
