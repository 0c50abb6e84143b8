"""Checksums of weights between steps."""

import re

import pytest
import torch
from torch import Tensor

from parallel.observe import weight_watch
from parallel.observe.weight_watch import INTEGERS, WeightWatch, bit_hash
from parallel.optimizer.distributed_optimizer import DisagreementError
from tests.update_cases import built


def test_weights_of_a_checkpoint_are_taken_as_they_are(world) -> None:
    """The weights also change before they are loaded."""
    model, update = built(world, "muon", "none", recorded=False)
    watch = WeightWatch(update.optimizer)
    watch.note()
    model.domains[0].parameters[0].add_(1)
    watch.compare()
    watch.forget()
    watch.check()


def test_a_change_before_an_earlier_step_is_still_found(world) -> None:
    """Steps between two checks record the changed weight again."""
    model, update = built(world, "muon", "none", recorded=False)
    watch = WeightWatch(update.optimizer)
    watch.note()
    model.domains[0].parameters[0][0] += 1
    for _ in range(2):
        watch.compare()
        watch.note()
    with pytest.raises(DisagreementError, match="weights were modified outside optimizer steps"):
        watch.check()


def test_a_hash_does_not_depend_on_the_number_of_elements_that_are_hashed_at_a_time(monkeypatch):
    values = [torch.randn(10).to(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    whole = [bit_hash(value) for value in values]
    monkeypatch.setattr(weight_watch, "HASHED", 4)
    assert [bit_hash(value) for value in values] == whole


def test_only_weights_in_the_chunk_of_a_flipped_bit_are_named(world, monkeypatch) -> None:
    monkeypatch.setattr(weight_watch, "CHUNK", 16)
    model, update = built(world, "muon", "none", recorded=False)
    flat = model.domains[0].parameters[0]
    bits = flat.view(INTEGERS[flat.element_size()])

    def place(weight: Tensor) -> range:
        first = (weight.data_ptr() - flat.data_ptr()) // flat.element_size()
        return range(first, first + weight.numel())

    places = {name: place(weight) for name, weight in model.parameters.items()}
    places = {name: own for name, own in places.items() if 0 <= own.start < flat.numel()}
    watch = WeightWatch(update.optimizer)
    for element in sorted({end for own in places.values() for end in (own[0], own[-1])}):
        watch.forget()
        watch.note()
        bits[element] ^= 1
        with pytest.raises(DisagreementError) as error:
            watch.check()
        start = element // 16 * 16
        near = {n for n, own in places.items() if own.start < start + 16 and start < own.stop}
        assert {*re.findall(r"parameter ([\w.]+)", str(error.value))} == near
