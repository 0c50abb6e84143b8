"""Which ranks are named absent, with a store in another process, also one that has stopped."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from parallel.comm.collectives import PATIENCE, absent_ranks

SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen[str], TCPStore]]:
    words = [sys.executable, "-c", SERVER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        yield process, TCPStore("localhost", port, timeout=timedelta(seconds=600))
        process.kill()


def test_exactly_those_who_do_not_come_are_named(server):
    _, store = server
    for rank in range(7):
        store.set(f"host/{rank}", socket.gethostname())
        if rank not in (0, 6):
            store.set(f"failed/{rank}", "")
    here = socket.gethostname()
    assert absent_ranks(store, 3, 7) == {0: here, 6: here}


def test_a_silent_store_counts_as_rank_0_and_costs_a_bounded_time(server, monkeypatch):
    process, store = server
    monkeypatch.setenv("MASTER_ADDR", "node1")
    process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    assert absent_ranks(store, 3, 4) == {0: "node1"}
    assert time.monotonic() - began < 4 * PATIENCE
    process.send_signal(signal.SIGCONT)


def test_a_store_that_is_gone_names_nobody(server):
    process, store = server
    process.kill()
    process.wait()
    assert absent_ranks(store, 1, 4) == {}
