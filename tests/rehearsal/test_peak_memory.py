"""The memory and the communication in a plan, compared with a rehearsal of the run."""

from collections import Counter
from typing import Any

import pytest

from tests.rehearsal.programs import H100, program
from training.config import Config
from training.dry_run import plan_run
from training.rehearsal.rank import PLAIN_STEP, Job, RankReport
from training.rehearsal.trace import Call

# Large enough that the parts without a plan (a number per row or head) are small.
SHAPE = {
    "model__layers": 4,
    "model__hidden": 512,
    "model__heads": 8,
    "model__kv_heads": 8,
    "model__head_dim": 64,
    "model__ffn": 1408,
    "model__vocab_size": 8192,
    "train__micro_batch": 2,
    "train__sequence_length": 2048,
    "checkpoint__interval": 0,
    "validation__samples": 8,
}
MIXTURE = {
    "model__moe__experts": 8,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 512,
    "model__moe__shared_experts": 1,
    "model__moe__dense_layers": 2,
}
LATENT = {
    "model__kv_heads": "null",
    "model__head_dim": "null",
    "model__latent__query_rank": 192,
    "model__latent__kv_rank": 128,
    "model__latent__nope_head_dim": 64,
    "model__latent__rope_head_dim": 32,
    "model__latent__value_head_dim": 64,
}
CAPPED = {
    "model__activation": "geglu",
    "model__query_pre_attn_scalar": 64,
    "model__attention_softcap": 50.0,
    "model__final_softcap": 30.0,
    "model__sliding_window": 512,
}
FAMILIES = {
    "llama": {}, "qwen3": {}, "gpt": {"model__activation": "relu2"}, "gemma2": CAPPED,
    "moe": MIXTURE, "deepseek": MIXTURE | LATENT,
}  # fmt: skip
AXES = {
    "data": (2, {}),
    "tensor": (4, {"parallel__tensor": 2}),
    "pipeline": (4, {"parallel__pipeline": 2}),
    "context": (4, {"parallel__context": 2}),
    "expert": (4, {"parallel__expert": 2}),
    "bf16 gradients": (2, {"optimizer__distributed__gradient_dtype": "bf16"}),
}
ONLY = {"expert": ("moe", "deepseek"), "bf16 gradients": ("llama",)}
"""Families in which an axis is tested, if not in all."""
QUICK = {("llama", "pipeline"), ("llama", "bf16 gradients")}
"""Cases that are not marked as slow. The other cases run the same code."""
OFF = {
    ("gpt", "pipeline"): "the plan of its first stage is 6% below the peak",
    ("gemma2", "pipeline"): "the plan of its first stage is 20% above the peak",
}


def case(family: str, axis: str) -> Any:
    """Return the pytest parameters of a case, with its marks."""
    marks = [] if (family, axis) in QUICK else [pytest.mark.slow]
    if (family, axis) in OFF:
        marks.append(pytest.mark.xfail(reason=OFF[family, axis], strict=True))
    return pytest.param(family, axis, marks=marks)


CASES = [
    case(family, axis) for family in FAMILIES for axis in AXES if family in ONLY.get(axis, FAMILIES)
]


def planned_kinds(config: Config, world: int, stage: int) -> Counter[str]:
    """Return the planned bytes sent by a rank, by kind."""
    found: Counter[str] = Counter()
    for each in plan_run(config, world).stages[stage].traffic:
        kind = "experts" if each.kind.startswith("expert ") else each.kind
        found[kind] += int(each.size)
    return found


def kind_of(call: Call, axis: str) -> str | None:
    """Return the planner's name for the kind of a collective in a plain step, or None if it is not
    planned."""
    inside = call.place.startswith("megatron/")
    if call.kind == "send":
        return "pipeline activations"
    if call.kind == "all_to_all":
        return "experts" if call.phase == "forward_backward" else None
    if inside and call.kind in ("all_gather", "reduce_scatter", "all_reduce"):
        return {"context": "context keys and values"}.get(axis, "tensor activations")
    return {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather"}.get(call.kind)


def counted_kinds(report: RankReport, axis: str) -> Counter[str]:
    """Return the bytes that a rank sends in a plain step, by kind as in the planner."""
    found: Counter[str] = Counter()
    for call in report.calls:
        if call.step == PLAIN_STEP and call.on_device and len(call.group) > 1 and call.size:
            kind = kind_of(call, axis)
            if kind is not None:
                found[kind] += call.size
    return found


def peak(report: RankReport) -> float:
    """Return a rank's peak memory in the parts of a step that are planned."""
    assert report.error is None, report.error
    parts = ("forward_backward", "optimizer")
    return max(c.peak_memory_bytes for (_, name), c in report.counts.items() if name in parts)


@pytest.mark.parametrize(("family", "axis"), CASES)
def test_planned_memory_and_bytes_are_those_of_a_rehearsal(family, axis, perform, tmp_path):
    world, changes = AXES[axis]
    copies = 2 if axis != "expert" else 4
    values = SHAPE | FAMILIES[family] | changes | {"train__global_batch": 4 * copies}
    config = program(tmp_path, world, family, **values)
    # The first rank of every stage.
    ranks = [0, world // 2] if axis == "pipeline" else [0]
    reports = perform([Job(config, world, rank, H100) for rank in ranks])
    planned = plan_run(config, world)
    for stage, report in enumerate(reports):
        assert planned.stages[stage].memory.total == pytest.approx(peak(report), rel=0.05), stage
        counted, foretold = counted_kinds(report, axis), planned_kinds(config, world, stage)
        assert {"reduce-scatter", "all-gather"} <= counted.keys()
        for kind, size in counted.items():
            assert foretold[kind] == pytest.approx(size, rel=0.01), (stage, kind)


LARGE_BATCH = {"train__micro_batch": 4, "train__global_batch": 16}
GROUPED = {"model__kv_heads": 2, "train__global_batch": 8}
GATED = MIXTURE | GROUPED | {"model__moe__shared_gate": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "family", "rule", "changes", "tolerance"),
    [
        (2, "llama", "adamw", LARGE_BATCH, 0.05),
        (2, "llama", "muon", LARGE_BATCH, 0.05),
        # Memory saved by norms of grouped queries and by gates: 6% for an 8B mixture.
        (1, "qwen3", "adamw", GROUPED, 0.02),
        (1, "moe", "adamw", GATED, 0.02),
    ],
)
def test_planned_memory_is_that_of_every_rule_and_option(
    world, family, rule, changes, tolerance, perform, tmp_path
):
    config = program(tmp_path, world, family, rule, **SHAPE | changes)
    (report,) = perform([Job(config, world, 0, H100)])
    assert plan_run(config, world).memory.total == pytest.approx(peak(report), rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["muon", "muon_sphere", "spectral_sphere", "muon_plus_plus"])
def test_buffers_of_the_step_are_those_of_the_plan(rule, perform, tmp_path):
    """Compare the temporary memory of the optimizer step."""
    config = program(tmp_path, 2, "llama", rule, **SHAPE | {"train__global_batch": 8})
    (report,) = perform([Job(config, 2, 0, H100)])
    assert report.error is None, report.error
    memory = plan_run(config, 2).memory
    permanent = memory.weights + memory.gradients + memory.master + memory.state
    step = report.counts[PLAIN_STEP, "optimizer"].peak_memory_bytes - permanent
    # SSO has six copies, without its Gram matrices, which are not planned; Muon has three or four.
    assert 0.4 * memory.buffers < step < 1.1 * memory.buffers
