"""A study runs every variant with every seed and compares them seed by seed."""

import json
import math
import re
from contextlib import closing
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from scripts.studies.description import Curve, TunedIn, first_key, read_study, settings
from scripts.studies.records import Record, RecordBook, claimed
from scripts.studies.running import check_tokenizers, curve_runs, shortened
from scripts.studies.search import Outcome, run_of, tuned_settings
from scripts.studies.trainer import RunFailedError, StudyTrainer, message, places, summary
from scripts.study import main, parse
from tests.paths import ROOT
from tests.run_results import json_lines
from tests.token_files import write_manifest, write_token_set
from training.config import load_config
from training.errors import InputError
from training.lifecycle.run_folder import mark_done
from training.machine.device import versions

STUDIES = [p for p in (ROOT / "studies").rglob("*.yaml") if "variants:" in p.read_text()]


@pytest.fixture
def study_file(minimal, folder, tmp_path) -> Path:
    """The file of a study of one-step runs."""
    config = yaml.safe_load(minimal.read_text())
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


def changed(path: Path, **changes: Any) -> dict[str, Any]:
    """Change keys in a study file, and return the study."""
    study = yaml.safe_load(path.read_text()) | changes
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return study


def record_all(study_file: Path, folder: Path, **facts: Any) -> None:
    """Record a run of each variant and seed."""
    known, book = read_study(study_file), RecordBook(folder)
    for name, seed in product(known.variants, known.seeds):
        run = run_of(known, name, [], seed)
        figures = {"loss": float(seed), "course": []}
        book.add(Record(run.key, run.label, [], False, 1.0, figures, **facts))


def test_a_study_runs_once_and_goes_on(study_file, tmp_path, capsys, refusal, monkeypatch):
    output = tmp_path / "out"
    monkeypatch.setattr("training.report.text.FIRST", 0.05)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    changed(study_file, seeds=[1])
    assert main([str(study_file), str(output)]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(f"wrote {output}: results.json, runs.jsonl and table.md\n")
    assert re.search(r"\d:\d\d:\d\d \w+-\d: ", printed.err)
    result = json.loads((output / "results.json").read_text())
    plain, other = result["rows"]
    assert result["complete"] and result["budget"] == {"plain": 0.0, "lr": 0.0}
    (loss,) = other["losses"]
    assert len(plain["losses"]) == 1 and plain["losses"] != [loss]
    last = json_lines(output / "lr-1" / "metrics.jsonl")[-1]
    assert last["val/walk/loss"] == loss
    # Records outlive the runs' folders, and an unfinished line does not count.
    rmtree(output / "plain-1")
    records = output / "runs.jsonl"
    kept = records.read_text().splitlines(keepends=True)
    assert len(kept) == 2 and json.loads(kept[0])["facts"]["versions"] == versions()
    records.write_text(kept[0] + kept[1][:50])
    capsys.readouterr()
    assert main([str(study_file), str(output)]) == 0
    printed = capsys.readouterr().out
    assert f"lr-1: {loss:.4f}" in printed and "plain-1: " not in printed
    assert json.loads((output / "results.json").read_text()) == result
    # The records belong to these tokens, which have no manifest. The new files have the same size.
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=5)
    message = refusal(main([str(study_file), str(output)]))
    assert "data in the record of plain-1" in message and "must be {" in message


