"""A SLURM cluster of a controller and two nodes on this machine."""

import re
import secrets
from collections.abc import Sequence
from pathlib import Path

from tests.cluster import network
from tests.cluster.network import HEAD, NODES, Network, until

COMMANDS = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge",
}  # fmt: skip
"""Debian package of every command that SLURM needs."""
NODE_TIMEOUT, KILL_WAIT = 20, 60
"""Seconds until SLURM gives up on a silent node, and until it kills jobs that ignore SIGTERM."""

SLURM_CONF = """
ClusterName=tests
SlurmctldHost={head}
SlurmUser=root
# A job that is queued again waits until the credentials of its last start are void.
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n.spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout={timeout}
KillWait={kill_wait}
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName={nodes} CPUs=2 RealMemory=1000 Gres=gpu:1
PartitionName=main Nodes=ALL Default=YES
"""
MUNGE = """
mkdir -m 755 /run/munge
munged --force --key-file="$2/munge.key" --log-file="$2/$1.munge.log" \
    --pid-file=/run/munge/pid --seed-file=/run/munge/seed
"""


def missing() -> str:
    """Return the reason why this machine cannot run a cluster, or '' if it can."""
    return network.missing(COMMANDS)


class Cluster(Network):
    """Context manager that runs a cluster. Jobs are submitted from its controller, the head."""

    def start(self) -> None:
        """Start the controller and the nodes."""
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(64))
        (folder / "munge.key").chmod(0o400)
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                folder=folder,
                head=HEAD,
                nodes=",".join(NODES),
                timeout=NODE_TIMEOUT,
                kill_wait=KILL_WAIT,
            ),
        )
        super().start()

    def start_head(self) -> None:
        """Start the controller."""
        super().start_head()
        self._munge(HEAD)
        self.head.check("slurmctld")

    def switch_on(self, name: str) -> None:
        """Start a node, and wait until SLURM can use it."""
        super().switch_on(name)
        self._munge(name)
        self.nodes[name].check("slurmd", "-N", name)
        until(lambda: self.node_state(name) in ("idle", "mixed", "allocated"), f"{name} is up", 60)

    def _munge(self, name: str) -> None:
        self.nodes[name].check("bash", "-euc", MUNGE, "_", name, str(self.folder))

    def node_state(self, name: str) -> str:
        """Return a node's state in SLURM: idle, allocated, down*, ..."""
        return self.head.run("sinfo", "--noheader", "--nodes", name, "--format=%T").stdout.strip()

    def submit(
        self, folder: Path, *script: str, options: Sequence[str] = (), **variables: str
    ) -> int:
        """Submit a batch script with its arguments from a folder, and return the job id."""
        said = self.head.check("sbatch", *options, *script, folder=folder, **variables)
        (number,) = re.findall(r"Submitted batch job (\d+)", said)
        return int(number)

    def job(self, number: int) -> dict[str, str]:
        """Return a job's fields in SLURM, such as JobState, Restarts and ExitCode."""
        text = self.head.check("scontrol", "show", "job", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def until_ended(self, number: int, seconds: float = 300) -> dict[str, str]:
        """Wait until a job has ended and its nodes are free, and return its fields."""
        going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        until(lambda: self.job(number)["JobState"] not in going, f"end of job {number}", seconds)
        return self.job(number)

    def cancel_all(self) -> None:
        """Cancel every job and wait until all nodes are idle."""
        self.head.check("scancel", "--user=root")
        for name in set(NODES) - set(self.nodes):
            self.switch_on(name)
        for name in NODES:
            self.mend(name)
            until(lambda name=name: self.node_state(name) == "idle", f"{name} is idle", 120)
