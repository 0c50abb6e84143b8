"""Fixtures for the data tests."""

from typing import Any

import numpy as np
import pytest

from tests import mixtures
from tests.mixtures import LENGTH, Read
from tests.run_configs import tiny_config
from tests.token_files import write_stream, write_token_set
from training.data import document_index, token_set
from training.data.batches import GlobalBatchSampler
from training.data.order import TrainingData
from training.run import train

SIZES = {"a": 1000, "b": 401, "c": 57}  # tokens


@pytest.fixture(scope="module", autouse=True)
def small_scans():
    """Scan token sets and indexes in many parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_set, "_SCAN", 83)
        patch.setattr(document_index, "STEP", 2)
        yield


@pytest.fixture
def prefixes(tmp_path):
    """Three token sets by name."""
    rng = np.random.default_rng(0)
    return {
        name: write_stream(tmp_path / name, rng.integers(0, 500, size, dtype=np.uint16))
        for name, size in SIZES.items()
    }


def sampler(**options: int) -> GlobalBatchSampler:
    """Return a sampler of batches of eight samples, in micro-batches of two, on one rank."""
    one = {"consumed": 0, "global_batch": 8, "micro_batch": 2, "data_rank": 0, "data_size": 1}
    return GlobalBatchSampler(**one | options)


@pytest.fixture
def start(tmp_path, world: Any, monkeypatch: pytest.MonkeyPatch):
    """A function that trains up to a step with the given set weights, and returns the samples read
    since this start."""
    for i, (name, tokens) in enumerate(mixtures.SIZES.items()):
        write_token_set(tmp_path / name, tokens=tokens, vocab=120, seed=i)
    write_token_set(tmp_path / "tokens", tokens=1_000, vocab=120, seed=9)
    read: Read = []
    source = TrainingData.source

    def noted(data: TrainingData, sample: int) -> tuple[int, int]:
        chosen, window = source(data, sample)
        read.append((data.sets[chosen].name, window))
        return chosen, window

    monkeypatch.setattr(TrainingData, "source", noted)

    def started(step: int, weights: dict[str, float], **keys: Any) -> Read:
        sets = {f"data__train__{name}__path": tmp_path / name for name in weights}
        sets |= {f"data__train__{name}__weight": weight for name, weight in weights.items()}
        common = {
            "train__steps": 30,
            "train__exit_step": step,
            "train__sequence_length": LENGTH,
            "checkpoint__interval": 100,
            "data__train__walk": "null",
            "log__interval": 1,
            "train__global_batch": 32,
            "train__micro_batch": 8,
        }
        read.clear()
        train(tiny_config(str(tmp_path), "adamw", **{**common, **sets, **keys}), world)
        return list(read)

    return started
