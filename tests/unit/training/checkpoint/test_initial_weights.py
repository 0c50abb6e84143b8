"""Runs that start with the weights of another run."""

import json
import math
import pickle
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.families import all_units
from models.initialize import VOCABULARY
from parallel.checkpoint.safe_index import read_index
from tests.fuzzed import FLIP, damage
from tests.run_configs import ROUTED, tiny_config
from tests.run_results import tensors_of
from tests.unit.training.checkpoint.test_checkpoint import forge
from training.assignments import unit_options
from training.build import build_trainer
from training.checkpoint.checkpoints import BrokenCheckpointError, read_checkpoint, step_folder
from training.checkpoint.initial_weights import initial_weights, rescaling_warning
from training.checkpoint.stored_checkpoint import ResumeError
from training.config import Config
from training.data.build_data import build_data
from training.loop import Loop
from training.run import train


@pytest.fixture
def configured(folder, tmp_path):
    """A function that returns the config of a run in tmp_path/NAME. Keywords are config keys."""

    def make(name: str, rule: str = "muon", **keys: Any) -> Config:
        common = {"train__steps": 3, "checkpoint__interval": 3, "validation__samples": 4}
        common["train__micro_batch"] = 8
        common["run__dir"] = str(tmp_path / name)
        return tiny_config(folder, rule, **common | keys)

    return make


@pytest.mark.parametrize(
    "keys",
    [
        {},
        ROUTED,
        {"pc__level": 4},
        {"pc__level": 2, "pc__evaluator": "in_graph", "optimizer__qkv_units": "component"},
    ],
)
def test_the_new_model_computes_what_the_old_one_did(configured, world, tmp_path, keys):
    outcome = train(configured("old", **keys), world)
    shape = {k: v for k, v in keys.items() if not k.startswith(("pc", "optimizer__qkv"))}
    begin = configured("new", checkpoint__initialize_from=str(tmp_path / "old"), **shape)
    weights = initial_weights(begin)
    trainer = build_trainer(begin, world, *build_data(begin), weights=weights)
    # PC(W) is computed from the checkpoint; without PC layers nothing is computed.
    tolerance = 1e-5 if "pc__level" in keys else 0
    for name, loss in Loop(trainer).evaluate().items():
        assert loss == pytest.approx(outcome.validation[name], rel=tolerance)
    if shape:
        saved = tensors_of(read_checkpoint(tmp_path / "old"), "buffer/")
        for name, value in saved.items():
            assert bool(value.any())
            router = trainer.model.chunks[0].decoder.layers[1].mlp.router
            assert torch.equal(router.expert_bias, value), name


def test_a_run_that_goes_on_does_not_begin_again(configured, world, tmp_path, capsys):
    train(configured("old"), world)
    keys = {"checkpoint__initialize_from": str(tmp_path / "old"), "checkpoint__interval": 1}
    whole = train(configured("whole", **keys), world)
    for stop in (1, 1, 3):
        if stop == 3:
            keys["checkpoint__initialize_from"] = "elsewhere"
        parts = train(configured("parts", train__exit_step=stop, **keys), world)
    assert parts.validation == whole.validation
    said = capsys.readouterr().out
    changed = "changed since step 1: checkpoint.initialize_from was .* and is now elsewhere"
    assert re.search(changed, said)
    assert f"initial weights: step 3 of {tmp_path / 'old'}" in said
    assert said.count("to train longer, increase train.exit_step; to start over") == 1
    origin = read_checkpoint(tmp_path / "parts").meta["initialized_from"]
    assert origin["step"] == 3 and len(origin["sha256"]) == 64
    # With its own checkpoints it does not read the other run.
    step_folder(tmp_path / "old", 3).rename(tmp_path / "moved")
    train(configured("parts", **keys), world)
    longer = (
        "to train longer, increase train.steps and set checkpoint.allow_change=[schedule]; to start"
    )
    assert longer in capsys.readouterr().out


