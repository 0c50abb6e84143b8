"""The order of accesses from several streams."""

import pytest

from training.rehearsal.stream_order import Part, StreamOrder

A, B = 1, 2
WHOLE = Part(7, 0, 100)


@pytest.fixture
def order() -> StreamOrder:
    """Return an order in which stream A has written a whole storage."""
    found = StreamOrder()
    found.allocate(7, A)
    found.access(A, [], [WHOLE], "write", "here")
    return found


def test_a_read_on_another_stream_needs_an_event(order):
    order.access(B, [WHOLE], [], "read", "there")
    (finding,) = order.findings
    assert str(finding) == "read at there reads memory without waiting for write at here"


def test_an_event_orders(order):
    order.record(1, A)
    order.wait(1, B)
    order.access(B, [WHOLE], [], "read", "there")
    assert order.findings == []


def test_an_event_orders_only_what_came_before_it(order):
    order.record(1, A)
    order.access(A, [], [WHOLE], "write again", "here")
    order.wait(1, B)
    order.access(B, [WHOLE], [], "read", "there")
    assert len(order.findings) == 1


def test_an_order_passes_through_a_third_stream(order):
    order.record(1, A)
    order.wait(1, 3)
    order.record(2, 3)
    order.wait(2, B)
    order.access(B, [WHOLE], [], "read", "there")
    assert order.findings == []


def test_a_write_must_wait_for_reads_of_others(order):
    order.record(1, A)
    order.wait(1, B)
    order.access(B, [WHOLE], [], "read", "there")
    order.access(A, [], [WHOLE], "overwrite", "here")
    assert len(order.findings) == 1


def test_parts_that_do_not_meet_need_no_order(order):
    order.allocate(8, A)
    order.access(A, [], [Part(8, 0, 50)], "write", "here")
    order.access(B, [], [Part(8, 50, 100)], "write", "there")
    assert order.findings == []


@pytest.mark.parametrize("stream", [A, None])
def test_what_the_host_waits_for_is_in_order(order, stream):
    order.synchronize(stream)
    order.access(B, [WHOLE], [], "read", "there")
    assert order.findings == []
