"""Plans differ from published runs by the amounts given in docs/planning.md."""

from typing import Any

import pytest

from models.config import ModelConfig
from parallel.plan.devices import DEVICES, GIB
from parallel.plan.step_shape import PlanInputs, StepShape
from tests.paths import ROOT
from training.config import load_config
from training.dry_run import plan_run
from training.planning.layout_search import least_seconds

LLAMA: dict[str, Any] = {"vocab_size": 128256, "kv_heads": 8}
RUNS: dict[str, tuple[ModelConfig, dict[str, Any], str, int, dict[str, Any]]] = {
    "MT-NLG 530B": (
        # All activations without a gate take equally long.
        ModelConfig(
            family="gpt", activation="relu2", layers=105, hidden=20480, heads=128, ffn=81920,
            vocab_size=50272,
        ),
        {"data": 8, "tensor": 8, "pipeline": 35, "recompute": "full"}, "a100", 1920,
        {"sequence_length": 2048, "operands": "bf16"},
    ),
    "Llama 3 70B": (
        ModelConfig(layers=80, hidden=8192, heads=64, ffn=28672, **LLAMA),
        {"data": 2, "tensor": 4, "pipeline": 8, "virtual_pipeline": 5}, "h100", 128,
        {"sequence_length": 8192, "operands": "fp8"},
    ),
    "Llama 3.1 405B": (
        # The original has 126 layers, which equal stages cannot divide.
        ModelConfig(layers=128, hidden=16384, heads=128, ffn=53248, **LLAMA),
        {"data": 16, "tensor": 8, "pipeline": 8, "virtual_pipeline": 8, "context": 2}, "h100", 512,
        {"sequence_length": 8192, "operands": "fp8"},
    ),
}  # fmt: skip
"""Model, layout, device, sequences per step, and other inputs of a plan."""
PAGE = (ROOT / "docs" / "planning.md").read_text()


def row_of(name: str) -> tuple[float, float]:
    """Return the published and the planned figure for a run, as given on the page."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {name} |"))
    published, planned = (float(cell.split()[0]) for cell in row.split("|")[4:6])
    assert f"{planned / published - 1:+.0%}" == row.split("|")[6].strip()
    return published, planned


@pytest.mark.parametrize("name", RUNS)
def test_a_published_step_is_planned_as_the_page_says(name: str) -> None:
    model, layout, device, batch, rest = RUNS[name]
    inputs = PlanInputs(sequence_parallel=True, compiled=True, **layout)
    copies = inputs.data // inputs.context
    shape = StepShape(
        model=model, inputs=inputs, device=DEVICES[device], micro_batch=1,
        microbatches=batch // copies, **rest,
    )  # fmt: skip
    # Without rules, which cost almost nothing for AdamW.
    assert least_seconds(shape, 0.0) == pytest.approx(row_of(name)[1], rel=0.01)


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_published_peak_of_memory_is_planned_as_the_page_says(rule: str) -> None:
    as_published = ["monitors.interval=0", "train.compile=null", "train.fused_backward=null"]
    config = load_config(ROOT / "configs" / f"llama1b_{rule}.yaml", as_published)
    planned = row_of(f"Llama 1B, {rule}")[1]
    assert plan_run(config, 8).memory.total / GIB == pytest.approx(planned, abs=0.1)
