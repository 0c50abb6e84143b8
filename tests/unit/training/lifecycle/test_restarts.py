"""Restarts of a command by torchrun and SLURM are distinguished from starts of other commands."""

import os
import socket

import pytest

from training.lifecycle.run_folder import STARTED, mark_started, starts_again

RUN, RESTARTS = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"
JOB, REQUEUES = "SLURM_JOB_ID", "SLURM_RESTART_COUNT"


def set_variables(monkeypatch, **variables):
    for name in (RUN, RESTARTS, JOB, REQUEUES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("first", "later", "again"),
    [
        ({RUN: "a", RESTARTS: "0"}, {RUN: "a", RESTARTS: "1"}, True),
        ({RUN: "a", RESTARTS: "0"}, {RUN: "a", RESTARTS: "12"}, True),
        ({RUN: "a", RESTARTS: "0"}, {RUN: "a", RESTARTS: "0"}, False),
        ({RUN: "a", RESTARTS: "0"}, {RUN: "b", RESTARTS: "1"}, False),
        ({RUN: "none", RESTARTS: "0"}, {RUN: "none", RESTARTS: "1"}, True),
        ({JOB: "7"}, {JOB: "7", REQUEUES: "1"}, True),
        ({JOB: "7"}, {JOB: "7"}, False),  # such as a second srun of a job
        ({JOB: "7"}, {JOB: "8", REQUEUES: "1"}, False),
        ({JOB: "7", RUN: "a"}, {JOB: "7", REQUEUES: "1", RUN: "b", RESTARTS: "0"}, True),
        ({JOB: "7", RUN: "a"}, {JOB: "7", RUN: "a", RESTARTS: "1"}, True),
        ({JOB: "7", RUN: "a"}, {JOB: "8", RUN: "a", RESTARTS: "1"}, False),
        ({}, {RESTARTS: "1"}, False),
    ],
)
def test_only_a_counted_start_of_the_same_command_is_one(
    first, later, again, tmp_path, monkeypatch
):
    set_variables(monkeypatch, **later)
    assert not starts_again(tmp_path)
    set_variables(monkeypatch, **first)
    mark_started(tmp_path)
    set_variables(monkeypatch, **later)
    assert starts_again(tmp_path) is again


def test_a_restart_under_another_torchrun_without_an_id_is_none(tmp_path, monkeypatch):
    """torchrun's default id is the same for all commands, so the id of its process is compared."""
    set_variables(monkeypatch, **{RUN: "none", RESTARTS: "1"})
    mark_started(tmp_path)
    process = f"process {os.getppid()} of {socket.gethostname()}"
    assert (tmp_path / STARTED).read_text() == process
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert not starts_again(tmp_path)
