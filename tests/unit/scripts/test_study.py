"""A study runs every variant with every seed and compares them seed by seed."""

import json
import os
import subprocess
import sys
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from threading import Barrier

import pytest
import yaml

from scripts.studies.places import Place
from scripts.studies.records import Record, RecordBook, claimed
from scripts.studies.schema import TunedIn, read_study
from scripts.studies.search import run_of
from scripts.studies.trainer import Run, RunFailedError, Trainer
from scripts.studies.transfer import begin
from scripts.studies.worker import Worker
from scripts.study import main
from tests.paths import ROOT
from tests.token_files import write_token_set
from training.config import load_config
from training.errors import DataError

STUDIES = [p for p in (ROOT / "studies").rglob("*.yaml") if "variants:" in p.read_text()]


@pytest.fixture
def study_file(minimal, tmp_path) -> Path:
    """A study of one-step runs."""
    config = yaml.safe_load(minimal.read_text())
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)
    sets = {"walk": {"path": str(tmp_path / "tokens")}}
    config["data"] = {"train": sets, "validation": deepcopy(sets)}
    config["model"] |= {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab_size": 120}
    config["train"] = {"steps": 1, "global_batch": 2, "micro_batch": 2, "sequence_length": 16}
    config["schedule"] = {"kind": "constant"}
    minimal.write_text(yaml.safe_dump(config))
    path = tmp_path / "study.yaml"
    study = {
        "title": "t",
        "seeds": [1, 2],
        "overrides": ["validation.samples=4", "checkpoint.interval=0"],
        "variants": {
            "plain": {"config": str(minimal)},
            "lr": {
                "config": str(minimal),
                "overrides": ["optimizer.embedding.lr=0.5"],
                "against": "plain",
            },
        },
    }
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def test_a_study_runs_once_and_goes_on(study_file, tmp_path, capsys):
    output = tmp_path / "out"
    assert main([str(study_file), str(output)]) == 0
    result = json.loads((output / "results.json").read_text())
    plain, other = result["rows"]
    assert result["complete"] and result["budget"] == {"plain": 0.0, "lr": 0.0}
    assert len(plain["losses"]) == 2 and len(set(plain["losses"] + other["losses"])) == 4
    lines = (output / "lr-2" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["val/walk/loss"] == other["losses"][1]
    # Records outlive the runs' folders, and a line that was not finished counts as not written.
    rmtree(output / "plain-1")
    records = output / "runs.jsonl"
    kept = records.read_text().splitlines(keepends=True)
    assert len(kept) == 4
    records.write_text("".join(kept[:3]) + kept[3][:50])
    capsys.readouterr()
    assert main([str(study_file), str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"lr-2: {other['losses'][1]:.4f}" in printed and "-1: " not in printed
    assert json.loads((output / "results.json").read_text()) == result


@pytest.mark.slow
def test_a_study_of_one_seed_is_run_without_a_word_of_the_engine(study_file, tmp_path, root):
    """Options stand anywhere among the arguments, as of every command of the repository."""
    study_file.write_text(yaml.safe_dump(yaml.safe_load(study_file.read_text()) | {"seeds": [1]}))
    done = subprocess.run(
        [sys.executable, root / "scripts/study.py", "--jobs", "1", study_file, tmp_path / "out",
         "--nproc", "1", "train.steps=1"],
        capture_output=True, text=True, check=True, cwd=root,
    )  # fmt: skip
    assert "warn" not in (done.stdout + done.stderr).lower()
    table = (tmp_path / "out/table.md").read_text()
    assert done.stdout.endswith(table) and "| plain | one seed |" in table
    assert [len(row["losses"]) for row in json.loads(
        (tmp_path / "out/results.json").read_text())["rows"]] == [1, 1]  # fmt: skip


@pytest.mark.slow
def test_a_changed_config_file_is_trained_again(study_file, minimal, tmp_path):
    run = Run("a", str(minimal), ("validation.samples=4", "checkpoint.interval=0"))
    with closing(Trainer(tmp_path / "out", RecordBook(tmp_path / "out"))) as trainer:
        (before,) = trainer.records([run])
        again, twice = trainer.records([run, run])
        assert again is before and twice is before and before.figures["tokens"] == 32
        config = yaml.safe_load(minimal.read_text())
        config["train"]["steps"] = 2
        minimal.write_text(yaml.safe_dump(config))
        (after,) = trainer.records([run])
    assert after.settings == before.settings and after.key != before.key
    assert after.figures["tokens"] == 64
    assert [record.loss for record in (before, after)] == [
        json.loads(line)["figures"]["loss"]
        for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    ]


@pytest.fixture(scope="module")
def worker():
    """One worker for several runs, as a study has it."""
    with closing(Worker({**os.environ, "OMP_NUM_THREADS": "1"})) as worker:
        yield worker


def training_losses(folder: Path) -> list[float]:
    """Those that a run folder has."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["train/loss"] for line in map(json.loads, lines) if "train/loss" in line]


@pytest.mark.slow
def test_a_fork_trains_as_the_command_does(worker, study_file, minimal, tmp_path, root):
    arguments = ["--config", str(minimal), "train.steps=3", "log.interval=1"]
    own = [sys.executable, "pretrain.py", *arguments, f"run.dir={tmp_path / 'own'}"]
    subprocess.run(own, cwd=root, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for name in ("first", "second"):  # what one run leaves behind does not reach the next
        folder, log = tmp_path / name, tmp_path / f"{name}.txt"
        code, seconds = worker.run([*arguments, f"run.dir={folder}"], log)
        assert code == 0 and seconds > 0 and "done: " in log.read_text()
        assert training_losses(folder) == training_losses(tmp_path / "own") != []


@pytest.mark.slow
def test_a_run_with_a_wrong_option_says_so_in_its_log(worker, study_file, minimal, tmp_path):
    log = tmp_path / "log.txt"
    code, _ = worker.run(["--config", str(minimal), "--no-such-option"], log)
    assert code == 2 and "unrecognized arguments: --no-such-option" in log.read_text()


@pytest.mark.slow
def test_a_run_that_cannot_be_trained_is_named(study_file, tmp_path, capsys):
    assert main([str(study_file), str(tmp_path / "out"), "train.steps=0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: plain-1, ended with 2") and "train.steps" in error


@pytest.fixture
def tuned_file(study_file) -> Path:
    """The study with a search, whose third rate is beyond all bounds."""
    study = yaml.safe_load(study_file.read_text())
    rates = {"rate": {"grid": {"optimizer.matrix.lr": [1e-7, 3e-3, 1e38]}}}
    study["full"] = {"train.steps": 4}
    study["variants"]["lr"]["overrides"] = ["optimizer.embedding.lr=0.002"]
    study["overrides"] += [
        "optimizer.matrix.rule=adamw", "optimizer.matrix.weight_decay=0",
        "model.init.spectral=false", "train.max_skipped_steps=0",
    ]  # fmt: skip
    study["search"] = {"seed": 1, "stages": {"rate": [{"share": 1.0, "keep": 1}]}}
    study["curve"] = {"variant": "plain", "shares": [0.5], "seeds": [1]}
    for variant in study["variants"].values():
        variant["search"] = deepcopy(rates)
    study_file.write_text(yaml.safe_dump(study, sort_keys=False))
    return study_file


@pytest.mark.slow
def test_variants_are_tuned_and_another_study_begins_there(tuned_file, tmp_path):
    assert main([str(tuned_file), str(tmp_path / "out")]) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["budget"] == {"plain": 3.0, "lr": 3.0}
    trials = [trial for trial in result["trials"] if trial["variant"] == "plain"]
    assert trials[2]["loss"] is None  # it broke off
    winner = min(trials[:3], key=lambda trial: trial["loss"] or 99)
    assert result["chosen"]["plain"] == winner["candidate"]
    # The search had the first seed and the full length: that run is the first of the row.
    assert result["rows"][0]["losses"][0] == winner["loss"]
    assert [point["share"] for point in result["points"]] == [0.5]
    records = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert len(records) == 2 * 3 + 2 + 1

    means = {row["variant"]: sum(row["losses"]) for row in result["rows"]}
    better = min(means, key=lambda name: means[name])
    moved = replace(read_study(tuned_file), tuned_in=TunedIn(results=str(tmp_path / "out"), best=1))
    taken, start = begin(moved, tmp_path)
    assert set(taken.variants) == {better, "plain"}  # what it is compared against comes along
    assert start == {name: result["chosen"][name] for name in taken.variants}


def test_a_study_does_not_begin_with_what_is_not_there(tuned_file, tmp_path):
    study = replace(read_study(tuned_file), tuned_in=TunedIn(results="there"))
    with pytest.raises(DataError, match="tuned_in.results: cannot read"):
        begin(study, tmp_path)
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "results.json"
    path.write_text(json.dumps({"complete": False}))
    with pytest.raises(DataError, match="is not complete"):
        begin(study, tmp_path)
    empty = {"complete": True, "chosen": {"plain": []}, "rows": [], "variants": {}, "trials": []}
    path.write_text(json.dumps(empty))
    with pytest.raises(DataError, match="there has no variants lr"):
        begin(study, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": []}, "seeds must be one or more different ones, got []"),
        ({"seeds": [1, 1]}, "seeds must be one or more different ones, got [1, 1]"),
        ({"variants": {"a": {"config": "x", "against": "b"}}}, "a is against b, which is no"),
        ({"variants": {"a": {"file": "x"}}}, "variants.a.file"),
        ({"runs": 3}, "runs"),
        ({"search": {"seed": 0, "stages": {"s": []}}}, "plain.search must have the stages ['s']"),
    ],
)
def test_what_is_no_study_is_refused(study_file, change, message, capsys):
    study_file.write_text(yaml.safe_dump(yaml.safe_load(study_file.read_text()) | change))
    assert main([str(study_file), str(study_file.parent / "out")]) == 2
    assert message in capsys.readouterr().err


def test_unequal_tuning_is_refused(tuned_file, tmp_path, capsys):
    study = yaml.safe_load(tuned_file.read_text())
    study["search"]["stages"]["rate"] = [{"share": 0.5, "keep": 2}, {"share": 1.0, "keep": 1}]
    study["variants"]["lr"]["search"] = {"rate": {"choices": [["a=1"], ["a=2"], ["a=3"], ["a=4"]]}}
    tuned_file.write_text(yaml.safe_dump(study, sort_keys=False))
    assert main([str(tuned_file), str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "tuned at the same budget, got runs of full length: plain 3.5, lr 4" in error
    study["variants"]["lr"]["search"] = {"rate": {"choices": [["a=1"], ["a=2"]]}}
    tuned_file.write_text(yaml.safe_dump(study, sort_keys=False))
    assert main([str(tuned_file), str(tmp_path / "out")]) == 2
    assert (
        "rate must keep fewer at each rung, in the end 1, got [2, 2, 1]" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--jobs", "0"], "must be a whole number from 1 to"),
        (["--nproc", "-1"], "must be a whole number from 1 to"),
        (["--nproc", "2", "--gpus-per-run", "2"], "not allowed with"),
        (["--gpus-per-run", "3"], "--gpus-per-run must be at most the 2 GPUs here, got 3"),
        (
            ["--gpus-per-run", "1", "--jobs", "3"],
            "--jobs must be at most 2 with --gpus-per-run 1 on 2 GPUs, got 3",
        ),
    ],
)
def test_places_that_there_are_not_are_refused(
    study_file, tmp_path, options, message, capsys, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 7, -1, 3")
    try:
        code = main([str(study_file), str(tmp_path / "out"), *options])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2 and message in capsys.readouterr().err


def test_each_run_has_gpus_of_its_own(study_file, tmp_path, monkeypatch):
    """Which GPUs a run may use decides what it reads here."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    for name in ("5", "7"):
        write_token_set(tmp_path / name, tokens=4_000, vocab=120, seed=0)
    path = f"data.validation.walk.path={tmp_path}/${{oc.env:CUDA_VISIBLE_DEVICES}}"
    options = ["--gpus-per-run", "1", path, "run.device=cpu"]
    assert main([str(study_file), str(tmp_path / "out"), *options]) == 0
    configs = [load_config(path) for path in (tmp_path / "out").glob("*/config.yaml")]
    assert len(configs) == 4
    assert {config.data.validation["walk"].path for config in configs} == {
        f"{tmp_path}/5",
        f"{tmp_path}/7",
    }


@pytest.mark.slow
def test_processes_share_the_runs_of_a_study(study_file, tmp_path, root):
    """As the tasks of a SLURM array do: nothing is trained twice, and the results are the same."""
    assert main([str(study_file), str(tmp_path / "alone")]) == 0
    command = [sys.executable, "scripts/study.py", str(study_file), str(tmp_path / "out")]
    tasks = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) for _ in range(3)]
    said = [task.communicate()[0].decode() for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0, 0]
    results = [json.loads((tmp_path / f / "results.json").read_text()) for f in ("alone", "out")]
    assert results[0] == results[1] and results[1]["complete"]
    lines = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert len(lines) == 4  # each run has one record
    assert sum(" s)" in line for text in said for line in text.splitlines()) == 4


@pytest.mark.slow
def test_a_study_whose_workers_cannot_start_ends(study_file, tmp_path, capsys):
    study = yaml.safe_load(study_file.read_text()) | {"environment": {"PYTHONHOME": "/nowhere"}}
    study_file.write_text(yaml.safe_dump(study))
    assert main([str(study_file), str(tmp_path / "out")]) == 2
    assert "error: the process that forks runs ended with 1" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_outlived_its_study_is_waited_for(study_file, tmp_path, root):
    """Killed, a study gives up its claims while a run goes on and holds its folder."""
    folder = tmp_path / "out" / "plain-1"
    holder = "import sys, time\nfrom training.lifecycle.run_folder import locked\n"
    holder += "with locked(sys.argv[1]):\n    print('held', flush=True)\n    time.sleep(60)\n"
    orphan = [sys.executable, "-c", holder, str(folder)]
    command = [sys.executable, "scripts/study.py", str(study_file), str(tmp_path / "out")]
    with subprocess.Popen(orphan, cwd=root, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stdout.readline() == b"held\n"
        with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE) as study:
            assert study.stdout is not None and study.stdout.readline().startswith(b"lr-1: ")
            assert not (folder / "log.txt").exists()
            run.kill()
            said, _ = study.communicate()
    assert study.returncode == 0 and b"plain-1: " in said


def test_a_line_that_nobody_finished_is_cut_off(tmp_path):
    """Also by a process that was running already."""
    book = RecordBook(tmp_path)
    one, two = (Record(key, key, [], False, 1.0, {"loss": 2.0}) for key in ("a", "b"))
    book.add(one)
    with book.path.open("a") as file:
        file.write('{"key": "half')
    book.add(two)
    again = RecordBook(tmp_path)
    assert again["a"] == one and again["b"] == two
    assert len(book.path.read_text().splitlines()) == 2


def test_a_run_that_somebody_has_is_left_to_them(tmp_path):
    with claimed(tmp_path / "run") as mine, claimed(tmp_path / "run") as theirs:
        assert mine and not theirs
        with claimed(tmp_path / "other") as other:
            assert other
    with claimed(tmp_path / "run") as again:
        assert again


def test_runs_that_come_begin_where_a_place_is_free(tmp_path, monkeypatch):
    both, order = Barrier(2, timeout=60), []

    def trained(self, key, run, folder):
        order.append(run.label)
        if run.label in "ab":
            both.wait()
        if run.label == "d":
            raise RunFailedError("d, ended with 1")
        return Record(key, run.label, run.settings, False, 1.0, {"loss": 2.0})

    monkeypatch.setattr(Trainer, "_train", trained)
    config = "studies/optimizers/rules/adamw.yaml"
    a, b, c, d = (Run(name, config, (f"seed={ord(name)}",)) for name in "abcd")
    with closing(Trainer(tmp_path, RecordBook(tmp_path), (Place(), Place()))) as trainer:
        trainer.begin([a, b, c, d])
        (first,) = trainer.records([a])  # which waits for b, that nobody has asked for
        assert first.label == "a"
        assert [record.label for record in trainer.records([a, b, c])] == ["a", "b", "c"]
        with pytest.raises(RunFailedError, match="d, ended with 1"):
            trainer.records([d])
    assert sorted(order) == ["a", "b", "c", "d"]  # each of them once


def test_every_candidate_of_the_studies_is_a_config(root):
    for path in STUDIES:
        study = read_study(path)
        assert len({study.budget(name) for name in study.variants}) == 1
        for name, variant in study.variants.items():
            candidates = [c for stage in variant.search.values() for c in stage.candidates([])]
            for candidate in candidates or [[]]:
                run = run_of(study, name, candidate, study.seeds[0])
                load_config(root / run.config, [*run.overrides, "model.vocab_size=2048"])
