"""torchrun without SLURM on two nodes that share only a disk."""

import re
import subprocess
from collections.abc import Sequence

import pytest

from tests.cluster.network import NODES, Network, missing, until
from tests.cluster.test_slurm_on_nodes import RANK, RUN, STEPS
from tests.killed_runs import differences, last_step

TORCHRUN = [
    # Otherwise an agent that starts later waits for an address that is not sent again.
    "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "torchrun", "--nnodes=2",
    "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=tests",
    "--rdzv-endpoint=node1:29400", "pretrain.py", "--config", "configs/tiny_sso.yaml",
]  # fmt: skip


@pytest.mark.timeout(1800)
def test_a_lost_node_that_is_started_again_continues_from_the_checkpoint_on_disk(clone) -> None:
    if reason := missing():
        pytest.skip(reason)

    def launch(name: str, node: str) -> subprocess.Popen[bytes]:
        run, output = f"run.dir=runs/{name}", clone / f"{name}.{node}.txt"
        return network.nodes[node].start(*TORCHRUN, *RUN, run, folder=clone, output=output)

    def printed(name: str) -> str:
        return "".join((clone / f"{name}.{node}.txt").read_text(errors="replace") for node in NODES)

    def end(name: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        assert [process.wait(600) for process in processes] == [0, 0], printed(name)[-6000:]

    with Network() as network:
        end("whole", [launch("whole", node) for node in NODES])
        name, run = "lost", clone / "runs" / "lost"
        first, second = (launch(name, node) for node in NODES)
        until(lambda: last_step(run) > 20, f"step 21 of {name}")
        network.switch_off("node2")
        second.wait(60)
        survivor = network.nodes["node1"]
        old = min(survivor.processes(RANK))
        until(lambda: old not in survivor.processes(RANK), "the end of the survivor", 200)
        network.switch_on("node2")
        end(name, [first, launch(name, "node2")])
    assert (run / "DONE").exists()
    assert differences(run, clone / "runs" / "whole", STEPS) == []
    assert "no answer from rank 1 (host node2)" in printed(name)
    assert re.search(r"continuing from .*step_000000", printed(name))
