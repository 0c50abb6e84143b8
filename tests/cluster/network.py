"""Nodes on this machine in separate namespaces, connected by a bridge.

A node has its own processes, mounts, tmpfs, network interface and host name, so it can be switched
off and its link cut. A node ends with the process that started it; only a folder remains.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

COMMANDS = {
    "ip": "iproute2", "unshare": "util-linux", "setpriv": "util-linux", "nsenter": "util-linux",
}  # fmt: skip
"""Debian package of every command that nodes need."""
NAMESPACES = ("--mount", "--pid", "--net", "--uts", "--ipc")
HEAD, NODES = "head", ("node1", "node2")
ADDRESSES = {HEAD: "10.77.0.1", "node1": "10.77.0.2", "node2": "10.77.0.3"}
BRIDGE = "bridge"
REAPER = "while :; do sleep 3600 & wait; done"
"""The first process of a node: a shell, because shells reap orphaned processes."""

SET_UP = """
hostname "$1"
ip link set lo up
mount -t tmpfs none /run
mount -t tmpfs none /dev/shm
mount --bind "$2/hosts" /etc/hosts
"""


def missing(more: Mapping[str, str] | None = None) -> str:
    """Return the reason why this machine cannot run nodes, or '' if it can. `more` lists other
    required commands."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "nodes in namespaces need Linux and root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    commands = COMMANDS | dict(more or {})
    absent = sorted({p for name, p in commands.items() if shutil.which(name, path=path) is None})
    if absent:
        return f"Debian's packages are missing: apt-get install {' '.join(absent)}"
    tried = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", "--mount-proc", "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
    )
    if tried.returncode:
        return f"nodes need namespaces and veth: {tried.stderr.strip()}"
    return ""


def until(condition: Callable[[], bool], what: str, seconds: float = 300) -> float:
    """Wait until `condition()` is true and return the elapsed seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, f"{what}: not in {seconds:g} seconds"
        time.sleep(0.05)
    return time.monotonic() - began


class Node:
    """A set of namespaces, started by `process` from outside; `first` is its first process."""

    def __init__(self, name: str, folder: Path) -> None:
        """Create the namespaces, which end with the process that creates them.

        Every process on the node has the cluster's folder in its environment.
        """
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
        # A process that still runs setpriv or unshare does not have it.
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
        return [int(word) for word in text.split()]

    def run(
        self, *words: str, folder: Path | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the node."""
        return subprocess.run(
            [*self._enter(folder), *words],
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def start(self, *words: str, folder: Path, output: Path) -> subprocess.Popen[bytes]:
        """Start a command on the node with its output in the file `output`."""
        with output.open("ab") as said:
            return subprocess.Popen(
                [*self._enter(folder), *words],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
            )

    def _enter(self, folder: Path | None) -> list[str]:
        enter = ["nsenter", "--target", str(self.first), *NAMESPACES]
        return enter if folder is None else [*enter, f"--wd={folder}"]

    def check(self, *words: str, folder: Path | None = None, **variables: str) -> str:
        """Run a command that must succeed, and return its output."""
        done = self.run(*words, folder=folder, **variables)
        assert done.returncode == 0, (self.name, words, done.stdout, done.stderr)
        return done.stdout

    def processes(self, words: str) -> list[int]:
        """Return the ids of the node's processes whose command line contains `words`."""
        found = self.run("pgrep", "--full", "--", words).stdout.split()
        return [int(word) for word in found]

    def end(self) -> None:
        """End every process of the node at once."""
        self.process.kill()
        self.process.wait()
        first = Path(f"/proc/{self.first}")
        until(lambda: not first.exists(), f"the end of {self.name}", 60)


class Network:
    """Context manager for nodes connected by a bridge, which is on a separate node, the head."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cluster-"))
        self.nodes: dict[str, Node] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
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

    def start(self) -> None:
        """Start the head and the nodes."""
        hosts = {"localhost": "127.0.0.1"} | ADDRESSES
        (self.folder / "hosts").write_text("".join(f"{at} {name}\n" for name, at in hosts.items()))
        self.start_head()
        for name in NODES:
            self.switch_on(name)

    def start_head(self) -> None:
        """Start the head with its bridge."""
        self.nodes[HEAD] = head = Node(HEAD, self.folder)
        head.check("ip", "link", "add", BRIDGE, "type", "bridge")
        head.check("ip", "address", "add", f"{ADDRESSES[HEAD]}/24", "dev", BRIDGE)
        head.check("ip", "link", "set", BRIDGE, "up")

    @property
    def head(self) -> Node:
        """The node that is never switched off."""
        return self.nodes[HEAD]

    def switch_on(self, name: str) -> None:
        """Start a node with a link."""
        node = self.nodes[name] = Node(name, self.folder)
        # The link is created from outside, where the node's first process has this id.
        link = ["ip", "link", "add", name, "type", "veth", "peer", "eth0", "netns", str(node.first)]
        subprocess.run(
            ["nsenter", "--target", str(self.head.first), "--net", *link],
            check=True,
            env=node.environment,
        )
        self.head.check("ip", "link", "set", name, "master", BRIDGE, "up")
        node.check("ip", "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
        node.check("ip", "link", "set", "eth0", "up")

    def switch_off(self, name: str) -> None:
        """Switch off a node. Its link is cut first, so that its processes cannot report that they
        end."""
        self.cut(name)
        self.nodes.pop(name).end()
        # The node's end of the link disappears only after a while.
        self.head.run("ip", "link", "delete", name)

    def cut(self, name: str) -> None:
        """Cut the link of a node."""
        self.head.check("ip", "link", "set", name, "down")

    def mend(self, name: str) -> None:
        """Restore the link of a node."""
        self.head.check("ip", "link", "set", name, "up")

    def stop(self) -> None:
        """End everything."""
        for node in self.nodes.values():
            node.end()
        shutil.rmtree(self.folder, ignore_errors=True)
