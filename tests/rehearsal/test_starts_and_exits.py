"""The start of a rank with NCCL, and its exit after a failure, which does not wait for peers."""

import io
import multiprocessing
import os
import pickle
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import pretrain
from parallel.comm import groups
from tests.rehearsal.programs import TracedCall, called, program
from training.config import Config
from training.machine.device import Gpus, gpus_here
from training.rehearsal import processes
from training.rehearsal.process_groups import RehearsedGroup
from training.rehearsal.processes import RehearsalError
from training.rehearsal.program import call_site, put, replace_everywhere
from training.step import Trainer


def device_error(config: Config) -> None:
    """Fail unless a rank whose device fails reports the failure before it leaves its groups,
    without waiting for its peers."""
    happened: list[str] = []
    out, said = io.TextIOWrapper(io.BytesIO()), io.StringIO()

    def failing(trainer: Trainer, index: int) -> torch.Tensor:
        print("the last line of the log")
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def abort(group: RehearsedGroup) -> None:
        assert "AcceleratorError: CUDA error: device-side assert" in said.getvalue()
        assert b"the last line of the log" in out.buffer.getvalue()  # flushed
        happened.append(f"abort {dist.get_backend(group)}")

    replace_everywhere(gpus_here, lambda: Gpus("13.0", ("pretended",), None, usable=1))
    put(Trainer, "compute_gradients", failing)
    put(RehearsedGroup, "abort", abort)
    for waits in ("destroy_process_group", "barrier"):
        put(dist, waits, lambda *_, **__: happened.append("wait"))
    with redirect_stdout(out), redirect_stderr(said):
        code = pretrain.start_training(config, "none")
    assert code == 1, said.getvalue()
    assert "Traceback" in said.getvalue() and "in failing" in said.getvalue()
    assert "abort nccl" in happened and "wait" not in happened, happened


def test_a_rank_whose_device_fails_says_so_and_waits_for_nobody(perform, tmp_path):
    config = program(tmp_path, 1, data__mock=True, run__device="cuda")
    called(perform, device_error, config)


def test_a_job_without_a_report_ends_the_others(apart, perform):
    began, jobs = time.monotonic(), [TracedCall(time.sleep, (60,)), TracedCall(dies)]
    given = [pickle.dumps(job) for job in jobs]
    with pytest.raises(RehearsalError, match="ended with exit code 3: the last words"):
        apart.submit(processes.performed, given, 2).result()
    assert not apart.submit(multiprocessing.active_children).result()
    assert time.monotonic() - began < 50
    called(perform, time.sleep, 0)


def dies() -> None:
    """End this process."""
    os.write(2, b"the last words")
    os._exit(3)


def one_group_of_the_hosts() -> None:
    """Fail unless one group uses gloo, and all groups of the layout use NCCL."""
    layout = groups.initialize(device_type="cuda")
    backends = [dist.get_backend(group) for group in c10d._world.pg_map]
    assert backends.count("gloo") == 1 < backends.count("nccl"), backends
    assert dist.get_backend(layout.host) == "gloo"


def test_hosts_have_one_group_of_their_own(perform):
    """By default, Megatron also creates a gloo group for most groups, each with its own mesh of
    sockets."""
    called(perform, one_group_of_the_hosts)


def test_what_only_the_rehearsal_imports_is_not_replaced_in_silence():
    with pytest.raises(LookupError, match="no module of the project defines <function call_site"):
        replace_everywhere(call_site, None)
    with pytest.raises(AttributeError, match="moved"):
        put(torch.cuda, "moved", None)
