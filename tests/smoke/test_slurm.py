"""scripts/slurm/pretrain.sbatch, run on this machine with fake srun and scontrol commands."""

import json
import os
import re
import subprocess
import time
from pathlib import Path
from typing import TextIO

import pytest

from tests.launch import ROOT, environment
from training.config import check, load_config

SCONTROL = """case $1 in
    show) for i in {1..9999}; do echo localhost; done ;;
    requeue) echo "$2" >> "$QUEUE" ;;
esac"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the commands of a SLURM node."""
    put(tmp_path, "scontrol", SCONTROL)
    return tmp_path


def put(folder: Path, name: str, text: str) -> None:
    """Write a command."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def job(
    folder: Path,
    *overrides: str,
    name: str = "pretrain",
    output: TextIO | int = subprocess.PIPE,
    **variables: str,
) -> subprocess.Popen[str]:
    """Start a batch script as SLURM does, in a separate session."""
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NAME": "tiny",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NNODES": "1",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_CPUS_ON_NODE": "48",
        "MASTER_PORT": "0",
        "RUN_DIR": str(folder / "run"),
        "QUEUE": str(folder / "queue"),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    script = ["bash", f"scripts/slurm/{name}.sbatch", str(folder / "config.yaml")]
    return subprocess.Popen(
        [*script, *overrides],
        cwd=ROOT,
        env=environment() | slurm | variables,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def queued(folder: Path) -> list[str]:
    """Return the requeued jobs."""
    queue = folder / "queue"
    return queue.read_text().split() if queue.exists() else []


MADE = "for i in {1..900}; do [ -e $RUN_DIR/STOP ] && break; sleep 0.1; done; [ -e $RUN_DIR/STOP ]"
STOPPED = f"kill -USR1 $PPID; {MADE} || exit 9"
"""Send SLURM's signal, and wait for the STOP file, which ranks remove when they start."""


@pytest.mark.parametrize(
    ("srun", "left", "done", "code", "again"),
    [
        ("exit 3", 5000, False, 3, False),
        ("exit 3", 100, False, 3, False),
        ("exit 0", 5000, False, 0, False),
        ("exit 0", 100, False, 0, True),  # the ranks detected the end
        ("exit 0", 100, True, 0, False),
        (f"{STOPPED}; exit 0", 5000, False, 0, True),
        (f"{STOPPED}; exit 0", 5000, True, 0, False),
        (f"{STOPPED}; exit 3", 5000, False, 3, True),
        (f"{STOPPED}; kill -TERM $PPID; exit 1", 5000, False, 1, False),
        ("kill -USR1 $PPID; sleep 2; [ ! -e $RUN_DIR/STOP ]", 1000, False, 0, False),
        (f"{STOPPED}; rm $RUN_DIR/STOP; {MADE} || exit 9; exit 0", 5000, False, 0, True),
    ],
)
def test_when_a_job_is_queued_again(srun, left, done, code, again, folder):
    put(folder, "srun", srun)
    (folder / "run").mkdir()
    if done:
        (folder / "run" / "DONE").touch()
    with job(folder, SLURM_JOB_END_TIME=str(int(time.time()) + left)) as process:
        process.communicate(timeout=300)
    assert process.returncode == code
    assert queued(folder) == ["17"] * again
    assert not (folder / "run" / "STOP").exists()


def test_a_run_that_saves_nothing_is_not_queued_again(folder):
    text = "stopped by the SLURM time limit after step 3 of 9; "
    text += "the run was not saved, because checkpoint.interval is 0"
    stopped = json.dumps({"kind": "stopped", "text": text})
    put(folder, "srun", f"echo '{stopped}' >> $RUN_DIR/events.jsonl; exit 0")
    with job(folder, SLURM_JOB_END_TIME=str(int(time.time()) + 100)) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and queued(folder) == []
    assert "not requeued: without checkpoints, the run would start over" in printed


@pytest.mark.parametrize(
    ("squeue", "again"),
    [
        ("date --date='+100 seconds' +%FT%T", True),
        ("date --date='+5000 seconds' +%FT%T", False),
        ("echo NONE", False),
        ("exit 1", False),
    ],
)
def test_an_old_slurm_is_asked_when_the_job_ends(squeue, again, folder):
    put(folder, "srun", "echo end=$SLURM_JOB_END_TIME; exit 0")
    put(folder, "squeue", squeue)
    with job(folder) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    assert queued(folder) == ["17"] * again
    known = squeue.startswith("date")
    assert ("end=\n" not in printed) is known
    assert ("warning: the job's end time is unknown" in printed) is not known