def test_a_record_of_other_data_or_another_environment_is_refused(study_file, tmp_path, capsys):
    manifest = tmp_path / "manifest.json"
    write_manifest(tmp_path, sha256={"bin": "first"})
    manifest.write_text(manifest.read_text().replace('"a":', '"tokens":'))
    facts = {"environment": {}, "data": {f"{tmp_path}/tokens": ["", "first"]}}
    record_all(study_file, tmp_path, facts=facts)

    def said() -> str:
        assert main([str(study_file), str(tmp_path)]) == 2
        return capsys.readouterr().err

    assert main([str(study_file), str(tmp_path)]) == 0
    study = yaml.safe_load(study_file.read_text())
    study_file.write_text(
        yaml.safe_dump({**study, "environment": {"MKL_CBWR": "1"}}, sort_keys=False)
    )
    assert "environment in the record of plain-1" in (text := said())
    assert "must be {'MKL_CBWR': '1'}, got {}" in text
    variants = changed(study_file, environment={})["variants"]
    manifest.write_text(manifest.read_text().replace("first", "second"))
    assert "data in the record of" in said()
    other = {"train": {"walk": {"path": "none"}}, "validation": {"walk": {"path": "none"}}}
    variants["lr"]["overrides"] = [f"data={json.dumps(other)}"]
    changed(study_file, variants=variants)
    assert "lr and plain must have the same tokenizer" in said()
    # Overrides of the command replace those of the variants.
    same = load_config(variants["plain"]["config"]).data.train["walk"].path
    overrides = [f"data.{kind}.walk.path={same}" for kind in ("train", "validation")]
    check_tokenizers(read_study(study_file), overrides)


