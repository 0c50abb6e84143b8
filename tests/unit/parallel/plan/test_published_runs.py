"""Plans are as far from published runs as docs/planning.md says."""

import pytest

from models.config import ModelConfig
from parallel.plan.devices import DEVICES, GIB
from parallel.plan.lower_bound import least_seconds
from parallel.plan.step_shape import PlanInputs, StepShape
from tests.paths import ROOT
from training.config import load_config
from training.dry_run import plan_run

LLAMA = {"vocab_size": 128256, "kv_heads": 8}
MT_NLG = {"device": "a100", "tensor": 8, "pipeline": 35, "recompute": "full"}
FP8 = {"device": "h100", "operands": "fp8", "pipeline": 8}
MODELS = {
    # Any activation without a gate takes as long.
    "MT-NLG 530B": ModelConfig(
        family="gpt", activation="relu2", layers=105, hidden=20480, heads=128, ffn=81920,
        vocab_size=50272,
    ),
    "Llama 3 70B": ModelConfig(layers=80, hidden=8192, heads=64, ffn=28672, **LLAMA),
    # 126 layers in the original, which no layout of equal stages divides.
    "Llama 3.1 405B": ModelConfig(layers=128, hidden=16384, heads=128, ffn=53248, **LLAMA),
}  # fmt: skip
RUNS = [
    # DeepSpeed and Megatron of 2021, which a plan of today is faster than.
    ("MT-NLG 530B", 2240, 1920, 2048, 60.1, MT_NLG, -0.20),
    ("MT-NLG 530B", 2800, 1920, 2048, 50.2, MT_NLG, -0.21),
    ("MT-NLG 530B", 3360, 1920, 2048, 44.4, MT_NLG, -0.23),
    (
        "Llama 3 70B", 64, 128, 8192, 128 * 8192 / 64 / 1602,
        FP8 | {"tensor": 4, "virtual": 5}, 0.02,
    ),
    (
        "Llama 3.1 405B", 1024, 512, 8192, 512 * 8192 / 1024 / 292,
        FP8 | {"tensor": 8, "virtual": 8, "context": 2}, 0.06,
    ),
]  # fmt: skip
"""Model, GPUs, sequences per step, their length, published seconds per step, layout, error."""


def modelled(model, gpus, batch, length, layout):
    """Seconds of a step without the rules, which for AdamW are next to nothing."""
    tensor, pipeline = layout["tensor"], layout["pipeline"]
    context = layout.get("context", 1)
    copies = gpus // (tensor * pipeline * context)
    inputs = PlanInputs(
        data=copies * context,
        tensor=tensor,
        pipeline=pipeline,
        virtual_pipeline=layout.get("virtual", 1),
        context=context,
        sequence_parallel=True,
        recompute=layout.get("recompute", "none"),
        compiled=True,  # their kernels are fused
    )
    shape = StepShape(
        model=model,
        inputs=inputs,
        device=DEVICES[layout["device"]],
        micro_batch=1,
        sequence_length=length,
        microbatches=batch // copies,
        operands=layout.get("operands", "bf16"),
    )
    return least_seconds(shape, 0.0)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run[0]} {run[1]}")
def test_a_published_step_is_planned_with_the_known_error(run):
    name, gpus, batch, length, seconds, layout, error = run
    found = modelled(MODELS[name], gpus, batch, length, layout)
    assert found / seconds - 1 == pytest.approx(error, abs=0.01)


@pytest.mark.parametrize(("rule", "gib"), [("adamw", 65.90), ("muon", 64.08)])
def test_a_published_peak_of_memory_is_planned_within_some_percent(rule, gib):
    as_published = ["monitors.interval=0", "train.compile=null"]
    config = load_config(ROOT / "configs" / f"llama1b_{rule}.yaml", as_published)
    assert plan_run(config, 8).memory.total / GIB == pytest.approx(gib, rel=0.05)