@pytest.mark.parametrize("name", ["pretrain", "preflight"])
def test_a_job_with_its_own_nodes_asks_for_their_memory(name):
    """Without --mem, SLURM limits even an exclusive job to the cluster's default memory."""
    script = (ROOT / "scripts" / "slurm" / f"{name}.sbatch").read_text()
    assert "\n#SBATCH --exclusive\n" in script and "\n#SBATCH --mem=0\n" in script


@pytest.mark.parametrize("name", ["pretrain", "preflight"])
@pytest.mark.parametrize(("asked", "given"), [({}, "48"), ({"SLURM_CPUS_PER_TASK": "12"}, "12")])
def test_ranks_have_the_processors_of_their_node_or_those_asked_for(name, asked, given, folder):
    """srun has ignored SLURM_CPUS_PER_TASK since version 22.05."""
    put(folder, "srun", "echo processors=$SRUN_CPUS_PER_TASK,$SLURM_CPUS_PER_TASK")
    with job(folder, name=name, **asked) as process:
        printed, _ = process.communicate(timeout=300)
    assert f"processors={given},{given}" in printed


EVENT = json.dumps({"kind": "failed", "rank": 0, "absent": [], "text": "rank 1 {left}"})


@pytest.mark.parametrize(
    ("srun", "last"),
    [
        (f"echo '{EVENT}' >> $RUN_DIR/events.jsonl; echo srun: error; exit 1", "rank 1 {left}"),
        (f"echo '{EVENT}' >> $RUN_DIR/events.jsonl; echo well; exit 0", None),
        ("echo srun: error; exit 1", None),  # the last event is from an earlier start
    ],
)
def test_why_a_run_failed_is_the_last_line(srun, last, folder):
    (folder / "run").mkdir()
    old = folder / "run" / "events.jsonl"
    old.write_text(EVENT.replace("rank 1", "rank 2") + "\n")
    os.utime(old, (time.time() - 60, time.time() - 60))
    put(folder, "srun", srun)
    with job(folder) as process:
        printed, _ = process.communicate(timeout=300)
    assert printed.splitlines()[-1] == (
        f"error: {last}" if last else re.findall(r"echo (srun: error|well);", srun)[0]
    )


@pytest.mark.parametrize(
    ("srun", "last"),
    [
        ("echo error: no run.steps; echo Traceback; echo error: no run.steps; exit 2", None),
        ('PATH=/usr/bin:/bin "$@"', "torchrun must be on the PATH of .*: activate the environment"),
    ],
)
def test_why_a_run_was_refused_is_the_last_line(srun, last, folder):
    """Ranks that reject their config write no event, because they have no run folder."""
    put(folder, "srun", f"shift\n{srun}")
    (folder / "job.out").write_text("error: of an earlier start\n")
    with (folder / "job.out").open("a") as output, job(folder, output=output) as process:
        process.wait(300)
    printed = (folder / "job.out").read_text().splitlines()
    assert process.returncode == 2 and "earlier" not in printed[-1]
    assert re.match(f"error: {last or 'no run.steps'}", printed[-1])


@pytest.mark.parametrize("late", [True, False])
def test_that_a_run_is_done_is_the_last_line_once(late, folder):
    (folder / "run").mkdir()
    done = "done: step 9 of 9, output in runs/a"
    event = json.dumps({"kind": "done", "text": done})
    warning = "echo torchrun: the rendezvous has failed to shut down;" if late else ""
    put(folder, "srun", f"echo '{event}' >> $RUN_DIR/events.jsonl; echo '{done}'; {warning} exit 0")
    # As in SLURM, all output of a job goes to one file.
    with (folder / "job.out").open("w") as output, job(folder, output=output) as process:
        process.wait(300)
    printed = (folder / "job.out").read_text().splitlines()
    assert process.returncode == 0 and printed[-1] == done
    assert printed.count(done) == 1 + late


