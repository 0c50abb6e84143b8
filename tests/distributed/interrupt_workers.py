"""Processes for the Ctrl-C tests that need no slow imports: runs as of `python pretrain.py`, and
launchers of ranks."""

import os
import signal
import sys

import pretrain
from tests.launch import ROOT
from training.launcher import launch
from training.lifecycle.terminal import Interrupts


def main(arguments: list[str], output: str) -> None:
    """Run pretrain.py in a separate session with both streams in `output`. This file appears once
    Ctrl-C is handled."""
    os.setsid()
    os.chdir(ROOT)
    interrupts = Interrupts()
    interrupts.listen()
    write_to(output)
    end(pretrain.main(arguments, interrupts))


def launcher(arguments: list[str], output: str) -> None:
    """Launch two Python ranks with these arguments in a separate session, with both streams in
    `output`."""
    os.setsid()
    os.chdir(ROOT)
    heed()
    write_to(output)
    end(launch(2, ["-c", *arguments]))


def heed() -> None:
    """Reset the signals that a background process of a shell, or a process under nohup, ignores."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def write_to(output: str) -> None:
    """Redirect stdout and stderr to a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)


def end(code: int) -> None:
    """End this process with an exit code."""
    sys.stdout.flush()
    os._exit(code)