def test_a_run_says_that_its_first_step_rescales_the_weights(configured, world, tmp_path, capsys):
    drawn = {"model__init__spectral": False, "model__init__std": 0.1}
    old = configured("old", "adamw", train__exit_step=1, **drawn)
    train(old, world)
    saved = tensors_of(read_checkpoint(tmp_path / "old"), "weight/")
    factors = []
    for unit in all_units(old.model, **unit_options(old)):
        if unit.is_matrix and unit.role not in VOCABULARY:
            rows, cols = unit.shape
            matrix = saved[f"weight/{unit.name}"].reshape(rows, cols)
            factors.append(math.sqrt(rows / cols) / float(torch.linalg.matrix_norm(matrix, ord=2)))
    source = {"checkpoint__initialize_from": str(tmp_path / "old")}
    train(configured("sphere", "muon_sphere", train__exit_step=1, **source), world)
    expected = f"will rescale {len(factors)} matrices to their radius, by factors "
    expected += f"{min(factors):.3g} to {max(factors):.3g} (muon_sphere); this changes a pretrained"
    assert expected in capsys.readouterr().out

    def warning(rule: str, source: str) -> str | None:
        config = configured("new", rule, checkpoint__initialize_from=str(tmp_path / source))
        weights = initial_weights(config)
        trainer = build_trainer(config, world, *build_data(config), weights=weights)
        return rescaling_warning(trainer.optimizer.rescalings().values())

    assert warning("muon", "old") is None
    assert warning("spectral_sphere", "sphere") is None  # already at the radius


def test_another_model_or_tokenizer_is_refused(configured, world, tmp_path):
    for token in "xy":
        model = {"type": "WordLevel", "vocab": {token: 0}, "unk_token": token}
        (tmp_path / token).write_text(json.dumps({"version": "1.0", "model": model}))
    train(configured("old", data__tokenizer=str(tmp_path / "x")), world)
    source = {"checkpoint__initialize_from": str(tmp_path / "old")}
    with pytest.raises(
        ResumeError,
        match=r"the run's model, but these keys differ: ffn was 96 and is now 64; set these",
    ):
        train(configured("new", model__ffn=64, **source), world)
    many = {"type": "WordLevel", "vocab": {f"{i}": i for i in range(200)}, "unk_token": "0"}
    (tmp_path / "many").write_text(json.dumps({"version": "1.0", "model": many}))
    tokenizer = {"data__tokenizer": str(tmp_path / "many"), "model__vocab_size": 200}
    own = rf"prepare data .*--tokenizer {tmp_path}/old/.*/tokenizer.json\) and set data.train"
    for keys, rest in (({}, "$"), ({"model__ffn": 64}, "; set the other model keys as in ")):
        reason = "the data's tokenizer has 200 token ids, but the model has 120"
        with pytest.raises(ResumeError, match=f"is now 200; {reason}: {own}{rest}"):
            initial_weights(configured("new", **tokenizer, **keys, **source))
    # The initial draw has no effect.
    assert initial_weights(configured("new", model__init__embedding_std=1.0, **source)) is not None
    begin = configured("new", data__tokenizer=str(tmp_path / "y"), **source)
    with pytest.raises(
        ResumeError, match=r"the tokenizer of .* \(sha256 .* differs .*allow_change="
    ):
        train(begin, world)
    allowed = replace(begin.checkpoint, allow_change=("tokenizer",))
    train(replace(begin, checkpoint=allowed), world)


def test_broken_and_missing_checkpoints_are_refused(configured, world, tmp_path):
    with pytest.raises(ResumeError, match="^checkpoint.initialize_from: .*nowhere does not exist"):
        train(configured("new", checkpoint__initialize_from=str(tmp_path / "nowhere")), world)
    train(configured("old"), world)
    begin = configured("new", checkpoint__initialize_from=str(tmp_path / "old"))
    saved = step_folder(tmp_path / "old", 3)
    index = read_index(saved / "state")
    del index.state_dict_metadata["weight/layers.0.o"]
    forge(saved, "state/.metadata", pickle.dumps(index))
    with pytest.raises(BrokenCheckpointError, match=r"is missing .*: weight/layers\.0\.o$"):
        initial_weights(begin)
    damage(next(saved.rglob("*.distcp")), FLIP)
    with pytest.raises(BrokenCheckpointError):
        train(begin, world)
