"""Text samples during training: content, steps, and errors."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.huggingface.export import export
from tests.run_configs import tiny_config
from tests.run_results import json_lines
from tests.token_files import prepare_text
from training.config import Config
from training.data.build_data import build_data
from training.errors import ConfigError
from training.lifecycle.lifecycle import Watchdog
from training.run import train
from training.samples import build_sampler

TEXT = "A matrix has rows and columns, of which the number {i} is one; é is a letter.\n\n"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory) -> Path:
    """A prepared folder with a trained tokenizer and the sets `tokens`."""
    return prepare_text(tmp_path_factory.mktemp("data"), TEXT, 800)


def config_of(tokens: Path, tmp_path: Path, **keys: Any) -> Config:
    """Return the config of a run that generates samples of nine tokens from one set."""
    keys |= {"validation__samples_interval": 3, "validation__samples_tokens": 9}
    for kind in ("train", "validation"):
        keys[f"data__{kind}__walk__path"] = f"{tokens}/tokens.train"
    return tiny_config(str(tmp_path), "adamw", model__vocab_size=300, **keys)


def test_a_sample_is_what_transformers_writes(tokens, world, tmp_path, monkeypatch) -> None:
    config = config_of(
        tokens, tmp_path, train__steps=6, train__micro_batch=8, log__interval=2,
        checkpoint__interval=6,
    )  # fmt: skip
    beats: Counter[int] = Counter()
    monkeypatch.setattr(Watchdog, "beat", lambda self, step: beats.update([step]))
    train(config, world)
    assert all(9 <= beats[step] - beats[step - 1] < 18 for step in (3, 6))  # one per token
    found = json_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in found if "sample/walk/text" in line] == [3, 6]
    assert "train/loss" not in found[1]  # step 3 is otherwise not logged
    out = tmp_path / "out"
    export(tmp_path / "run", out)
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out)
    last = found[-1]
    prompt = tokenizer(last["sample/walk/prompt"], return_tensors="pt", add_special_tokens=False)
    assert prompt["input_ids"].shape == (1, 16)
    # The end of a document does not end a sample.
    written = model.generate(**prompt, max_new_tokens=9, do_sample=False, eos_token_id=-1)
    assert tokenizer.decode(written[0, 16:]) == last["sample/walk/text"] != ""


def test_the_end_of_a_document_is_part_of_a_sample(tokens, world, tmp_path, monkeypatch) -> None:
    config = config_of(tokens, tmp_path)
    sampler = build_sampler(config, build_data(config)[1])
    end = json.loads((tokens / "manifest.json").read_text())["tokenizer"]["eod_id"]
    monkeypatch.setattr("training.samples.next_tokens", lambda *_: torch.tensor([end]))
    texts = sampler.sample(None, world, lambda: None)
    assert texts["sample/walk/text"] == "<|endoftext|>" * 9


def test_samples_without_a_tokenizer_are_refused(world, folder) -> None:
    config = tiny_config(folder, validation__samples_interval=2, validation__samples_tokens=4)
    with pytest.raises(ConfigError, match="samples_interval requires data.tokenizer, because"):
        train(config, world)


def test_without_validation_sets_there_are_none(folder) -> None:
    config = tiny_config(folder, validation__samples_interval=2, validation__samples_tokens=4)
    assert build_sampler(config, []) is None
