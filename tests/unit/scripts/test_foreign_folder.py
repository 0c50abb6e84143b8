"""Model folders from other people: no code in the folder is executed, and no file outside the
folder is read."""

import contextlib
import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from scripts.evaluation.harness import Run
from scripts.generate import continuation, main, parse
from scripts.huggingface.export import INDEX_FILE
from scripts.huggingface.importing import TheirFiles, copy_tokenizer, their_settings
from scripts.huggingface.model_folder import read_settings
from tests.text_files import write_byte_level_tokenizer
from training.errors import InputError

CODE = """
from pathlib import Path
Path(__file__).with_name("executed").touch()
Path({marker!r}).touch()
from transformers import PretrainedConfig
class Config(PretrainedConfig):
    model_type = "theirs"
"""


def foreign(folder: Path) -> Path:
    """Return a model folder that contains code. If executed, the code would create the file
    `executed` next to the folder."""
    model = folder / "model"
    model.mkdir()
    (model / "theirs.py").write_text(CODE.format(marker=str(folder / "executed")))
    settings = {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Config"}}
    (model / "config.json").write_text(json.dumps(settings))
    return model


def test_code_of_a_model_is_not_run_whatever_is_answered(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    model = foreign(tmp_path)
    with pytest.raises(InputError, match="config.json"):
        their_settings(model)
    with pytest.raises(InputError, match="cannot be loaded"):
        continuation(model, parse([str(model), "In the beginning"]))
    assert not (tmp_path / "executed").exists()


def refused_for_lm_eval(model: Path, said: str, **settings: object) -> None:
    """Check that lm-eval is not started for a model with these settings."""
    (model / "config.json").write_text(json.dumps(settings))
    run = Run(model=model, tasks=["a"], python=Path("python"), output=model)
    with pytest.raises(InputError, match=said):
        run.command()


@pytest.mark.parametrize("end", ["0,trust_remote_code=True", [0, 1], 1.5, True, {"a": 1}])
def test_an_end_token_that_is_no_number_is_not_passed_to_lm_eval(end, tmp_path):
    refused_for_lm_eval(tmp_path, "eos_token_id must be an integer or null, got", eos_token_id=end)


def test_attention_of_others_is_not_run_by_lm_eval_and_generate(tmp_path):
    settings = {"_attn_implementation": "someone/kernel", "eos_token_id": 0}
    wanted = "_attn_implementation must be eager or sdpa, got 'someone/kernel'"
    refused_for_lm_eval(tmp_path, wanted, **settings)
    with pytest.raises(InputError, match=wanted):
        continuation(tmp_path, parse([str(tmp_path), "In the beginning"]))


def test_a_path_that_lm_eval_would_take_for_settings_is_refused(tmp_path):
    model = tmp_path / "model,trust_remote_code=True"
    model.mkdir()
    refused_for_lm_eval(model, "must not contain a comma")


def hub_folder(folder: Path) -> Path:
    """Return a snapshot as in the hub's cache: its files are links to blobs next to the
    snapshots."""
    snapshot, blobs = folder / "snapshots" / "abc", folder / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    write_byte_level_tokenizer(blobs).rename(blobs / "1")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/1")
    return snapshot


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """An empty folder."""
    (tmp_path / "kept").mkdir()
    return tmp_path / "kept"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model folder with a tokenizer."""
    (tmp_path / "source").mkdir()
    write_byte_level_tokenizer(tmp_path / "source")
    return tmp_path / "source"


@pytest.mark.parametrize("rows", [1000, 100])
def test_token_ids_that_the_model_lacks_are_said(rows, source, kept, capsys):
    copy_tokenizer(source, kept, rows)
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).get_vocab_size()
    said = f"tokenizer.json has {ids} token ids, but the model has {rows}, so exporting"
    assert (said in capsys.readouterr().out) == (ids > rows)


def test_links_of_the_hub_are_followed(tmp_path, kept):
    assert "tokenizer" in copy_tokenizer(hub_folder(tmp_path / "hub"), kept, 1000)
    assert (kept / "tokenizer.json").read_text() == (tmp_path / "hub" / "blobs" / "1").read_text()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_a_link_out_of_the_folder_is_refused(name, source, kept, tmp_path):
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(secret)
    with pytest.raises(InputError, match=f"{name} must not link outside its folder, but links to"):
        copy_tokenizer(source, kept, 1000)
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "root:x:0:0"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "root:x:0:0"),
        ("generation_config.json", "[" * 100_000),
        ("generation_config.json", "[]"),
    ],
)
def test_a_file_that_is_not_what_its_name_says_is_not_kept(name, content, source, kept):
    (source / name).write_text(content)
    with pytest.raises(InputError, match=name):
        copy_tokenizer(source, kept, 1000)
    assert list(kept.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    ['{"a": 5}', "[1]", "[" * 100_000, '{"weight_map": {"a": 5}}', '{"weight_map": [1]}', "5"],
)
def test_an_index_of_another_form_is_named(content, tmp_path):
    (tmp_path / INDEX_FILE).write_text(content)
    with contextlib.ExitStack() as stack, pytest.raises(InputError, match=INDEX_FILE):
        TheirFiles(tmp_path, stack)


def test_a_pipe_is_not_read(tmp_path):
    """Opening a pipe would block forever."""
    (tmp_path / "source").mkdir()
    os.mkfifo(tmp_path / "source" / "tokenizer.json")
    assert copy_tokenizer(tmp_path / "source", tmp_path, 1000) == {}


@pytest.mark.parametrize(
    ("folder", "options", "rule"),
    [
        ("", ["\udcff"], "the prompt must be valid UTF-8"),
        ("", ["a", "--temperature", "nan"], "--temperature must be finite and at least 0, got nan"),
        ("", ["a", "--temperature", "-1"], "--temperature must be finite and at least 0, got -1"),
        ("", ["a", "--tokenizer", "t"], "only valid with a run or checkpoint, got the exported"),
        ("", ["a"], "must contain tokenizer.json; export it with a tokenizer"),
        ("absent", ["a"], "absent does not exist"),
        ("empty", ["a"], "empty contains no checkpoint"),
    ],
)
def test_what_cannot_be_continued_is_refused(folder, options, rule, tmp_path, refusal) -> None:
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "empty").mkdir()
    assert rule in refusal(main([str(tmp_path / folder), *options]))
    with pytest.raises(InputError, match=r"config\.json cannot be read"):
        read_settings(tmp_path)
