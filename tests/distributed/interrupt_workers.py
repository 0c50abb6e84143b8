"""Processes for the tests of Ctrl-C; each is a run like `python pretrain.py`, without its
imports."""

import os
import sys

import pretrain
from tests.launch import ROOT
from training.lifecycle.terminal import Interrupts


def main(arguments: list[str], output: str) -> None:
    """Run pretrain.py's command line in a separate session; `output`, which appears when Ctrl-C is
    handled, receives both streams."""
    os.setsid()
    os.chdir(ROOT)
    interrupts = Interrupts()
    interrupts.listen()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = pretrain.main(arguments, interrupts)
    sys.stdout.flush()
    os._exit(code)
