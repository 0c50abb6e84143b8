"""Which ranks are reported as stragglers, and when, and the times of ranks."""

import math
import time
from itertools import count
from types import SimpleNamespace

import torch

from tests.run_configs import tiny_config
from tests.run_results import json_lines
from training.lifecycle.pace import Clock, Stragglers
from training.run import train

HOSTS = ["n1", "n1", "n2", "n2"]


def test_a_rank_is_named_once_it_has_been_slow_for_fifty_steps():
    found = Stragglers(HOSTS, [0, 0, 0, 0])
    slow = [1.0, 1.1, 1.3, 0.9]
    assert [list(found.new(slow, 10)) for _ in range(4)] == [[]] * 4
    [text] = found.new(slow, 10)
    assert text.startswith("rank 2 (host n2) has been slow for 50 steps: 1.3 s per step")
    assert text.endswith("the median of its pipeline stage is 1.05 s")
    assert list(found.new(slow, 10)) == []  # known by now


def test_a_rank_that_recovers_is_counted_anew():
    found = Stragglers(HOSTS, [0, 0, 0, 0])
    slow, even = [1.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.1]
    assert not list(found.new(slow, 49)) and not list(found.new(even, 1))
    assert not list(found.new(slow, 49)) and len(list(found.new(slow, 1))) == 1
    assert not list(found.new(even, 10)) and len(list(found.new(slow, 60))) == 1


def test_stages_are_compared_with_themselves():
    found = Stragglers(HOSTS, [0, 1, 0, 1])
    assert not list(found.new([1.0, 2.0, 1.0, 2.0], 100))
    [text] = found.new([1.0, 2.0, 1.0, 4.0], 100)
    assert text.startswith("rank 3 (host n2)")


def test_times_of_a_rank_are_those_of_its_passes(world, folder, tmp_path, monkeypatch):
    """The times do not include work between steps, for which other ranks may wait."""
    local: list[float] = []
    monkeypatch.setattr(Stragglers, "new", lambda _, times, steps: local.extend(times) or ["slow"])
    config = tiny_config(folder, "adamw", train__steps=4, log__interval=2, checkpoint__interval=0)
    train(config, world, on_step=lambda *_: time.sleep(0.2))
    seconds = [line["perf/step_time_s"] for line in json_lines(tmp_path / "run" / "metrics.jsonl")]
    assert len(local) == len(seconds) == 2
    events = json_lines(tmp_path / "run" / "events.jsonl")
    noted = [(line["step"], line["text"]) for line in events if line["kind"] == "straggler"]
    assert noted == [(2, "slow"), (4, "slow")]
    assert all(0 < each < step - 0.05 for each, step in zip(local, seconds, strict=True))


def test_times_on_a_gpu_are_those_between_events(monkeypatch):
    """On the GPU, consecutive events are one second apart, and the time of an event is known once
    the event is reached."""
    seconds = count()

    def event(enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        made = SimpleNamespace(reached=math.nan)
        made.record = lambda: vars(made).update(time=next(seconds))
        made.synchronize = lambda: vars(made).update(reached=made.time)
        made.elapsed_time = lambda end: 1000.0 * (end.reached - made.time)
        return made

    monkeypatch.setattr(torch.cuda, "Event", event)
    clock = Clock(torch.device("cuda"))
    for intervals in (3, 2, 0):
        for _ in range(intervals):
            clock.begin()
            clock.end()
        assert clock.total() == intervals
