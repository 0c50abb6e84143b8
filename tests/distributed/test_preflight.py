"""scripts/preflight.py finds the rank with wrong results and the slow rank."""

import json
import re
import sys

import pytest
import torch

from scripts import preflight
from tests.commands import output_of, torchrun
from tests.launch import run_on_ranks
from tests.slow_cases import slow_but
from training.errors import InputError
from training.machine.device import Gpus


@pytest.mark.parametrize("start", slow_but(["forks"], ["forks", "torchrun"]))
def test_every_check_of_sound_ranks_is_right(start, root, tmp_path) -> None:
    target = tmp_path / "checks.json"
    options = ["--mebibytes", "1", "--json", str(target)]
    if start == "forks":
        assert run_on_ranks(3, "scripts.preflight", "main", {"arguments": options}) == [0] * 3
    else:
        command = sys.executable, *torchrun(3), "scripts/preflight.py", *options
        assert "all results are correct" in output_of(*command, folder=root)
    rows = json.loads(target.read_text())["checks"]
    names = [re.sub(r",.*", "", row["name"]) for row in rows]
    assert names == [
        "matmul", "memory", "link", "link", "all-reduce", "reduce-scatter", "all-gather",
        "all-to-all",
    ]  # fmt: skip
    assert all(0 < row["slowest"] <= row["median"] and not row["wrong"] for row in rows)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 processes"),
        ({"RANK": "first"}, "RANK must be a non-negative integer, got 'first'"),
        ({}, "this machine has NVIDIA devices .* does not start: no driver; to check only CPUs"),
    ],
)
def test_a_check_that_would_leave_ranks_or_gpus_out_is_refused(variables, message, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    broken = Gpus("13.0", ("/dev/nvidia0",), "no driver", 0)
    monkeypatch.setattr("training.machine.device.gpus_here", lambda: broken)
    with pytest.raises(InputError, match=message):
        preflight.start()


def test_gpus_without_a_rank_are_named(monkeypatch):
    for name in ("device_count", "get_device_name"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 8)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "only 4 of 8 GPUs" in preflight.report([], torch.device("cuda"))


def test_wrong_and_slow_ranks_are_named_and_rates_count_what_a_rank_sends() -> None:
    """In a ring of n ranks, a rank sends (n - 1) / n of the size, and twice as much for an
    all-reduce."""
    module, arguments = "tests.distributed.preflight_workers", {"wrong": 1, "slow": 2}
    expected = {
        "matmul, float32": 2e-12 * 1024**3,
        "memory, read and written": 6e-3,
        "link, within a node, to rank + 1": 3e-3,
        "link, within a node, to rank + 2": 3e-3,
        "link, node to node, to rank + 2": 3e-3,
        "all-reduce": 4e-3,
        "reduce-scatter": 2e-3,
        "all-gather": 2e-3,
        "all-to-all": 2e-3,
    }
    for wrong, slow, amounts, inexact in run_on_ranks(3, module, "with_faults", arguments):
        assert [name.split(" (")[0] for name in wrong] == ["rank 1"]
        assert [name.split(" (")[0] for name in slow] == ["rank 2"]
        assert amounts == pytest.approx(expected)
        assert len(inexact) == 3
