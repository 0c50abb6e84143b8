"""Bytes sent for activations, compared with values computed by hand, and the peak FLOP/s of
devices."""

from dataclasses import replace

import pytest

from models.config import ModelConfig
from models.families import all_units, declare_stage_units, model_size
from parallel.plan.activation_costs import activation_traffic
from parallel.plan.devices import ATTENTION, DEVICES, EXPLICIT_ATTENTION, peak_flops
from parallel.plan.planner import completed, plan_stage
from parallel.plan.step_shape import PlanInputs, StepShape
from parallel.plan.step_time import (
    OptimizerLoad,
    StageTime,
    attention_seconds,
    optimizer_parts,
    stage_time,
    step_time,
)
from spectral.rules import RULES
from tests.stepped_models import assign_to
from tests.tiny_families import MODELS, mixture

H100 = DEVICES["h100"]
LLAMA = ModelConfig(layers=4, hidden=256, heads=8, kv_heads=4, ffn=512, vocab_size=1024)


def shape(model=LLAMA, **inputs):
    """Return the shape of a step with four micro-batches per rank of two sequences of 128
    tokens."""
    return StepShape(
        model=model,
        inputs=PlanInputs(**inputs),
        device=H100,
        micro_batch=2,
        sequence_length=128,
        microbatches=4,
    )


def sent(step, stage=0):
    """Return the bytes sent, by kind."""
    return {each.kind: each.size for each in activation_traffic(step, stage)}


