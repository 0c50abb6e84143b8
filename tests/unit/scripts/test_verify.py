"""scripts/verify.py reports damage to a run, a checkpoint or data, and changes nothing."""

import json
import os
import re
import shutil
from functools import reduce
from operator import getitem
from pathlib import Path

import pytest

from scripts.prepare_data import main as prepare
from scripts.verify import main
from tests.fuzzed import FLIP, damage, leaves, replaced
from tests.run_configs import tiny_config
from tests.token_files import prepare_text
from training.checkpoint.checkpoints import step_folder
from training.run import train


@pytest.fixture
def run_dir(folder: str, tmp_path: Path, world) -> Path:
    """A run with checkpoints at steps 1 and 2."""
    keys = {"checkpoint__interval": 1, "train__exit_step": 2, "validation__samples": 2}
    train(tiny_config(folder, "adamw", log__interval=1, **keys), world)
    return tmp_path / "run"


def test_a_good_run_is_good(run_dir, capsys):
    assert main([str(run_dir), str(step_folder(run_dir, 2))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 6 + 1  # two checkpoints, latest, config, two logs; a checkpoint
    assert all(line.endswith("good") for line in lines[1:])


def test_everything_that_is_damaged_is_named(run_dir, capsys):
    damage(step_folder(run_dir, 1) / "state" / "__0_0.distcp", FLIP)
    shutil.copytree(step_folder(run_dir, 2), step_folder(run_dir, 9))
    (run_dir / "checkpoints" / "latest").write_bytes(b"\xff")
    (run_dir / "metrics.jsonl").write_text("{}\n")
    (run_dir / "config.yaml").write_text("run: 3\n")
    assert main([str(run_dir)]) == 1
    printed = capsys.readouterr().out
    for said in (
        "__0_0.distcp has changed since it was written",
        "folder's name must contain 2, the step in meta.json",
        "must name step_00000002, got",
        "1 damaged lines",
        "run must be a section, got 3",
    ):
        assert said in printed, said
    assert printed.count("good") == 2  # step 2 and the events


def test_files_that_are_not_regular_are_named_and_the_rest_is_read(run_dir, capsys):
    names = ("metrics.jsonl", "monitors.jsonl", "events.jsonl", "config.yaml")
    for turn in range(3):
        for place, name in enumerate(names):
            path = run_dir / name
            path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
            make = (os.mkfifo, Path.mkdir, lambda path: path.symlink_to(path))[(place + turn) % 3]
            make(path)
        assert main([str(run_dir)]) == 1
        verdicts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        bad = {Path(path).name for path, verdict in verdicts.items() if verdict != "good"}
        assert bad == {"what", *names} and len(verdicts) == 1 + 7


def test_steps_that_a_log_lacks_are_named(folder, tmp_path, world, capsys):
    """Steps are missing, as after a power failure. The logging interval changes at the step where
    the run resumes."""
    keys = {"checkpoint__interval": 4, "validation__samples": 2, "train__steps": 12}
    keys["train__micro_batch"] = 8
    keys |= {"monitors__interval": 2}
    train(tiny_config(folder, "adamw", log__interval=1, **keys, train__exit_step=7), world)
    train(tiny_config(folder, "adamw", log__interval=3, **keys), world)
    metrics, monitors = (tmp_path / "run" / f"{name}.jsonl" for name in ("metrics", "monitors"))
    assert main([str(tmp_path / "run")]) == 0
    lines = metrics.read_text().splitlines(keepends=True)
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]
    metrics.write_text("".join(lines[:5] + lines[9:]))
    monitors.write_text("".join(monitors.read_text().splitlines(keepends=True)[:-1]))
    capsys.readouterr()
    assert main([str(tmp_path / "run")]) == 1
    said = capsys.readouterr().out
    assert "missing steps: 3, from 6 to 9" in said and "missing steps: 1, from 12 to 12" in said
    metrics.unlink()
    assert main([str(tmp_path / "run")]) == 1
    assert re.search(r"metrics\.jsonl +missing steps: 9, from 1 to 12", capsys.readouterr().out)
    (tmp_path / "run/events.jsonl").unlink()
    assert main([str(tmp_path / "run")]) == 1
    assert re.search(r"events\.jsonl +does not exist", capsys.readouterr().out)


def test_every_fact_of_a_manifest_is_compared(tmp_path, capsys):
    path = prepare_text(tmp_path, "line {i} of many\n", 99) / "manifest.json"
    assert main([str(path.parent)]) == 0
    content = json.loads(path.read_text())
    for keys in leaves(content):
        if {"fingerprint", "source", "inputs"} & {*keys}:  # of the inputs
            continue
        value = reduce(getitem, keys, content)
        for other in (f"{value}x",) if isinstance(value, str) else (value - 1, value + 1):
            other = type(value)(other)
            if other != value:
                path.write_text(json.dumps(replaced(content, keys, other)))
                assert main([str(path.parent)]) == 1, (keys, other)


def test_a_set_that_the_manifest_does_not_list_is_named(tmp_path, capsys):
    folder = prepare_text(tmp_path, "line {i} of many\n", 99)
    (folder / "more.idx").touch()
    assert main([str(folder)]) == 1
    assert "more.idx cannot be checked, because manifest.json does not" in capsys.readouterr().out


def test_bytes_that_cannot_be_checked_are_mentioned(tmp_path, capsys):
    tokens = {chr(i): i for i in range(32, 127)} | {"\n": 10, "<end>": 0}
    model = {"type": "WordLevel", "vocab": tokens, "unk_token": " "}
    special = {"id": 0, "content": "<end>", "special": True, "single_word": False,
               "lstrip": False, "rstrip": False, "normalized": False}  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    content = {"version": "1.0", "model": model, "added_tokens": [special], "pre_tokenizer": split,
               "decoder": {"type": "Fuse"}}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "text.txt").write_text("line of many " * 300)
    options = ["--tokenizer", str(tmp_path / "tokenizer.json"), "--output", str(tmp_path / "d")]
    assert prepare([f"a={tmp_path / 'text.txt'}", *options]) == 0
    capsys.readouterr()
    assert main([str(tmp_path / "d")]) == 0
    assert "good; byte counts of the text are not checked, because" in capsys.readouterr().out
    manifest = tmp_path / "d" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"documents": ', '"documents": 1'))
    assert main([str(tmp_path / "d")]) == 1 and "good" not in capsys.readouterr().out


def test_another_folder_is_refused(tmp_path, refusal):
    assert "must be a run folder, a checkpoint or prepared data" in refusal(main([str(tmp_path)]))
