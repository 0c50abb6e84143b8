"""`pretrain.py --rehearse`: exit codes, the report, and its JSON."""

import json
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import pretrain
from tests.paths import ROOT
from tests.rehearsal.programs import MONITORED, SHAPE, ToldJob
from tests.run_configs import tiny_config
from tests.tiny_families import overrides, settings
from training.dry_run import plan_run
from training.rehearsal import processes
from training.rehearsal import rehearse as rehearsal
from training.rehearsal.rank import RankReport, Scenario
from training.rehearsal.trace import OPTIMIZER, STEP, Counts

FIGURES = {
    "launches", "triton_launches", "collectives", "collective_bytes", "host_reads",
    "synchronizations", "modelled_seconds",
}  # fmt: skip


@pytest.fixture
def rehearse(tmp_path, perform):
    """A function that rehearses the tiny config with the given options and returns the exit code.

    It uses processes shared by all tests, because starting new processes would take longer than the
    rehearsal.
    """
    shape = SHAPE | MONITORED
    tiny_config(str(tmp_path), "muon", **shape | overrides(settings("llama")))
    changes = [f"{key.replace('__', '.')}={value}" for key, value in shape.items()]

    def call(*options: str) -> int:
        config = str(tmp_path / "config.yaml")
        return pretrain.main(["--config", config, "--rehearse", *changes, *options])

    return call


def test_a_run_that_would_not_break(rehearse, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rehearsal, "Job", ToldJob)
    # Rehearsals omit samples of text.
    samples = ("validation.samples_interval=2", "validation.samples_tokens=4")
    assert rehearse("--gpus", "4", "--json", str(tmp_path / "report.json"), *samples) == 0
    said, begun = capsys.readouterr()
    assert "rehearsing rank 0 of 4 on NVIDIA H100 80GB HBM3\n" in begun
    # A large model is rehearsed for minutes, in which these texts are printed.
    told = (tmp_path / "run.told").read_text().splitlines()
    assert told[0] == "rank 0: building the model"
    assert told[-1] == "rank 0: step 3 of 3, checkpoint"
    assert "rank 0: step 2 of 3, forward_backward, forward pass 1 of 1" in told, told
    assert "rank 0: step 3 of 3, monitors" in told
    assert "passed: the run would succeed" in said and "rank 0 of 4" in said
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is True and report["error"] is None and report["ranks"] == [0]
    assert 0 < report["peak_memory_bytes"] < report["device_memory_bytes"]
    assert report["modelled_seconds"] > 0 and report["stream_order_findings"] == 0
    parts = ["forward_backward", "optimizer", "monitors", "validation", "checkpoint"]
    assert list(report["phases"]) == parts
    for name, counts in report["phases"].items():
        assert counts.keys() >= FIGURES and counts["launches"] > 0
        (line,) = (line.split() for line in said.splitlines() if line.startswith(f"{name} "))
        figures = [
            counts["peak_memory_bytes"] / 2**30, counts["launches"], counts["triton_launches"],
            counts["collectives"], counts["collective_bytes"] / 2**20, counts["host_reads"],
            counts["synchronizations"], 1e3 * counts["modelled_seconds"],
        ]  # fmt: skip
        shown = [float(text.replace(",", "")) for text in line[1:]]
        assert shown == pytest.approx(figures, abs=0.051)
    step = re.search(r"rules: (\S+) ms \(planned: (\S+) ms\), MFU (\S+)%", said)
    figures = [1e3 * report["modelled_seconds"], 1e3 * report["planned_seconds"]]
    assert [float(x) for x in step.groups()[:2]] == pytest.approx(figures, rel=1e-3)
    assert float(step[3]) == pytest.approx(100 * report["mfu"], abs=0.051)
    plain = report["phases"]["optimizer"]
    assert plain["host_reads"] == plain["synchronizations"] == 0 < plain["collective_bytes"]


def test_the_place_of_each_rank_is_stated(tmp_path):
    paths = [tmp_path / f"{i}.out" for i in range(3)]
    (tmp_path / "0.at").write_text("rank 0: step 3 of 3, checkpoint")
    paths[0].touch()
    (tmp_path / "1.at").write_text("rank 8: step 2 of 3, optimizer")
    text = "1 of 3 ranks are rehearsed; rank 8: step 2 of 3, optimizer"
    assert processes.places(paths) == text


