"""The garbage collector runs at the same fixed steps on every rank."""

import gc

import pytest

from tests.run_configs import tiny_config
from training.lifecycle import pace
from training.run import train


@pytest.fixture(autouse=True)
def _unfrozen(monkeypatch):
    """Unfreeze all objects, because in a program nothing is frozen when a run starts. Also restore
    the function that counts frozen objects, which tests/conftest.py replaces."""
    monkeypatch.setattr(gc, "get_freeze_count", gc.get_freeze_count.__wrapped__)
    gc.unfreeze()
    yield
    gc.freeze()


def test_a_run_collects_at_fixed_steps_alone(folder, world, monkeypatch):
    monkeypatch.setattr(pace, "INTERVAL", 2)
    steps, collected = [], []
    keys = {"train__exit_step": 5, "train__micro_batch": 8}

    def seen(phase, details):
        if phase == "start":
            collected.append(len(steps))

    def on_step(step, result):
        steps.append(step)
        cycle = []
        cycle.append(cycle)
        assert not gc.isenabled() and gc.get_freeze_count() > 0

    gc.callbacks.append(seen)
    try:
        train(tiny_config(folder, "muon", **keys), world, on_step=on_step)
    finally:
        gc.callbacks.remove(seen)
    during = [count for count in collected if 0 < count < 5]
    assert during == [1, 3]  # within steps 2 and 4, before `on_step`
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_the_collector_is_as_before_after_a_failure():
    gc.disable()
    try:
        with pytest.raises(RuntimeError, match="lost"), pace.collected_at_steps():
            raise RuntimeError("lost")
        assert not gc.isenabled() and gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_what_the_caller_has_frozen_stays_so():
    """The number of frozen objects would also decrease when one of them is deleted."""
    kept = []
    gc.freeze()
    with pace.collected_at_steps():
        assert not gc.isenabled()
    assert gc.isenabled() and all(each is not kept for each in gc.get_objects())