def test_bytes_of_each_axis_by_hand():
    assert sent(shape(data=1)) == {}
    tokens, width = 256, 256
    # Two blocks per layer: forward an all-gather and a reduce-scatter; backward both again, and the
    # gathered inputs once more. The embedding is scattered and gathered; the head's inputs are
    # gathered twice, and their gradients scattered.
    whole = 4 * 2 * 5 + 2 + 3
    tensor = sent(shape(data=1, tensor=2, sequence_parallel=True))
    assert tensor == {"tensor activations": 4 * whole * tokens * width * 2 // 2}
    # Without sequence parallelism, an all-reduce of each block's outputs forward and of its inputs'
    # gradients backward, of the embedding's outputs, and of the gradients of the head's inputs.
    for level, repeated in (("none", 0), ("selective", 1), ("full", 2)):
        reduced = sent(shape(data=1, tensor=2, recompute=level))["tensor activations"]
        assert reduced == 4 * 2 * (4 * (2 * 2 + repeated) + 2) * tokens * width * 2 // 2, level
    full = sent(shape(data=1, tensor=2, sequence_parallel=True, recompute="full"))
    extra = 4 * 4 * 2 * 2 * tokens * width * 2 // 2
    assert full["tensor activations"] - tensor["tensor activations"] == extra
    keys = 4 * (32 + 32)
    context = sent(shape(data=4, context=4))
    assert context == {"context keys and values": 4 * 4 * 2 * (tokens // 4) * keys * 2 * 3}
    ends = [sent(shape(data=1, pipeline=2), stage) for stage in (0, 1)]
    assert ends == [{"pipeline activations": 4 * tokens * width * 2}] * 2
    interleaved = sent(shape(data=1, pipeline=2, virtual_pipeline=2))
    assert interleaved == {"pipeline activations": 3 * 4 * tokens * width * 2}


MIXTURE = replace(mixture(experts=16), layers=8)
FACTORS: dict[str, dict[str, float]] = {
    "pipeline activations": {"context": 1 / 2, "tensor": 1, "sequence": 1 / 2, "full": 1},
    "tensor activations": {"context": 1 / 2},
    "context keys and values": {"tensor": 1 / 2, "sequence": 1 / 2, "full": 3 / 2},
    "expert dispatch": {"context": 1 / 2, "tensor": 1, "sequence": 1 / 2, "full": 3 / 2},
}
"""Factors by which other settings change the bytes of each kind."""
OWN = {"pipeline": 2, "tensor": 2, "context": 2, "expert": 4}
CHANGES: dict[str, dict[str, object]] = {
    "context": {"data": 4, "context": 2},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "full": {"recompute": "full"},
}


@pytest.mark.parametrize("kind", FACTORS)
def test_bytes_of_an_axis_change_with_the_tokens_and_heads_of_a_rank(kind):
    axis = kind.split()[0]
    inputs = {"data": 4, axis: OWN[axis]}
    before = sent(shape(MIXTURE, **inputs))[kind]
    for name, factor in FACTORS[kind].items():
        after = sent(shape(MIXTURE, **inputs | CHANGES[name]))
        assert after[kind] == pytest.approx(factor * before), name


LAYOUTS: list[dict[str, int]] = [
    {"data": 1, "pipeline": 2},
    {"data": 4, "pipeline": 2},
    {"data": 4, "pipeline": 4},
    {"data": 2, "pipeline": 8, "context": 2},
    {"data": 16, "pipeline": 2, "expert": 16},
    {"data": 8, "tensor": 2, "context": 8, "expert": 4},
]


def leaving(group, *, ring):
    """Return the share of pairs in a group whose ranks are on different nodes. With `ring`, only
    neighbours in a ring form pairs."""
    pairs = [(a, b) for a in group for b in group if a != b]
    if ring:
        pairs = [*zip(group, [*group[1:], group[0]], strict=True)]
    across = [a // H100.node_size != b // H100.node_size for a, b in pairs]
    return sum(across) / max(len(pairs), 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_activations_leave_a_node_where_two_ranks_are_on_different_ones(layout):
    """The expected share is counted over pairs of ranks: neighbours in a ring (also for stages), or
    all pairs in a group."""
    step, kinds = shape(MIXTURE, **layout), set()
    strides = {"context": step.inputs.tensor, "pipeline": step.inputs.stage_ranks}
    for traffic in activation_traffic(step, 0):
        stride = strides.get(traffic.kind.split()[0], 1)
        ranks = [i * stride for i in range(traffic.links.size)]
        ring = not traffic.kind.startswith("expert")
        assert traffic.across == pytest.approx(leaving(ranks, ring=ring)), traffic.kind
        kinds.add(traffic.kind.split()[0])
    assert kinds == {axis for axis in layout if layout[axis] > 1} - {"data"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_weights_and_gradients_leave_a_node_as_the_replicas_of_their_domain_do(layout):
    step = shape(MIXTURE, **layout)
    units = declare_stage_units(MIXTURE, step.chunks(0), step.inputs)
    planned = plan_stage(units, assign_to(RULES["muon"]()), step.inputs)
    stage, expert = range(step.inputs.stage_ranks), step.inputs.expert
    replicas = {"dense": stage[:: step.inputs.tensor], "experts": stage[::expert]}
    of_kind = {traffic.kind: traffic for traffic in completed(planned, step, 0).traffic}
    for kind, sizes in (("reduce-scatter", planned.reduced), ("all-gather", planned.gathered)):
        traffic = of_kind[kind]
        expected = sum(size * leaving(replicas[name], ring=True) for name, size in sizes.items())
        assert traffic.size == planned.sent[kind]
        assert traffic.size * traffic.across == pytest.approx(expected), kind
    for kind in of_kind.keys() & {"exchange in", "exchange out"}:
        assert of_kind[kind].across == pytest.approx(leaving(stage, ring=False)), kind


@pytest.mark.parametrize("name", MODELS)
def test_the_time_of_attention_is_that_of_its_flops(name):
    """Without windows, only the attention FLOPs of a token grow with the sequence length. The
    backward pass has twice as many FLOPs as the forward pass."""
    model = replace(MODELS[name], sliding_window=None)
    step = shape(model, data=1, tensor=2)
    share = EXPLICIT_ATTENTION if model.explicit_scores else ATTENTION
    seconds = sum(attention_seconds(step, layer) for layer in range(model.layers))
    long, short = (model_size(model, length).flops_per_token for length in (256, 128))
    flops = (long - short) * step.tokens / 2 / 3  # forward, on one of two ranks
    assert seconds * share * H100.peak[step.operands] == pytest.approx(flops)


PRODUCTS = replace(H100, copy_rate=1e30, launch_seconds=1e-30, efficiency=ATTENTION)
"""A device on which only FLOPs take time, and all float32 matmuls have the same efficiency."""
SHARED: list[dict[str, object]] = [
    {"data": 4, "pipeline": 2, "virtual_pipeline": 2, "context": 2, "expert": 4},
    {"data": 2, "tensor": 2, "sequence_parallel": True, "expert": 2, "expert_tensor": 2},
]


@pytest.mark.parametrize("layout", SHARED, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_the_time_of_computation_is_that_of_its_flops(name, layout):
    """The backward pass takes twice as long as the forward pass, and 2.5 times as long for
    attention. Recomputation repeats the feed-forward blocks without routed experts, all layers, or
    the head of a chunked loss."""
    without = {"sliding_window": None, "attention_softcap": None}  # masked scores are computed too
    model = replace(MODELS[name], layers=4, **without)

    def totals(**inputs):
        step = replace(shape(model, **layout | inputs), device=PRODUCTS, operands="fp32")
        stages = [stage_time(step, stage) for stage in range(step.inputs.pipeline)]
        # All ranks that share a micro-batch, per token of the sequence.
        factor = ATTENTION * H100.peak["fp32"] * step.inputs.tensor / step.tokens
        attention = sum(attention_seconds(step, layer) for layer in range(model.layers))
        passes = ((each.forward, each.backward, each.recompute) for each in stages)
        return [factor * attention, *(factor * sum(each) for each in zip(*passes, strict=True))]

    units = all_units(model)
    elements = {
        kind: sum(u.numel for u in units if u.is_matrix and u.role.removeprefix("shared_") in roles)
        for kind, roles in {
            "selective": ("gate", "up", "down"),
            "head": ("embedding" if model.tie_embeddings else "head",),
        }.items()
    }
    attention, forward, backward, none = totals()
    assert forward == pytest.approx(model_size(model, 128).flops_per_token / 3)
    assert backward == pytest.approx(2 * (forward - attention) + 2.5 * attention)
    again = {level: totals(recompute=level)[-1] for level in ("selective", "full")}
    assert none == 0 and again["selective"] == pytest.approx(2 * elements["selective"])
    assert again["full"] == pytest.approx(forward - 2 * elements["head"])
    assert totals(loss_chunk=64)[-1] == pytest.approx(2 * elements["head"])


@pytest.mark.parametrize("pipeline", [2, 4])
def test_virtual_stages_divide_the_bubble(pipeline):
    """The bubble is (p - 1) / (m v) of the step, as in arXiv:2104.04473, section 2.2, because this
    model's head is small compared with its stages, and communication is short compared with
    computation."""
    model = replace(LLAMA, layers=8 * pipeline, hidden=4096, heads=32, kv_heads=32, ffn=16384)
    idle = OptimizerLoad(0.0, 0, {}, {}, 0.0)
    for virtual in (1, 2, 4):
        step = shape(model, data=1, pipeline=pipeline, virtual_pipeline=virtual)
        time = step_time(step, [idle] * pipeline)
        computing = time.forward + time.backward + time.recompute
        expected = (pipeline - 1) / (step.microbatches * virtual)
        assert time.bubble / computing == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("groups", "overlap"), [(1, True), (4, True), (4, False)])
def test_gradients_hide_behind_backward_weights_behind_forward_unless_the_overlap_is_off(
    groups, overlap
):
    """Every exchange waits."""
    size, passes = 1e10, StageTime(forward=1e-3, backward=3e-3, recompute=0.0, sending={})
    load = OptimizerLoad(0.0, 0.0, {"dense": size}, {"dense": size}, size)
    options = {"step_groups": groups, "overlap_reduce": overlap, "overlap_gather": overlap}
    gradients, weights, exchange, _ = optimizer_parts(shape(data=4, **options), passes, load)
    sending = size / H100.node_rate
    assert gradients == pytest.approx(sending + H100.latency_seconds - passes.backward * overlap)
    assert weights == pytest.approx(sending + H100.latency_seconds - passes.forward * overlap)
    assert exchange == pytest.approx(sending + 2 * groups * H100.latency_seconds)


@pytest.mark.parametrize(
    ("device", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA GB200", None),
        ("NVIDIA H20", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peak_flops_of_the_devices_that_cuda_names(device, flops):
    assert peak_flops(device) == flops
