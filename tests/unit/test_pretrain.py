"""For invalid input, pretrain.py prints clear error lines, exits with code 2, and writes
nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import pretrain
from tests.commands import output_of
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.token_files import prepare_text
from training import command_line
from training.lifecycle.lifecycle import REASONS
from training.lifecycle.terminal import _stop_with_launcher
from training.loop import Outcome


@pytest.fixture
def folder(folder, tmp_path):
    """A folder with a token set and a config.yaml that trains on it."""
    tiny_config(folder)
    return tmp_path


def run(folder: Path, *arguments: str) -> int:
    """Run pretrain.py in this process and return its exit code. `--config` defaults to the config
    in `folder`."""
    config = [] if "--config" in arguments else ["--config", str(folder / "config.yaml")]
    with patch.dict(os.environ):
        return pretrain.main([*config, *arguments])


WRONG = {
    "unknown key": (["train.stepz=3"], ["train.stepz", "train.steps"]),
    "missing data file": (["data.train.walk.path=nowhere/set"], ["walk", "nowhere/set"]),
    "token id >= vocab": (["model.vocab_size=50"], ["walk", "119", "50"]),
    "missing Transformer Engine": (
        ["model.attention_backend=transformer_engine"],
        ["model.attention_backend", "transformer_engine"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gives_a_clear_line_and_exit_code_2(case, folder, capsys):
    overrides, words = WRONG[case]
    assert run(folder, *overrides) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and "Traceback" not in printed.err
    for word in words:
        assert word in printed.err, printed.err
    assert not (folder / "run").exists()


def test_a_run_s_end_has_the_exit_code_of_docs_running(folder, monkeypatch):
    """A rank that stops because of another rank's error also fails."""
    expected = {reason: 0 for reason in (None, *REASONS.values())}
    expected |= {"Ctrl-C": 130, "an error between steps": 1}
    for reason, code in expected.items():
        monkeypatch.setattr("training.run.train", lambda *_, end=reason, **__: Outcome(1, {}, end))
        assert run(folder) == code, reason


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "abc"}, "RANK must be a non-negative integer, got 'abc'"),
        ({"WORLD_SIZE": "", "RANK": "-1"}, "WORLD_SIZE must be a non-negative integer, got ''"),
        ({"LOCAL_RANK": "1.5"}, "LOCAL_RANK must be a non-negative integer, got '1.5'"),
        ({"MASTER_PORT": "0x10"}, "MASTER_PORT must be a non-negative integer, got '0x10'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT must be at most 65535, got 99999"),
        ({"SPECTRAIN_LAUNCHER": "a"}, "SPECTRAIN_LAUNCHER must be a non-negative integer, got 'a'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must be below WORLD_SIZE = 2, got 2"),
        ({"RANK": "1"}, "RANK must be below WORLD_SIZE = 1 (not set), got 1"),
    ],
)
def test_a_launcher_s_variable_that_is_no_number_is_a_line(variables, said, folder, capsys):
    with patch.dict(os.environ, variables), patch.object(command_line, "PATIENCE", 0.0):
        _stop_with_launcher()
        assert run(folder) == 2
    printed = capsys.readouterr().err
    assert f"the environment variable {said}" in printed and "Traceback" not in printed


@pytest.mark.parametrize("name", command_line.PROCESS_COUNTS)
def test_several_processes_without_ranks_do_not_train(name, folder, monkeypatch, capsys):
    monkeypatch.setenv(name, "8")
    for options in ([], ["--ranks=8"]):
        assert run(folder, *options) == 2
        said = capsys.readouterr().err
        assert "WORLD_SIZE is not set: start one torchrun per node" in said
        assert f"run `unset {name}` first" in said and not (folder / "run").exists()
    assert run(folder, "--print-config") == 0


def test_a_missing_set_is_found_where_it_was_named(folder, capsys, refusal):
    overlay = folder / "overlay.yaml"
    overlay.write_text("base: config.yaml\ndata:\n  train:\n    mine: {path: nowhere/mine}\n")
    assert run(folder, "--config", str(overlay)) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: token set mine: file nowhere/mine.idx does not exist"
    assert said[-2].startswith(
        f"error: nowhere/mine is relative to the working directory, {Path.cwd()}: run"
    )
    assert said[-1] == (
        f"error: data.train.mine is set by {overlay}, line 4; data.train.mine=null removes set "
        "mine, and data.train=null removes all earlier sets in data.train"
    )
    assert run(folder, "--config", str(overlay), "data.train.mine.path=gone/mine") == 2
    assert "is set by the override data.train.mine.path=gone/mine;" in capsys.readouterr().err
    # Without a vocabulary, the manifest next to the first set is read before the set.
    keys = ["data.train.walk=null", "model.vocab_size=null", "data.made_by=make data"]
    said = refusal(run(folder, "--config", str(overlay), *keys))
    first = (
        "token set mine: file nowhere/mine.idx does not exist; "
        "to plan without data, set model.vocab_size\n"
    )
    assert f"{first}error: to create the sets: make data\n" in said
    assert f"data.train.mine is set by {overlay}, line 4;" in said


