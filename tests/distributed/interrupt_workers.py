"""Processes of the tests of Ctrl-C: a run as `python pretrain.py` starts it, imports aside."""

import os
import sys

import pretrain
from tests.launch import ROOT
from training.lifecycle.terminal import Interrupts


def main(arguments: list[str], output: str) -> None:
    """Run pretrain.py's command line in a session of its own; `output`, which appears when Ctrl-C
    is listened for, gets both streams."""
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