def test_a_record_that_does_not_say_its_data_is_warned_of(study_file, tmp_path, capsys):
    record_all(study_file, tmp_path)
    assert main([str(study_file), str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("contain no hashes to check the data against") == 1


def test_a_record_of_other_software_is_warned_of(study_file, tmp_path, capsys):
    other = versions() | {"commit": "an older one"}
    record_all(study_file, tmp_path, facts={"versions": other})
    assert main([str(study_file), str(tmp_path)]) == 0
    said = "commit was an older one in earlier runs such as plain-1, but is "
    (line,) = [line for line in capsys.readouterr().err.splitlines() if " in earlier runs" in line]
    assert line.startswith(f"warning: {tmp_path}/runs.jsonl: {said}")


def test_a_record_is_that_of_the_merged_config(study_file, minimal):
    def keys(label: str | None = None) -> list[str]:
        study = read_study(study_file)
        return [run_of(study, name, [], 1, label=label).key for name in study.variants]

    before = keys()
    minimal.write_text(f"{minimal.read_text()}# a comment\n")
    assert keys() == keys("another label") == before
    minimal.write_text(minimal.read_text().replace("ffn: 48", "ffn: 64"))
    assert not {*before} & {*keys()}


def test_the_loss_of_a_run_is_the_last_validation_s(tmp_path):
    course = [[1, 3.0], [2, 2.0], [4, 2.5]]
    lines = [{"step": s, "val/a/loss": x, "val/a/bpb": 1.0, "val/loss": x} for s, x in course]
    lines += [{"step": 5, "progress/tokens": 50}, {"step": 6}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    expected = {"loss": 2.5, "datasets": {"a": 2.5}, "tokens": 50, "course": course}
    assert summary(tmp_path) == expected


@pytest.mark.parametrize(
    "name", ["PYTHONPATH", "PATH", "LD_PRELOAD", "PYTHONSTARTUP", "BASH_ENV", "HOME", "A", "RANK"]
)
def test_a_study_sets_no_variable_that_runs_code(name, study_file, tmp_path, capsys):
    changed(study_file, environment={name: str(tmp_path)})
    assert main([str(study_file), str(tmp_path)]) == 2
    assert f"environment.{name} must be one of ATEN_CPU_CAPABILITY, " in capsys.readouterr().err


@pytest.mark.parametrize("waits", [False, True])
def test_a_run_of_another_process_is_not_trained_again(waits, study_file, tmp_path, monkeypatch):
    """The other process trains the run before this process looks for its record, or while this
    process waits."""
    run = run_of(read_study(study_file), "plain", [], 1)
    ours, theirs = (RecordBook(tmp_path) for _ in range(2))
    record = Record(run.key, run.label, [], False, 1.0, {"loss": 2.0, "course": []})
    clock = SimpleNamespace(sleep=lambda seconds: theirs.add(record))
    monkeypatch.setattr("scripts.studies.trainer.time", clock)
    if not waits:
        theirs.add(record)
    with closing(StudyTrainer(tmp_path, ours)) as trainer:
        monkeypatch.setattr(trainer, "_train", lambda *_: pytest.fail("trained again"))
        with claimed(tmp_path / (run.folder if waits else "another run")):
            assert [record.loss for record in trainer.records([run])] == [2.0]


@pytest.mark.parametrize(
    ("code", "log", "done", "loss", "expected"),
    [
        (0, "done", True, 2.5, 2.5),
        (0, "done", True, math.nan, None),
        (1, "error: the loss is not finite", False, 2.5, None),
        (1, "error: the gradient is not finite", False, None, None),
        (1, "error: no disk", True, 2.5, "exited with code 1 without a loss: error: no disk"),
        (-9, "step 3", False, 2.5, "exited with code -9 without a loss: step 3"),
        (0, "stopped at step 3", False, 2.5, "without a loss: stopped at step 3"),
        (0, "done", True, None, "without a loss: done"),
        (0, "changes the data", True, 2.5, "plain-1: the data changed during the run"),
    ],
)
def test_only_a_whole_run_is_recorded(
    code, log, done, loss, expected, study_file, tmp_path, monkeypatch
):
    """A run that was earlier in the folder has finished."""
    run, book = run_of(read_study(study_file), "plain", [], 1), RecordBook(tmp_path)
    folder = tmp_path / run.folder
    folder.mkdir()
    mark_done(folder, True)

    def finished(arguments: list[str], path: Path) -> tuple[int, float]:
        path.write_text(log)
        logged = None if loss is None or math.isnan(loss) else loss
        line: dict[str, Any] = {"step": 4} | ({} if loss is None else {"val/loss": logged})
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        if done:
            mark_done(folder, True)
        if "data" in log:
            write_token_set(tmp_path / "tokens", tokens=2_000, vocab=120, seed=5)
        return code, 1.0

    with closing(StudyTrainer(tmp_path, book)) as trainer:
        monkeypatch.setattr(trainer, "_run", finished)
        if isinstance(expected, str):
            with pytest.raises(RunFailedError, match=re.escape(expected)):
                trainer.records([run])
        else:
            (record,) = trainer.records([run])
            assert (record.loss, record.failed) == (expected, expected is None)
            assert RecordBook(tmp_path)[run.key] == record
        assert (run.key in book) is not isinstance(expected, str)


@pytest.mark.parametrize(
    ("visible", "options", "expected"),
    [
        ("0,1,2,3,4", "--gpus-per-run 2", [(2, "0,1"), (2, "2,3")]),
        ("3, GPU-ab,1,-1,2", "--gpus-per-run 1 --jobs 2", [(1, "3"), (1, "GPU-ab")]),
        ("0", "--nproc 2 --jobs 3", [(2, None)] * 3),
        ("0", "", [(1, None)]),
        ("", "--gpus-per-run 1", "--gpus-per-run must be at most 0, "),
        ("0,1,-1,2", "--gpus-per-run 3", "--gpus-per-run must be at most 2, "),
        ("0,1,2", "--gpus-per-run 2 --jobs 2", "--jobs must be at most 1 with --gpus-per-run 2"),
    ],
)
def test_each_run_has_gpus_of_its_own(visible, options, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parsed = parse(["study.yaml", "out", *options.split()])
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            places(parsed)
    else:
        found = [(each.ranks, each.environment.get("CUDA_VISIBLE_DEVICES"))
                 for each in places(parsed)]  # fmt: skip
        assert found == expected


def test_the_length_of_runs_is_a_share_of_the_full_length(study_file):
    """If an override sets a key in `full`, it replaces the full length, also for the runs of the
    curve."""
    study = replace(
        read_study(study_file),
        full={"train.steps": 80, "schedule.warmup_steps": 8},
        curve=Curve(variant="lr", shares=[0.58, 2.0], seeds=[3, 4]),
    )
    study, extra = shortened(study, ["train.steps=40", "model.layers=2"])
    assert extra == ["model.layers=2"]
    runs = curve_runs(study, Outcome({"lr": ["optimizer.matrix.lr=0.5"]}, []), extra)
    expected = {"model.layers": "2", "optimizer.matrix.lr": "0.5"}
    for share, steps, warmup in ((0.58, "23", "5"), (2.0, "80", "16")):
        for seed, run in zip(("3", "4"), runs[share], strict=True):
            length = {"train.steps": steps, "schedule.warmup_steps": warmup, "seed": seed}
            assert settings(run.overrides).items() >= (expected | length).items()
    assert len({run.folder for each in runs.values() for run in each}) == 4
    with pytest.raises(InputError, match=r"train.steps must be a non-negative integer, got 2\.5"):
        shortened(study, ["train.steps=2.5"])


def test_a_damaged_record_is_named(tmp_path):
    (tmp_path / "runs.jsonl").write_text('{"key": "a"\n')
    with pytest.raises(InputError, match=r"runs\.jsonl, line 1: invalid JSON"):
        RecordBook(tmp_path)


def test_progress_is_the_last_step_of_each_run(tmp_path):
    with closing(StudyTrainer(tmp_path, RecordBook(tmp_path))) as trainer:
        for name, text in (("lr-1", "begins\nstep 2/9\nnext: plot\n"), ("lr-2", "")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "log.txt").write_text(text)
            trainer._logs.append(tmp_path / name / "log.txt")
        assert trainer.state() == "lr-1: step 2/9; lr-2: starts"


@pytest.mark.parametrize("option", ["--config=/other.yaml", "--resume=none", "--ranks=64"])
def test_an_override_of_a_study_is_no_option_of_pretrain(option, study_file, tmp_path, capsys):
    study = changed(study_file)
    study["variants"]["lr"]["overrides"] += [option]
    changed(study_file, **study)
    assert main([str(study_file), str(tmp_path)]) == 2
    assert f"an override must be key=value, got '{option}'" in capsys.readouterr().err


@pytest.fixture
def tuned_file(study_file) -> Path:
    """The file of the study with a search in which the third learning rate is far too large."""
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
    changed(study_file, **study)
    return study_file


def test_a_candidate_that_is_no_config_is_refused_before_any_run(tuned_file, tmp_path, refusal):
    study = yaml.safe_load(tuned_file.read_text())
    study["variants"]["lr"]["search"]["rate"]["grid"] = {"optimizer.matrix.lrr": [1, 2, 3]}
    changed(tuned_file, **study)
    said = refusal(main([str(tuned_file), str(tmp_path / "out")]))
    assert "lr rate optimizer.matrix.lrr=1: unknown key optimizer.matrix.lrr; did you mean" in said
    assert not (tmp_path / "out" / "runs.jsonl").exists()


@pytest.mark.slow
def test_variants_are_tuned_and_another_study_begins_there(tuned_file, tmp_path):
    assert main([str(tuned_file), str(tmp_path / "out"), "train.steps=2"]) == 0
    result = json.loads((tmp_path / "out" / "results.json").read_text())
    assert result["budget"] == {"plain": 3.0, "lr": 3.0}
    trials = [trial for trial in result["trials"] if trial["variant"] == "plain"]
    assert trials[2]["loss"] is None  # it failed
    winner = min(trials[:3], key=lambda trial: trial["loss"] or 99)
    assert result["chosen"]["plain"] == winner["candidate"]
    # The search used the first seed and the full length, so its run is the first of the row.
    assert result["rows"][0]["losses"][0] == winner["loss"]
    assert [point["share"] for point in result["points"]] == [0.5]
    records = (tmp_path / "out" / "runs.jsonl").read_text().splitlines()
    assert len(records) == 2 * 3 + 2 + 1

    study = read_study(tuned_file)
    variants = {**study.variants, "more": replace(study.variants["plain"], tuned_as="lr")}
    there = TunedIn(results=str(tmp_path / "out"))
    start = tuned_settings(replace(study, variants=variants, tuned_in=there), tmp_path)
    assert start == result["chosen"] | {"more": result["chosen"]["lr"]}


def searching(*counts: int, rungs=((1.0, 1),), kind="grid") -> dict[str, Any]:
    """Return the keys of a study whose variants have the given numbers of candidates."""
    stages = {"s": [dict(zip(("share", "keep", "seeds"), rung, strict=False)) for rung in rungs]}
    variants = {
        name: {"config": "x", "search": {"s": {kind: {"optimizer.matrix.lr": [*range(count)]}}}}
        for name, count in zip("ab", counts, strict=False)
    }
    return {
        "full": {"train.steps": 4}, "search": {"seed": 0, "stages": stages}, "variants": variants
    }  # fmt: skip


CURVE = {"variant": "plain", "shares": [0.5], "seeds": [1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"curve": CURVE}, "full must be set if the study has search or curve, got {}"),
        (
            {"curve": CURVE | {"variant": "x"}, "full": {"train.steps": 4}},
            "curve.variant must be one of the variants, got x",
        ),
        (searching(2, 3), "must have the same tuning budget in full runs, got a 2, b 3"),
        (searching(3, rungs=((0.5, 3), (1, 1))), "and end at 1, got [3, 3, 1]"),
        (searching(3, rungs=((1, 2),)), "decrease at every rung of s and end at 1, got [3, 2]"),
        (searching(2, rungs=((1.5, 1),)), "search.stages.s: shares must be in (0, 1], got [1.5]"),
        (searching(2, rungs=((0, 1),)), "search.stages.s: shares must be in (0, 1], got [0.0]"),
        (
            searching(2, rungs=((1, 1, [3, 3]),)),
            "search.stages.s: seeds must be distinct, got [3, 3]",
        ),
        (searching(2, kind="factors"), "a: factors in s require tuned_in, got null"),
        ({}, "the command line must not set seed, which the study sets from seeds"),
        ({"seeds": [1, 1]}, "seeds must be a non-empty list of distinct numbers, got [1, 1]"),
        (
            {"variants": {"a": {"config": "x", "against": "b"}}},
            "a.against must be a variant of the study, got b",
        ),
        (
            {"overrides": ["train.steps=4", "train={steps: 5}"]},
            "once: override train={steps: 5} replaces override train.steps=4",
        ),
        ({"overrides": ["seed=3"]}, "overrides must not set seed, which the study sets from seeds"),
        (
            {"variants": {"a": {"config": "x", "overrides": ["run.dir=y"]}}},
            "a.overrides must not set run.dir, which the study sets from the study's folder",
        ),
        (
            {"full": {"train.steps": 4}, "overrides": ["train={steps: 5}"]},
            "overrides must not set train.steps, which the study sets from full",
        ),
        (
            {
                "full": {"train.steps": 4},
                "variants": {"a": {"config": "x", "overrides": ["train.steps=8"]}},
            },
            "a.overrides must not set train.steps, which the study sets from full",
        ),
        ({"variants": {"a": {"file": "x"}}}, "variants.a.file"),
        ({"search": {"seed": 0, "stages": {"s": []}}}, "plain.search must have the stages ['s']"),
    ],
)
def test_what_is_no_study_is_refused(study_file, change, message, refusal):
    changed(study_file, **change)
    arguments = [str(study_file), str(study_file.parent / "out"), *([] if change else ["seed=4"])]
    assert message in refusal(main(arguments))


@pytest.mark.slow
def test_every_candidate_of_the_studies_is_a_config(root):
    for path in STUDIES:
        study = read_study(path)
        assert len({study.budget(name) for name in study.variants}) == 1
        for name, variant in study.variants.items():
            factors = [key for stage in variant.search.values() for key in stage.factors]
            tuned = [f"{first_key(key)}=1" for key in factors]
            candidates = [c for stage in variant.search.values() for c in stage.candidates(tuned)]
            for candidate in (candidates[0], candidates[-1]) if candidates else ([],):
                run = run_of(study, name, candidate, study.seeds[0])
                load_config(root / run.config, [*run.overrides, "model.vocab_size=2048"])


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (["error: old", "step 1", "error: no a.idx", "error: mount it"], "error: no a.idx"),
        (["error: one", "Exception ignored"], "error: one"),
        (["step 1", "Killed"], "Killed"),
        ([], "nothing"),
        (["error: one", "\udcff"], "error: one"),
    ],
)
def test_a_failed_run_is_named_with_the_first_line_of_its_error(log, expected, tmp_path):
    """Later lines of an error state where a value is set. The log of a killed run may end within a
    character."""
    (tmp_path / "log.txt").write_text("\n".join(log), errors="surrogateescape")
    assert message(tmp_path / "log.txt") == expected
