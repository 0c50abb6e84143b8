"""What may change when a run continues is said, and what changes numbers is refused."""

from pathlib import Path
from typing import Any

import pytest

from tests.export_cases import MOE
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.checkpoint.files import ResumeError
from training.run import train


@pytest.fixture
def run(folder: str, tmp_path: Path, world):
    """Trains in tmp_path/run to a step; keywords are config keys with __ for the dot."""
    write_token_set(tmp_path / "more", tokens=4_000, vocab=120, seed=1)

    def start(step: int, **keys: Any) -> None:
        common = {"train__steps": 8, "train__exit_step": step, "checkpoint__interval": 100}
        train(tiny_config(folder, "muon", **common, **keys), world)

    return start


def test_a_dtype_that_changes_numbers_is_refused(run) -> None:
    run(2)
    for key in ("gradient_dtype", "exchange_dtype", "momentum_dtype"):
        with pytest.raises(ResumeError, match=rf"its optimizer: {key} was \w+, is bf16"):
            run(4, **{f"optimizer__distributed__{key}": "bf16"})


def test_other_changes_are_said(run, tmp_path, capsys) -> None:
    run(2)
    keys = {
        "spikes__deviations": 4,
        "validation__samples": 3,
        "data__validation__more__path": tmp_path / "more",
        "train__global_batch": 4,
        "checkpoint__allow_change": "[train]",
    }
    run(4, **keys)
    printed, events = capsys.readouterr().out, (tmp_path / "run" / "events.jsonl").read_text()
    for text in (
        "spikes.deviations was None, is 4.0",
        "validation.samples was 5, is 3",
        "validation.more was absent, is there",
        "global_batch was 8, is 4",
    ):
        assert f"changed since step 2: {text}" in printed and text in events
    run(6, **keys)
    assert "changed since" not in capsys.readouterr().out


def test_a_loss_over_micro_batches_makes_their_size_a_change(run, capsys) -> None:
    keys = {**MOE, "model__moe__global_aux_loss": 0.01}
    run(2, **keys)
    run(3, **keys, train__micro_batch=4)
    assert "changed since step 2: train.micro_batch was 2, is 4" in capsys.readouterr().out
