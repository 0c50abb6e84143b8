"""All ranks of small worlds, or of one pipeline, succeed, and their collectives match."""

import pytest

from tests.rehearsal import mutants
from tests.rehearsal.programs import H100, MONITORED, BrokenJob, check_rank, program, sound
from tests.slow_cases import slow_but
from training.rehearsal.matching import mismatches
from training.rehearsal.rank import Job

SHALLOW = {"model__layers": 1}
DEEP = {"model__layers": 4}
MIXED = {"model__layers": 4, "model__moe__dense_layers": 2}
ONE_BATCH = {"train__global_batch": 1}
LAYOUTS = {
    # Of more layers: the slow layouts of tensor parallelism.
    "tensor 2, data 2": (
        4,
        "llama",
        {**SHALLOW, "parallel__tensor": 2, "train__global_batch": 2},
    ),
    "pipeline 2, virtual 2": (
        4,
        "llama",
        {**DEEP, "parallel__pipeline": 2, "parallel__virtual_pipeline": 2},
    ),
    # The flash kernel does not support latent attention, whose heads have two sizes.
    "context 2": (2, "deepseek", {"parallel__context": 2, **ONE_BATCH}),
}
PIPELINES = {"pipeline 2, virtual 2": (1, 3)}
"""Ranks of one pipeline, for layouts of which only one pipeline is rehearsed. The ranks differ from
the stage numbers."""
LARGER = {
    "expert 2": (2, "moe", {"parallel__expert": 2, "train__global_batch": 2}),
    "context 2, float32": (
        2,
        "qwen3",
        {"parallel__context": 2, "train__precision": "fp32", **ONE_BATCH},
    ),
    "pipeline 3, virtual 2": (
        3,
        "llama",
        {
            "model__layers": 6,
            "parallel__pipeline": 3,
            "parallel__virtual_pipeline": 2,
            "train__global_batch": 6,
        },
    ),
    "tensor 2, pipeline 2": (8, "llama", {**DEEP, "parallel__tensor": 2, "parallel__pipeline": 2}),
    "tensor 2, context 2": (8, "qwen3", {"parallel__tensor": 2, "parallel__context": 2}),
    "tensor 2, expert 2": (8, "moe", {"parallel__tensor": 2, "parallel__expert": 2}),
    "expert 2, expert tensor 2": (
        8,
        "moe",
        {"parallel__expert": 2, "parallel__expert_tensor": 2, "train__global_batch": 8},
    ),
    "pipeline 2, expert 2": (
        8,
        "deepseek",
        {**MIXED, "parallel__pipeline": 2, "parallel__expert": 2},
    ),
}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, [*LAYOUTS, *LARGER]))
def test_all_ranks_ask_for_the_same_collectives(layout, perform, tmp_path):
    """On a cluster, a collective that only some ranks of a group call would hang. A rehearsal finds
    a collective that one rank leaves out."""
    world, family, changes = (LAYOUTS | LARGER)[layout]
    config = program(tmp_path, world, family, **MONITORED, **changes)
    ranks = PIPELINES.get(layout, range(world))
    reports = perform([Job(config, world, rank, H100) for rank in ranks])
    for report in reports:
        check_rank(report)
    calls = {report.rank: report.calls for report in reports}
    assert mismatches(calls) == []
    first = reports[0].calls
    shared = [i for i, call in enumerate(first) if {reports[0].rank} < {*call.group} <= {*calls}]
    assert shared
    for i in shared[::97]:
        assert mismatches({**calls, reports[0].rank: first[:i] + first[i + 1 :]})
    kinds = {call.kind for report in reports for call in report.calls if call.on_device}
    assert {"reduce_scatter", "all_gather"} <= kinds or world < 4


@pytest.mark.slow
def test_a_rank_that_leaves_a_collective_out_is_found(perform, tmp_path):
    config = program(tmp_path, 2, **SHALLOW, train__global_batch=2)
    jobs = [
        Job(config, 2, 0, H100),
        BrokenJob(config, 2, 1, H100, before=mutants.norm_of_this_rank_alone),
    ]
    one, other = perform(jobs)
    (found, *_) = mismatches({0: one.calls, 1: other.calls})
    assert "on rank 0" in found and "on rank 1" in found


@pytest.mark.parametrize("world", [64, pytest.param(1024, marks=pytest.mark.slow)])
def test_large_worlds_are_rehearsed_by_one_rank(world, perform, tmp_path):
    config = program(tmp_path, world, parallel__tensor=2, train__global_batch=world)
    report = sound(perform, config, world, world - 1)
    assert max(len(call.group) for call in report.calls) == world