def test_a_diverged_run_exits_with_code_1(folder, capsys):
    overrides = [
        "optimizer.head.lr=3e38",
        "optimizer.head.weight_decay=0",
        "train.max_skipped_steps=1",
    ]
    assert run(folder, *overrides) == 1
    said = "error: more than train.max_skipped_steps = 1 consecutive steps were skipped: in steps"
    assert capsys.readouterr().err.startswith(said)


def test_print_config_is_a_config(folder, capsys):
    assert run(folder, "--print-config", "train.steps=7") == 0
    printed = capsys.readouterr().out
    (folder / "config.yaml").write_text(printed)
    assert run(folder, "--print-config") == 0
    assert capsys.readouterr().out == printed and "steps: 7" in printed


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--gpus", "4"], "--gpus requires --dry-run, --fit or --rehearse"),
        (["--fit", "--json", "plan.json"], "--json requires --dry-run or --rehearse"),
        (["--dry-run", "--write", "mine.yaml"], "--write requires --fit"),
        (["--rank", "0"], "--rank requires --rehearse"),
        (["--compile-kernels"], "--compile-kernels requires --rehearse"),
        (["--dry-run", "--resume", "none"], "--resume requires a training run"),
        (["--resume", "newest"], "must be none, latest or a step, got 'newest'"),
        (["--resume", "9" * 5000], "must be none, latest or a step, got '999"),
        (["--rehearse"], "--rehearse requires --gpus N"),
        (["--rehearse", "--gpus", "0"], "must be a positive integer, got '0'"),
        (["--rehearse", "--gpus", "4", "--rank", "first"], "must be all or a rank, got 'first'"),
        (["--rehearse", "--gpus", "4", "--json", "no/x.json"], "in an existing folder, got 'no/"),
        (
            ["--fit", "--write", "configs"],
            "must be a file path in an existing folder, got 'configs'",
        ),
        (["--rehearse", "--gpus", "4", "--dry-run"], "not allowed with argument"),
        (["--rehearse", "--gpus", "4", "--resume", "none"], "--resume requires a training run"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, problem, folder, capsys):
    with pytest.raises(SystemExit) as ended:
        run(folder, *options)
    assert ended.value.code == 2 and problem in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_ranks_are_started_with_the_other_arguments(folder, monkeypatch, capsys):
    started = []
    monkeypatch.setattr("training.launcher.launch", lambda *given: started.append(given) or 3)
    for ranks in (["--ranks", "2"], ["--ranks=2"]):
        assert run(folder, "train.steps=4", *ranks, "--resume", "none") == 3
    config = ["--config", str(folder / "config.yaml")]
    command = [pretrain.__file__, *config, "train.steps=4", "--resume", "none"]
    assert started == [(2, command)] * 2
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        run(folder, "--ranks", "2")
    assert "--ranks cannot be used under torchrun" in capsys.readouterr().err


def test_the_config_of_a_copied_run_does_not_continue_the_original(folder, monkeypatch, refusal):
    copy, started = folder / "copy", []
    (copy / "checkpoints").mkdir(parents=True)
    config = ["--config", str(shutil.copy(folder / "config.yaml", copy))]
    said = refusal(run(folder, *config))
    assert f"is in the run folder {copy}, but sets run.dir to {folder}/run: " in said
    assert f"set run.dir={copy} to continue" in said and not (folder / "run").exists()
    monkeypatch.setattr(
        pretrain, "start_training", lambda config, *_: started.append(config.run.dir) or 0
    )
    for target in (str(copy), f"{folder}/other"):
        assert run(folder, *config, f"run.dir={target}") == 0
        assert started.pop() == target
    (folder / "run").symlink_to(copy)  # the run's own folder under another name
    assert run(folder, *config) == 0
    monkeypatch.chdir(copy)
    (copy / "config.yaml").write_text("base: ../config.yaml\nrun: {dir: runs/x}\n")
    assert "copy/runs/x: if the folder was copied or moved" in refusal(run(folder, *config))