def counted(scenario: Scenario, optimizer: int, memory: int) -> RankReport:
    """Return a report of three steps. Each step launches 5 kernels, plus 10 kernels per
    micro-batch."""
    counts = {
        (1, STEP): Counts(peak_memory_bytes=memory),
        (2, STEP): Counts(launches=25, peak_memory_bytes=2 * memory),
        (2, OPTIMIZER): Counts(launches=optimizer),
        (3, STEP): Counts(launches=30),
        (3, OPTIMIZER): Counts(launches=optimizer + 1),
        (3, "monitors"): Counts(launches=100),
        (3, "checkpoint"): Counts(launches=3),
    }
    marks = [Counts(launches=5), Counts(launches=15)]
    return RankReport(0, scenario, counts=counts, marks=marks)


def test_a_report_counts_all_micro_batches_and_the_busiest_rank(tmp_path):
    config = tiny_config(str(tmp_path), "muon", train__exit_step=3)
    scenario = Scenario(config, microbatches=6, rehearsed=2)
    reports = [counted(scenario, 7, 50), counted(scenario, 9, 40)]
    report = rehearsal.Report(plan_run(config, 2), reports)
    assert {name: counts.launches for name, counts in report.phases.items()} == {
        STEP: 5 + 6 * 10, OPTIMIZER: 9, "monitors": 5 + 1 + 100, "validation": 0, "checkpoint": 3
    }  # fmt: skip
    # In later steps, memory includes what monitors keep.
    assert report.phases[STEP].peak_memory_bytes == report.peak_memory_bytes == 50
    assert report.error is None


def test_one_rank_per_stage_or_the_asked_ranks_are_rehearsed(tmp_path):
    config = tiny_config(str(tmp_path), "muon", parallel__pipeline=2)
    assert [rehearsal.chosen(config, rank, 8) for rank in (None, 3, -1)] == [
        [0, 4], [3], [*range(8)]
    ]  # fmt: skip


def test_a_run_that_would_break_says_where(rehearse, tmp_path, capsys):
    (tmp_path / "small.yaml").write_text("{base: h100, name: small, memory_bytes: 300000}")
    device = str(tmp_path / "small.yaml")
    code = rehearse("--gpus", "1", "--device", device, "--json", str(tmp_path / "report.json"))
    assert code == 1
    assert "the run would fail: out of memory in" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] is False and report["error"].startswith("out of memory")
    assert report["device_memory_bytes"] == 300000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus", "3"], "train.global_batch must be divisible"),
        (["--gpus", "4", "parallel.tensor=3"], "tensor"),
        (["--gpus", "4", "--rank", "4"], "--rank must be below --gpus 4, got 4"),
        (["--gpus", "4", "--device", "h900"], "device must be a file or one of h100"),
        (["--gpus", "4", "train.stepz=1"], "train.steps"),
    ],
)
def test_wrong_input_is_said_and_exits_with_2(options, words, rehearse, refusal):
    said = refusal(rehearse(*options))
    assert said.startswith("error: ") and words in said


def test_without_a_compiler_it_says_what_is_missing(rehearse, monkeypatch, tmp_path, refusal):
    monkeypatch.setattr(rehearsal, "perform", processes.perform)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert "no-such-compiler does not exist" in refusal(rehearse("--gpus", "1"))


@pytest.mark.slow
def test_nothing_lives_on_when_it_is_stopped(tmp_path):
    """SIGTERM ends the command and the processes of all rehearsed ranks."""
    command = [sys.executable, "pretrain.py", "--config", "configs/llama271m_sso.yaml"]
    command += ["--rehearse", "--gpus", "8", "--rank", "all", f"run.dir={tmp_path}/run"]
    with open(tmp_path / "said.txt", "w") as said:
        running = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=said)
    me = psutil.Process(running.pid)
    end = time.monotonic() + 600
    # The fork server, the tracker of its resources, and a rank.
    while len(found := me.children(recursive=True)) < 3:
        assert running.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    running.send_signal(signal.SIGTERM)
    running.wait()
    _, alive = psutil.wait_procs(found, timeout=300)
    assert not alive
