"""Checkpoints in memory: a run goes on from them to the bit, though a node of them was lost."""

import pytest

from tests.launch import run_on_ranks
from tests.run_configs import tiny_config
from tests.token_files import write_token_set

WORKERS = "tests.distributed.memory_workers"
SHORT = {"train__steps": 9, "log__interval": 100}
CASES = {
    "sso, bfloat16": SHORT | {"train__precision": "bf16"},
    "sso, float32": SHORT,
    "PC layers": SHORT | {"pc__level": 2},
    "AdamW": SHORT | {"optimizer__matrix__rule": "adamw"},
}


@pytest.fixture
def folder(tmp_path):
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    tiny_config(str(tmp_path), "spectral_sphere")
    return str(tmp_path)


@pytest.mark.parametrize(
    "layout", [{}, {"tensor": 2}, {"pipeline": 2}], ids=["data 4", "tensor 2", "pipeline 2"]
)
def test_a_run_goes_on_from_memory_though_a_node_was_lost(folder, layout):
    cases = {
        name: keys | {f"parallel__{axis}": size for axis, size in layout.items()}
        for name, keys in CASES.items()
    }
    arguments = {"folder": folder, "layout": layout, "cases": cases}
    for each in run_on_ranks(4, WORKERS, "continued", arguments):
        assert each == {name: [] for name in CASES}


def test_what_cannot_be_used_is_not(folder):
    for each in run_on_ranks(4, WORKERS, "refused", {"folder": folder}):
        assert each == {
            "nothing": None,
            "kept": 1,
            "not after": None,
            "other settings": None,
            "full": 1,
            "damaged": None,
            "not finite": [1],
            "both lost": None,
        }