def test_output_never_replaces_the_config(folder, refusal):
    overlay, link = folder / "overlay.yaml", folder / "link.yaml"
    overlay.write_text("base: config.yaml\n")
    link.symlink_to(folder / "config.yaml")
    for mode, option in ("--fit", "--write"), ("--dry-run", "--json"), ("--rehearse", "--json"):
        for file in (overlay, folder / "config.yaml", link):
            given = ["--config", str(overlay), mode, "--gpus", "1", option, str(file)]
            said = refusal(run(folder, *given))
            assert f"{option} must not overwrite a file of the config" in said and str(file) in said


@pytest.mark.parametrize("opened", [os.pipe, os.openpty], ids=["pipe", "terminal"])
def test_output_that_nobody_can_read_is_no_failure(opened, folder):
    reader, writer = opened()
    os.close(reader)
    options = ["--config", folder / "config.yaml", "--print-config"]
    done = subprocess.run(
        [sys.executable, "pretrain.py", *options], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_another_python_is_told_of_the_environment():
    command = [sys.executable, "-S", "pretrain.py", "--config", "configs/tiny_sso.yaml"]
    assert "has no torch: run `make setup`, then `source .venv/bin/activate`" in output_of(
        *command, code=2
    )


@pytest.mark.parametrize("take", [bytearray, np.empty, torch.empty])
def test_memory_that_cannot_be_had_is_known(take) -> None:
    with pytest.raises((MemoryError, RuntimeError)) as caught:
        take(1 << 50)
    assert pretrain.out_of_memory(caught.value)
    assert not pretrain.out_of_memory(RuntimeError("another"))


def test_a_vocabulary_beyond_that_of_the_data_is_refused(folder, tmp_path, capsys, refusal):
    """The error names the place where the key is set. Only a new run must change the value."""
    data = prepare_text(tmp_path, "A line {i} of text, as long as it is.\n\n", 300)
    (folder / "base.yaml").write_text("base: config.yaml\nmodel: {vocab_size: 1000}\n")
    overlay = folder / "overlay.yaml"
    sets = f"train: {{t: {{path: {data}/tokens.train}}}}"
    overlay.write_text(f"base: base.yaml\ndata: {{replace: true, {sets}}}\n")
    few = ["train.exit_step=1", "validation.interval=0"]
    arguments = ["--config", str(overlay), *few]
    said = refusal(run(folder, *arguments))
    assert "model.vocab_size must be at most 384, got 1,000: the data has 300 token ids" in said
    assert "Set model.vocab_size=null" in said
    assert re.search(r"model.vocab_size is set by .*base.yaml, line 2$", said.strip())
    assert not (folder / "run" / "metrics.jsonl").exists()
    named = [f"data.tokenizer={data}", "data.train.t=null", f"data.train.u.path={folder}/tokens"]
    assert "the data has 300 token ids" in refusal(run(folder, *arguments, *named))
    for own in ("model.vocab_size=null", "model.vocab_size=384", "model.vocab_multiple=1000"):
        again = f"run.dir={folder}/{own.replace('=', '_')}"
        assert run(folder, *arguments, own, again) == 0
        told = re.search(r"vocabulary: (\S+) ids, 300 in the data", capsys.readouterr().out)
        assert (told is None) is own.endswith("null")


def test_settings_of_a_rule_that_is_not_used_are_said_if_they_are_the_users(folder, capsys):
    (folder / "base.yaml").write_text(
        "base: config.yaml\noptimizer: {rules: {adamuon: {momentum: 0.9}}}\n"
    )
    overlay = folder / "overlay.yaml"
    overlay.write_text("base: base.yaml\noptimizer: {rules: {muon: {momentum: 0.8}}}\n")
    few = ["train.exit_step=1", "optimizer.rules.normuon.momentum=0.7"]
    assert run(folder, "--config", str(overlay), *few) == 0
    unused = [
        f"warning: optimizer.rules.{rule}.momentum has no effect, because no role uses this rule"
        for rule in ("muon", "normuon")
    ]
    assert [line for line in capsys.readouterr().err.splitlines() if "rule" in line] == unused
    few = [*few, "train.exit_step=2", "log.wandb.project=p", "--print-config"]
    assert run(folder, "--config", str(overlay), *few) == 0
    assert capsys.readouterr().err.splitlines() == [
        "warning: override train.exit_step=2 replaces override train.exit_step=1",
        *unused,
    ]
    few[-1] = "--dry-run"
    assert run(folder, "--config", str(overlay), *few) == 0
    said = capsys.readouterr().err
    assert "warning: log.wandb.project = 'p' has no effect without wandb in log.trackers" in said
