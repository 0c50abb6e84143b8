"""A SLURM of a controller and two nodes on this machine, each in namespaces of its own.

A node has its own processes, mounts, network interface and host name, so it can be switched off and
its link cut. Everything of a node dies with the process that started it: what remains is a folder.
"""

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

COMMANDS = {
    "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge",
    "ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "nsenter": "util-linux",
}  # fmt: skip
"""Debian's package of every command that a cluster needs."""
NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
HEAD, NODES = "head", ("node1", "node2")
ADDRESSES = {HEAD: "10.77.0.1", "node1": "10.77.0.2", "node2": "10.77.0.3"}
BRIDGE = "bridge"
NODE_TIMEOUT, KILL_WAIT = 20, 60
"""Seconds after which SLURM gives a silent node up, and ends what ignores SIGTERM."""
REAPER = "while :; do sleep 3600 & wait; done"
"""The first process of a node, a shell, as shells bury the processes of others."""

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
SET_UP = """
hostname "$1"
ip link set lo up
mount -t tmpfs none /run
mkdir -m 755 /run/munge
mount --bind "$2/hosts" /etc/hosts
munged --force --key-file="$2/munge.key" --log-file="$2/$1.munge.log" \
    --pid-file=/run/munge/pid --seed-file=/run/munge/seed
"""


def missing() -> str:
    """Return why there can be no cluster here, '' if there can be one."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a cluster needs Linux and root, for namespaces"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    absent = sorted({p for name, p in COMMANDS.items() if shutil.which(name, path=path) is None})
    if absent:
        return f"a cluster needs Debian's packages: apt-get install {' '.join(absent)}"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        return f"a cluster needs namespaces and veth: {tried.stderr.strip()}"
    return ""


def until(condition: Callable[[], bool], what: str, seconds: float = 300) -> float:
    """Wait until `condition()` is true and return the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not in {seconds:g} seconds"
        time.sleep(0.05)
    return time.monotonic() - began


class Node:
    """A set of namespaces, with `process` outside of it and `first` as its first process."""

    def __init__(self, name: str, folder: Path) -> None:
        """Make the namespaces. When the process that makes them ends, so do all of them."""
        self.name = name
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin:/sbin",
            "OMP_NUM_THREADS": "1",
        }
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES]
        words += ["--fork", "--kill-child", "--mount-proc", "bash", "-c", REAPER]
        self.process = subprocess.Popen(
            words, env=self.environment, stdout=subprocess.DEVNULL, start_new_session=True
        )
        until(lambda: bool(self._children()), f"namespaces of {name}", 20)
        (self.first,) = self._children()
        until(lambda: self.run("true").returncode == 0, f"entering {name}", 20)
        self.check("bash", "-euc", SET_UP, "_", name, str(folder))

    def _children(self) -> list[int]:
        process = self.process.pid
        assert self.process.poll() is None
        # While it is still setpriv or unshare alone, it has none.
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
        return [int(word) for word in text.split()]

    def run(
        self, *words: str, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node."""
        enter = ["nsenter", "--target", str(self.first), *NAMESPACES]
        if folder is not None:
            enter.append(f"--wd={folder}")
        return subprocess.run(
            [*enter, *words],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def check(self, *words: str, folder: Path | None = None, **variables: str) -> str:
        """Run a command that must succeed, and return what it prints."""
        done = self.run(*words, folder=folder, **variables)
        assert done.returncode == 0, (self.name, words, done.stdout, done.stderr)
        return done.stdout

    def processes(self, words: str) -> list[int]:
        """Return the ids, on the node, of the processes whose command line has `words`."""
        found = self.run("pgrep", "--full", "--", words).stdout.split()
        return [int(word) for word in found]

    def end(self) -> None:
        """End every process of the node at once."""
        self.process.kill()
        self.process.wait()
        first = Path(f"/proc/{self.first}")
        until(lambda: not first.exists(), f"the end of {self.name}", 60)


class Cluster:
    """A context in which there is a cluster; jobs are submitted from its controller."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        folder = self.folder
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(secrets.token_bytes(64))
        (folder / "munge.key").chmod(0o400)
        hosts = {"localhost": "127.0.0.1"} | ADDRESSES
        (folder / "hosts").write_text("".join(f"{at} {name}\n" for name, at in hosts.items()))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                folder=folder,
                head=HEAD,
                nodes=",".join(NODES),
                timeout=NODE_TIMEOUT,
                kill_wait=KILL_WAIT,
            )
        )
        self.nodes[HEAD] = head = Node(HEAD, folder)
        head.check("ip", "link", "add", BRIDGE, "type", "bridge")
        head.check("ip", "address", "add", f"{ADDRESSES[HEAD]}/24", "dev", BRIDGE)
        head.check("ip", "link", "set", BRIDGE, "up")
        head.check("slurmctld")
        for name in NODES:
            self.switch_on(name)

    @property
    def head(self) -> Node:
        """The controller."""
        return self.nodes[HEAD]

    def switch_on(self, name: str) -> None:
        """Start a node, and wait until SLURM can use it."""
        node = self.nodes[name] = Node(name, self.folder)
        # The link is made from outside: only there the node's first process has this number.
        link = ["ip", "link", "add", name, "type", "veth", "peer", "eth0", "netns", str(node.first)]
        subprocess.run(
            ["nsenter", "--target", str(self.head.first), "--net", *link],
            check=True,
            env=node.environment,
        )
        self.head.check("ip", "link", "set", name, "master", BRIDGE, "up")
        node.check("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        node.check("ip", "link", "set", "eth0", "up")
        node.check("slurmd", "-N", name)
        until(lambda: self.node_state(name) in ("idle", "mixed", "allocated"), f"{name} is up", 60)

    def switch_off(self, name: str) -> None:
        """Take a node's power: its link is dead before its processes could say that they end."""
        self.cut(name)
        self.nodes.pop(name).end()
        # Its end of the link goes with it, but only after a while.
        self.head.run("ip", "link", "delete", name)

    def cut(self, name: str) -> None:
        """Cut the link of a node."""
        self.head.check("ip", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Mend the link of a node."""
        self.head.check("ip", "link", "set", name, "up")

    def stop(self) -> None:
        """End everything."""
        for node in self.nodes.values():
            node.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def node_state(self, name: str) -> str:
        """Return what SLURM says of a node: idle, allocated, down*, ..."""
        return self.head.run("sinfo", "--noheader", "--nodes", name, "--format=%T").stdout.strip()

    def submit(
        self, folder: Path, *script: str, options: Sequence[str] = (), **variables: str
    ) -> int:
        """Submit a batch script with its arguments from a folder, and return the job's number."""
        said = self.head.check("sbatch", *options, *script, folder=folder, **variables)
        (number,) = re.findall(r"Submitted batch job (\d+)", said)
        return int(number)

    def job(self, number: int) -> dict[str, str]:
        """Return SLURM's facts of a job, such as JobState, Restarts and ExitCode."""
        text = self.head.check("scontrol", "show", "job", str(number))
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def until_ended(self, number: int, seconds: float = 300) -> dict[str, str]:
        """Wait until a job is over and its nodes are free, and return its facts."""
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
