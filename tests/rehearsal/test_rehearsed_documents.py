"""Launches of document-masked attention on simulated GPUs, and their cost."""

from pathlib import Path

import pytest
import torch

from models.blocks.attention import documents_of
from parallel.plan.devices import DEVICES
from tests.rehearsal.programs import H100, Perform, called, program, sound
from training.config import Config
from training.dry_run import attended_length, plan_run
from training.rehearsal.rank import PLAIN_STEP, Job

MASKED = {"data__document_mask": True, "data__first_token_loss": False, "data__mock": True}
LONG = {"train__sequence_length": 8192, "model__head_dim": 64, "train__micro_batch": 2}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {"parallel__context": 2}),
        pytest.param("deepseek", {"parallel__tensor": 2}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"parallel__pipeline": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_run_would_not_break(family, layout, perform, tmp_path) -> None:
    """The run would succeed, and the host does not wait for the device."""
    config = program(tmp_path, 2, family, **MASKED, **layout, data__workers=0)
    sound(perform, config, 2, 1)


def step_flops(perform: Perform, config: Config) -> float:
    """Return the FLOPs of the forward and backward passes in a plain step."""
    (report,) = perform([Job(config, 1, 0, H100)])
    assert report.error is None, report.error
    return report.counts[PLAIN_STEP, "forward_backward"].flops


@pytest.mark.slow
def test_flops_fall_as_the_plan_says(perform: Perform, tmp_path: Path) -> None:
    """The FLOPs of attention to masked keys are not counted. A few samples deviate from the mean
    attended length in the plan."""
    mock = {"data__mock": True}
    crossed = program(tmp_path, 1, **LONG, **mock)
    masked = program(tmp_path, 1, **LONG, **mock | MASKED)
    kept = attended_length(masked)
    assert 1_400 < kept < 1_700
    both = [step_flops(perform, config) for config in (crossed, masked)]
    train, model = crossed.train, crossed.model
    tokens = train.global_batch * train.sequence_length
    width = model.layers * model.heads * 2 * model.head_size
    # Two products forward and five backward; plans and MFU count four.
    hidden = 7 * tokens * width * (train.sequence_length - kept) / 2
    assert both[0] - both[1] == pytest.approx(hidden, rel=0.05)


def attend_to_documents() -> None:
    """Run the forward and backward kernels on documents of known lengths."""
    from models.blocks.attention import causal_attention

    firsts = torch.tensor([[0] * 100 + [100] * 28])
    documents = documents_of(firsts, lambda x: x.pin_memory().to("cuda", non_blocking=True))
    options = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    query, key = torch.empty(128, 1, 4, 64, **options), torch.empty(128, 1, 2, 64, **options)
    causal_attention(query, key, key, 0.125, documents.parts[0]).sum().backward()


def test_flops_are_those_of_the_documents(perform: Perform) -> None:
    report = called(perform, attend_to_documents)
    flops = sum(counts.flops for counts in report.counts.values())
    assert flops == 0.5 * 7 * 2 * 4 * 64 * (100**2 + 28**2)


def test_a_plan_takes_less_time(tmp_path: Path) -> None:
    mock = {"data__mock": True}
    for name in ("h100", "a100"):
        plans = [
            plan_run(program(tmp_path, 1, **LONG, **mock | keys), 1, DEVICES[name])
            for keys in ({}, MASKED)
        ]
        assert plans[1].time.total < plans[0].time.total
        assert plans[1].model_flops < plans[0].model_flops
