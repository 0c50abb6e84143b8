"""Jobs of scripts/slurm/pretrain.sbatch on a SLURM cluster of two nodes that fail at times.

All jobs but two train the same run. After any failure, it must end like the undisturbed run.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.network import NODES, until
from tests.killed_runs import SMALL, differences, last_step
from training.checkpoint.checkpoints import steps as saved_steps

STEPS, INTERVAL = 120, 10
TIMEOUT = 60
"""Seconds that a rank waits for another rank."""
RUN = [
    *SMALL, "run.device=cpu", f"checkpoint.interval={INTERVAL}", f"train.steps={STEPS}",
    f"parallel.timeout_seconds={TIMEOUT}",
]  # fmt: skip
RANK = "python -u pretrain.py"

pytestmark = pytest.mark.timeout(1200)


class Jobs:
    """Submits jobs from a clone. Each run folder is named after its job."""

    def __init__(self, cluster: Cluster, clone: Path) -> None:
        self.cluster, self.clone = cluster, clone

    def submit(self, name: str, *more: str, limit: str = "60", **variables: str) -> int:
        """Submit a short run as in the README, for nodes with one GPU."""
        script = ["scripts/slurm/pretrain.sbatch", "configs/tiny_sso.yaml", *RUN]
        options = [f"--job-name={name}", "--gpus-per-node=1", "--cpus-per-task=1"]
        options += [f"--time={limit}"]
        options += [word for word in more if word.startswith("--")]
        keys = [word for word in more if not word.startswith("--")]
        return self.cluster.submit(self.clone, *script, *keys, options=options, **variables)

    def folder(self, name: str) -> Path:
        """Return the run folder of a job."""
        return self.clone / "runs" / name

    def printed(self, name: str, number: int) -> str:
        """Return the output of a job."""
        file = self.clone / f"{name}-{number}.out"
        return file.read_text(errors="replace") if file.exists() else ""

    def until_steps(self, name: str, steps: int) -> float:
        """Wait until a run has taken more than `steps` steps, and return the elapsed seconds."""
        return until(lambda: last_step(self.folder(name)) > steps, f"step {steps + 1} of {name}")

    def until_saved(self, name: str) -> None:
        """Wait until a run has a checkpoint."""
        until(lambda: bool(saved_steps(self.folder(name))), f"a checkpoint of {name}")

    def rank_of(self, node: str) -> int:
        """Return the process id of the rank on a node. Its child processes have the same command
        line."""
        return min(self.cluster.nodes[node].processes(RANK))


@pytest.fixture
def jobs(cluster: Cluster, clone: Path) -> Iterator[Jobs]:
    """Submits jobs. After the test, all jobs are cancelled and all nodes are restored."""
    yield Jobs(cluster, clone)
    cluster.cancel_all()


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster, clone: Path) -> tuple[Jobs, int]:
    """The first job of a fresh clone, which runs undisturbed, and its job id."""
    jobs = Jobs(cluster, clone)
    assert not any((clone / name).exists() for name in ("runs", "logs", "data"))
    number = jobs.submit("undisturbed")
    cluster.until_ended(number)
    return jobs, number


def assert_as_undisturbed(jobs: Jobs, name: str, number: int) -> None:
    """Wait for the end of a job and compare it with the undisturbed job bit for bit."""
    facts = jobs.cluster.until_ended(number, 600)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), jobs.printed(
        name, number
    )
    assert (jobs.folder(name) / "DONE").exists()
    assert differences(jobs.folder(name), jobs.folder("undisturbed"), STEPS) == []


def test_the_first_job_of_a_fresh_clone_runs_to_its_end(undisturbed):
    jobs, number = undisturbed
    facts = jobs.cluster.job(number)
    printed = jobs.printed("undisturbed", number)
    assert (facts["JobState"], facts["ExitCode"]) == ("COMPLETED", "0:0"), printed
    assert facts["Restarts"] == "0" and facts["NumNodes"] == "2"
    last = printed.splitlines()[-1]
    assert last == f"done: step {STEPS} of {STEPS}, output in runs/undisturbed"
    assert last_step(jobs.folder("undisturbed")) == STEPS


def test_a_job_that_reaches_its_time_limit_three_times_is_queued_again(undisturbed, jobs):
    # With a margin of ten minutes each start saves and ends within its first steps.
    number = jobs.submit("limit", limit="2")
    until(lambda: jobs.cluster.job(number)["Restarts"] == "3", "three starts", 600)
    until(lambda: jobs.cluster.job(number)["JobState"] == "PENDING", "the fourth", 100)
    jobs.cluster.head.check("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    assert_as_undisturbed(jobs, "limit", number)
    printed = jobs.printed("limit", number)
    assert printed.count("stopped by the SLURM time limit after step") >= 3
    assert printed.count("continuing from runs/limit/checkpoints/step_") >= 3
    assert "warning: the job's end time is unknown" not in printed


def test_slurms_signal_then_cancel_both_save(jobs):
    endless = ["train.steps=1000000", "checkpoint.interval=1000000", "stop.slurm_margin_seconds=0"]
    number = jobs.submit("stopped", "--signal=B:USR1@60", *endless, limit="2")
    folder = jobs.folder("stopped")
    # The signal arrives up to a minute early, possibly before the ranks have started.
    until(lambda: jobs.cluster.job(number)["Restarts"] == "1", "the signal", 300)
    jobs.cluster.head.check("scontrol", "update", f"JobId={number}", "TimeLimit=60")
    (saved,) = saved_steps(folder)
    assert saved == last_step(folder) > 0
    assert "stopped by a STOP file after step" in jobs.printed("stopped", number)

    jobs.until_steps("stopped", saved + 3)
    jobs.cluster.head.check("scancel", str(number))
    facts = jobs.cluster.until_ended(number)
    printed = jobs.printed("stopped", number)
    assert facts["JobState"] == "CANCELLED" and facts["Restarts"] == "1", printed
    assert max(saved_steps(folder)) == last_step(folder) > saved + 3, printed
    assert not (folder / "STOP").exists()
    said = f"stopped by a signal after step {last_step(folder)} of 1000000"
    # Before this line torchrun prints tracebacks of its own signal.
    assert said in printed.splitlines()[-1]

    again = jobs.submit("stopped", *endless)
    jobs.until_steps("stopped", last_step(folder) + 1)
    step = max(saved_steps(folder))
    assert f"continuing from runs/stopped/checkpoints/step_{step:08d}" in jobs.printed(
        "stopped", again
    )


def test_a_killed_rank_without_restarts_ends_the_job_and_is_named(jobs):
    number = jobs.submit("killed", "train.steps=1000000")
    jobs.until_saved("killed")
    survivor = jobs.rank_of("node1")
    jobs.cluster.nodes["node2"].check("kill", "-KILL", str(jobs.rank_of("node2")))
    ranks = jobs.cluster.nodes["node1"]
    until(lambda: survivor not in ranks.processes(RANK), "the end of the survivor", 60)
    facts = jobs.cluster.until_ended(number)
    printed = jobs.printed("killed", number)
    assert (facts["JobState"], facts["Restarts"]) == ("FAILED", "0"), printed
    assert "no answer from rank 1 (host node2)" in printed.splitlines()[-1], printed


def test_a_killed_rank_is_started_again_in_the_job(undisturbed, jobs):
    number = jobs.submit("restarted", MAX_RESTARTS="3")
    jobs.until_saved("restarted")
    rank = str(jobs.rank_of("node2"))
    jobs.cluster.nodes["node2"].check("kill", "-KILL", rank)
    assert_as_undisturbed(jobs, "restarted", number)
    assert jobs.cluster.job(number)["Restarts"] == "0"
    assert jobs.printed("restarted", number).count("continuing from") == 1


@pytest.mark.parametrize("node", NODES)
def test_a_lost_node_queues_the_job_again(node, undisturbed, jobs):
    name = f"lost-{node}"
    number = jobs.submit(name)
    jobs.until_saved(name)
    cluster = jobs.cluster
    cluster.switch_off(node)
    step = last_step(jobs.folder(name))
    until(lambda: cluster.node_state(node) == "down*", "SLURM gives the node up", 120)
    until(lambda: cluster.job(number)["JobState"] == "PENDING", "the job is queued", 200)
    cluster.switch_on(node)
    jobs.until_steps(name, step)
    assert_as_undisturbed(jobs, name, number)
    assert cluster.job(number)["Restarts"] == "1"


def test_a_link_that_stays_cut_ends_the_attempt_and_the_job_goes_on(undisturbed, jobs):
    number = jobs.submit("cut", MAX_RESTARTS="3")
    jobs.until_saved("cut")
    cluster = jobs.cluster
    cluster.cut("node2")
    until(lambda: cluster.job(number)["JobState"] == "PENDING", "the job is queued", 300)
    cluster.mend("node2")
    assert_as_undisturbed(jobs, "cut", number)