def test_the_script_outlives_the_ranks_that_scancel_ends(folder):
    """The ranks may exit just as the script receives its signal, as happens in some of these
    jobs."""
    event = EVENT.replace("failed", "stopped")
    cancel = "kill -TERM $PPID"
    ends = f"echo '{event}' >> $RUN_DIR/events.jsonl; {cancel}; exit 1"
    put(folder, "srun", f"{cancel}; sleep 0.5; {ends}")
    processes = [job(folder) for _ in range(8)]
    for process in processes:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 1 and queued(folder) == []
        assert printed.splitlines()[-1] == "rank 1 {left}"


def test_output_needs_no_folder_and_examples_can_run():
    """sbatch fails silently if the folder for its output does not exist."""
    script = (ROOT / "scripts" / "slurm" / "pretrain.sbatch").read_text()
    (output,) = re.findall(r"^#SBATCH --output=(.*)", script, re.MULTILINE)
    assert "/" not in output
    (gpus,) = re.findall(r"^#SBATCH --gpus-per-node=(\d+)", script, re.MULTILINE)
    pages = [ROOT / "scripts" / "slurm" / "README.md", ROOT / "docs" / "running.md"]
    for page in pages:
        text = re.sub(r"\\\n\s+", "", page.read_text())
        (example,) = re.findall(r"^    .*sbatch .*--nodes=(\d+) \S+ (.*)$", text, re.MULTILINE)
        config, *overrides = example[1].split()
        check(load_config(ROOT / config, overrides), int(example[0]) * int(gpus))


@pytest.mark.parametrize(
    ("overrides", "variables", "said"),
    [
        (
            ["run.dir=elsewhere"],
            {},
            "RUN_DIR instead of run.dir=elsewhere: this script needs to know the folder",
        ),
        (
            ["run={dir: elsewhere}"],
            {},
            "RUN_DIR instead of run={dir: elsewhere}: this script needs to know the folder",
        ),
        (
            [],
            {"RUN_DIR": "", "SLURM_JOB_NAME": "pretrain.sbatch"},
            "RUN_DIR or --job-name, got the job name pretrain.sbatch",
        ),
    ],
)
def test_the_run_folder_is_named_once(overrides, variables, said, folder):
    with job(folder, *overrides, **variables) as process:
        printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2 and printed == f"error: set {said}\n"


def test_a_task_of_a_study_passes_its_options_on_and_no_end_of_the_job(folder):
    """If a run stopped at the end of the job, the study would count the run as failed."""
    put(folder, "python", 'printf "%s\\n" "end=${SLURM_JOB_END_TIME-unknown}" "$@"')
    options = ["runs/a b", "--jobs", "2", "train.steps=3"]
    with job(folder, *options, name="study", SLURM_JOB_END_TIME="1") as process:
        printed, _ = process.communicate(timeout=300)
    study = ["scripts/study.py", str(folder / "config.yaml"), *options]
    assert printed.splitlines() == ["end=unknown", *study] and process.returncode == 0


RANKS = ["--rdzv-backend=c10d", "--rdzv-id=17", "--rdzv-endpoint=localhost:0"]
"""torchrun options with which the ranks of a job find each other."""


@pytest.mark.parametrize(("asked", "restarts"), [({}, "0"), ({"MAX_RESTARTS": "2"}, "2")])
@pytest.mark.parametrize("name", ["pretrain", "preflight"])
def test_ranks_are_started_as_the_job_asks(name, asked, restarts, folder):
    put(folder, "srun", 'shift; exec "$@"')
    put(folder, "torchrun", 'printf "%s\\n" "$@" "on $MASTER_ADDR"')
    with job(folder, "train.steps=3", "log.trackers=[a, b]", name=name, **asked) as process:
        printed, _ = process.communicate(timeout=300)
    config, common = str(folder / "config.yaml"), ["train.steps=3", "log.trackers=[a, b]"]
    lines = printed.splitlines()
    started = ["--nnodes=1", "--nproc-per-node=2", *RANKS]
    program = ["scripts/preflight.py", config, *common]
    if name == "pretrain":
        started.insert(2, f"--max-restarts={restarts}")
        program = ["pretrain.py", "--config", config, f"run.dir='{folder / 'run'}'", *common]
    assert lines[lines.index("--nnodes=1") :] == [*started, *program, "on localhost"]
    assert process.returncode == 0
