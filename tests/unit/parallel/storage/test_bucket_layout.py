"""Bucket layouts contain every element once, split only where this is allowed, and locate every
unit."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.blocks.in_graph_pc import with_gammas
from models.config import ModelConfig
from models.families import all_units
from models.pc_config import PCConfig
from parallel.storage.bucket_layout import STEP_ELEMENTS, BucketPlanner, default_step_groups


@st.composite
def models(draw):
    """Draw the units of a small random Llama on one tensor-parallel rank."""
    tensor_size = draw(st.sampled_from([1, 1, 2, 4]))
    kv_heads = tensor_size * draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 3))
    model = ModelConfig(
        layers=draw(st.integers(1, 5)),
        hidden=draw(st.integers(2, 12)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 5)),
        ffn=tensor_size * draw(st.integers(1, 9)),
        vocab_size=draw(st.integers(1, 30)),
        vocab_multiple=tensor_size,
    )
    return all_units(
        model,
        qkv_units=draw(st.sampled_from(["head", "group", "component", "fused"])),
        split_gate_up=draw(st.booleans()),
        tensor_rank=draw(st.integers(0, tensor_size - 1)),
        tensor_size=tensor_size,
    )


@st.composite
def bucket_layouts(draw):
    """Draw `(units, bucket_layout)` for random models and alignments."""
    units = draw(models())
    alignment = draw(st.sampled_from([1, 8, 64]))
    bucket_layout = BucketPlanner(ranks=draw(st.integers(1, 9)), alignment=alignment).layout(units)
    return units, bucket_layout


def buffers(bucket_layout):
    """Return each bucket as a tensor of distinct elements."""
    starts, total = [], 0
    for bucket in bucket_layout.buckets:
        starts.append(total)
        total += bucket.numel
    flat = torch.arange(total)
    return [flat[s : s + b.numel] for s, b in zip(starts, bucket_layout.buckets, strict=True)]


def gather(bucket_layout, flat, spans, size):
    """Return the flattened piece of a unit, with -1 outside `spans`."""
    piece = torch.full((size,), -1)
    for span in spans:
        part = flat[span.bucket][span.start : span.start + span.length]
        piece[span.piece_start : span.piece_start + span.length] = part
    return piece


@given(bucket_layouts())
def test_every_element_lies_in_one_place(case):
    units, bucket_layout = case
    claimed = [torch.zeros(bucket.numel, dtype=torch.int) for bucket in bucket_layout.buckets]
    for bucket in bucket_layout.buckets:
        assert bucket.numel % bucket_layout.ranks == 0
        offsets = [slot.offset for slot in bucket.slots]
        assert offsets == sorted(offsets)
        for slot in bucket.slots:
            assert slot.offset + slot.numel <= bucket.numel
            claimed[bucket.index][slot.offset : slot.offset + slot.numel] += 1
    assert all(int(count.max()) <= 1 for count in claimed)
    assert sum(int(count.sum()) for count in claimed) == bucket_layout.numel - bucket_layout.padding
    sizes = {unit.parameter: prod(unit.view_shape) for unit in units}
    assert {name: slot.numel for name, (_, slot) in bucket_layout.slots.items()} == sizes
    # The units cover their parameters.
    for unit in units:
        for span in bucket_layout.spans(unit):
            claimed[span.bucket][span.start : span.start + span.length] += 1
    assert sum(int((count == 2).sum()) for count in claimed) == sum(sizes.values())


@given(models(), st.sampled_from([2, 4]), st.sets(st.sampled_from(["q", "k", "v", "gate", "o"])))
def test_owners_step_buckets_of_pc_layers_alone(units, size, roles):
    """If a parameter contains both kinds of units, its bucket is updated from shards."""
    planner = BucketPlanner(parameter_bytes=size, preconditioned=lambda unit: unit.role in roles)
    for bucket in planner.layout(units).buckets:
        names = {slot.parameter for slot in bucket.slots}
        others = {unit.parameter for unit in units if unit.role not in roles}
        assert names <= others or not names & others or size == 4
        assert bucket.stepped_by_owners == (size == 2 and not names & others)


@given(bucket_layouts())
def test_spans_are_the_unit_as_its_view_orders_it(case):
    units, bucket_layout = case
    flat = buffers(bucket_layout)
    for unit in units:
        bucket, slot = bucket_layout.slots[unit.parameter]
        parameter = flat[bucket.index][slot.offset : slot.offset + slot.numel]
        expected = unit.view(parameter).flatten()
        found = gather(bucket_layout, flat, bucket_layout.spans(unit), len(expected))
        assert torch.equal(found, expected)
        pieces = [
            gather(bucket_layout, flat, bucket_layout.shard_spans(unit, rank), len(expected))
            for rank in range(bucket_layout.ranks)
        ]
        elements = {rank: int((p >= 0).sum()) for rank, p in enumerate(pieces) if (p >= 0).any()}
        assert bucket_layout.holders(unit) == elements
        assert torch.equal(torch.stack(pieces).max(0).values, expected)
        for rank, piece in enumerate(pieces):
            shard = bucket_layout.shard_numel(bucket.index)
            mine = flat[bucket.index][rank * shard : (rank + 1) * shard]
            assert torch.isin(piece[piece >= 0], mine).all()


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_small_parameters_leave_matrices_aligned(ranks):
    """The gammas of in-graph PC layers, one number per unit, must not move later parameters off
    16-byte boundaries. Kernels that read eight 16-bit numbers at a time would reject such
    parameters or read single numbers."""
    shape = {"hidden": 64, "heads": 3, "kv_heads": 3, "head_dim": 16, "ffn": 96, "vocab_size": 80}
    model = ModelConfig(layers=3, **shape)
    every = ["q", "k", "v", "o", "gate", "up", "down"]
    units = with_gammas(all_units(model), PCConfig(level=4, evaluator="in_graph", blocks=every))
    bucket_layout = BucketPlanner(ranks=ranks).layout(units)
    odd = [slot for slot, _ in sizes(bucket_layout) if slot.numel % 8]
    assert odd, "the case has gammas"
    for slot, shard in sizes(bucket_layout):
        if slot.numel % 8 == 0:
            assert slot.offset % 8 == 0 and shard % 8 == 0, slot


def sizes(bucket_layout):
    """Return every slot with the number of elements in a shard of its bucket."""
    return [
        (slot, bucket_layout.shard_numel(bucket.index))
        for bucket in bucket_layout.buckets
        for slot in bucket.slots
    ]


@given(bucket_layouts(), st.one_of(st.none(), st.integers(1, 9)))
def test_step_groups_hold_every_bucket_once_in_forward_order(found, count):
    _, bucket_layout = found
    groups = bucket_layout.step_groups(count)
    buckets = [bucket for group in groups for bucket in group]
    assert buckets == list(range(len(bucket_layout.buckets)))[::-1]
    assert all(groups) and len(groups) <= (count or 1)


@pytest.mark.parametrize(
    ("elements", "groups"),
    [(0, 1), (STEP_ELEMENTS, 1), (STEP_ELEMENTS + 1, 2), (4 * STEP_ELEMENTS, 4), (1 << 40, 4)],
)
def test_more_elements_take_more_step_groups_up_to_four(elements, groups):
    assert default_step_groups(elements) == groups
