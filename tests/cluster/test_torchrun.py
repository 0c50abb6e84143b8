"""torchrun on each of two nodes without SLURM: a lost node and a cut link.

The nodes share a disk, as they would on a cluster, and nothing else.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.network import NODES, Network, missing, until
from tests.cluster.repairs import Repairs
from tests.cluster.test_slurm import RANK, RUN, STEPS, TIMEOUT
from tests.killed_runs import differences, last_step
from training.checkpoint.files import steps as saved_steps

TORCHRUN = [
    # Otherwise an agent that is started later waits for an address that is not given again.
    "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", "--nnodes=2",
    "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=tests",
    "--rdzv-endpoint=node1:29400", "pretrain.py", "--config", "configs/tiny_sso.yaml",
]  # fmt: skip

pytestmark = pytest.mark.timeout(1200)


class Nodes:
    """Two nodes, on each of which torchrun is started by hand."""

    def __init__(self, network: Network, clone: Path) -> None:
        self.network, self.clone = network, clone
        self.launched: dict[str, subprocess.Popen[bytes]] = {}

    def launch(self, name: str, node: str, *keys: str) -> None:
        """Start torchrun on a node, for the run of this name."""
        if node in self.launched:
            self.launched[node].wait(60)
        self.launched[node] = self.network.nodes[node].start(
            *TORCHRUN, *RUN, f"run.dir=runs/{name}", *keys,
            folder=self.clone, output=self.clone / f"{name}.{node}.txt",
        )  # fmt: skip

    def launch_all(self, name: str, *keys: str) -> None:
        """Start torchrun on both nodes."""
        for node in NODES:
            self.launch(name, node, *keys)

    def folder(self, name: str) -> Path:
        """Return the run folder of a run."""
        return self.clone / "runs" / name

    def printed(self, name: str, node: str) -> str:
        """Return what torchrun and its rank have printed on a node."""
        return (self.clone / f"{name}.{node}.txt").read_text(errors="replace")

    def until_steps(self, name: str, steps: int) -> None:
        """Wait until a run has taken more than so many steps."""
        until(lambda: last_step(self.folder(name)) > steps, f"step {steps + 1} of {name}")

    def assert_as(self, reference: str, name: str) -> None:
        """Wait for the end of a run on both nodes and compare it with another, to the bit."""
        codes = [self.launched[node].wait(600) for node in NODES]
        assert codes == [0, 0], [self.printed(name, node)[-3000:] for node in NODES]
        assert (self.folder(name) / "DONE").exists()
        assert differences(self.folder(name), self.folder(reference), STEPS) == []

    def end(self) -> None:
        """End what is left on both nodes, and switch on and connect those that are not."""
        for name in NODES:
            if name in self.network.nodes:
                stop = ("pkill", "--signal", "KILL", "--full", "torchrun|pretrain")
                self.network.nodes[name].run(*stop)
                self.network.mend(name)
            else:
                self.network.switch_on(name)
        for process in self.launched.values():
            process.wait(60)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two nodes and a bridge; skips where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    with Network() as made:
        yield made


@pytest.fixture
def nodes(network: Network, clone: Path) -> Iterator[Nodes]:
    """Two nodes; afterwards nothing is left on them and both are up."""
    made = Nodes(network, clone)
    yield made
    made.end()


@pytest.fixture(scope="module")
def undisturbed(network: Network, clone: Path) -> str:
    """The name of a run that nothing disturbs."""
    nodes, name = Nodes(network, clone), "by_hand"
    nodes.launch_all(name)
    codes = [nodes.launched[node].wait(600) for node in NODES]
    assert codes == [0, 0], [nodes.printed(name, node)[-3000:] for node in NODES]
    return name


def test_a_lost_node_that_is_started_again_continues_from_the_checkpoint_on_disk(
    undisturbed: str, nodes: Nodes, repairs: Repairs
) -> None:
    name = "lost_by_hand"
    nodes.launch_all(name)
    nodes.until_steps(name, 20)
    nodes.network.switch_off("node2")
    step = last_step(nodes.folder(name))
    with repairs.taking("node2 lost, started again by hand", wait=TIMEOUT):
        survivor = nodes.network.nodes["node1"]
        old = min(survivor.processes(RANK))
        until(lambda: old not in survivor.processes(RANK), "the end of the survivor", 200)
        nodes.network.switch_on("node2")
        nodes.launch(name, "node2")
        nodes.until_steps(name, step)
    nodes.assert_as(undisturbed, name)
    printed = "".join(nodes.printed(name, node) for node in NODES)
    assert "no answer from rank 1 (host node2)" in printed
    assert re.search(r"continuing from .*step_000000", printed)


def test_a_link_that_stays_cut_ends_the_ranks_of_both_nodes_with_a_name(
    undisturbed: str, nodes: Nodes, repairs: Repairs
) -> None:
    name = "cut_by_hand"
    nodes.launch_all(name)
    until(lambda: bool(saved_steps(nodes.folder(name))), f"a checkpoint of {name}")
    cut_off = nodes.network.nodes["node2"]
    ranks = {node: min(nodes.network.nodes[node].processes(RANK)) for node in NODES}
    nodes.network.cut("node2")
    for node, rank in ranks.items():
        processes = nodes.network.nodes[node].processes
        until(lambda: rank not in processes(RANK), f"the end of the rank on {node}", TIMEOUT + 60)  # noqa: B023
    assert "no answer from rank 1 (host node2)" in nodes.printed(name, "node1")
    assert "no answer from rank 0 (host node1)" in nodes.printed(name, "node2")
    # torchrun itself waits there for the store of its rendezvous, on node1, for many minutes.
    cut_off.run("pkill", "--signal", "KILL", "--full", "torchrun")
    assert nodes.launched["node1"].poll() is None
    step = last_step(nodes.folder(name))
    with repairs.taking("link mended, started again by hand"):
        nodes.network.mend("node2")
        nodes.launch(name, "node2")
        nodes.until_steps(name, step)
    nodes.assert_as(undisturbed, name)
