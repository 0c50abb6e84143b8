"""Runs of pretrain.py on several ranks, by torchrun."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


class Torchrun:
    """What `Worker` is for one rank; it keeps nothing between runs."""

    def __init__(self, environment: Mapping[str, str], ranks: int) -> None:
        self.environment = environment
        self.ranks = ranks

    def run(self, arguments: Sequence[str], log: Path) -> tuple[int, float]:
        """Exit code of pretrain.py, which writes its output to `log`, and the processor seconds of
        all its ranks."""
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += [f"--nproc-per-node={self.ranks}", "pretrain.py"]
        with log.open("wb") as console:
            process = subprocess.Popen(
                [*start, *arguments],
                cwd=ROOT,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
            )
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, usage.ru_utime + usage.ru_stime

    def close(self) -> None:
        """End nothing."""
