"""The memory that the planner foretells, against what a rehearsal of the run has at its peak."""

import pytest

from tests.rehearsal.programs import H100, program
from training.dry_run import plan_run
from training.rehearsal.job import Job

# Large enough that what the planner leaves out (a number per row or head) is small.
SHAPE = {
    "model__layers": 4,
    "model__hidden": 512,
    "model__heads": 8,
    "model__kv_heads": 8,
    "model__head_dim": 64,
    "model__ffn": 1408,
    "model__vocab_size": 8192,
    "train__micro_batch": 4,
    "train__sequence_length": 2048,
    "monitors__interval": 0,
}


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_planned_memory_is_what_a_rehearsal_takes(rule, processes, tmp_path):
    config = program(tmp_path, 2, rule=rule, **SHAPE)
    (report,) = processes.perform([Job(config, 2, 0, H100)])
    assert report.error is None, report.error
    parts = ("forward_backward", "optimizer")
    peak = max(c.peak_memory_bytes for (_, name), c in report.counts.items() if name in parts)
    assert plan_run(config, 2).memory.total == pytest.approx(peak, rel=0.05)
