"""Whether kernels of Triton can be compiled and launched, before a run reads its data."""

import importlib.util
import subprocess

import torch

from models.engine import compiler_problem
from parallel.error_text import first_line
from spectral.kernels.dispatch import Tile, device_name, listed
from training.machine.device import DeviceError

TILE = Tile(64, 32, 4, 3)


def check_kernels(device: torch.device) -> None:
    """Compile and launch one kernel where the optimizer would; raise DeviceError if it fails.

    The first launch of a run would otherwise be in its first step.
    """
    if not listed(device_name(device)) or importlib.util.find_spec("triton") is None:
        return
    problem = compiler_problem()
    if problem is not None:
        raise DeviceError(
            f"kernels for {device_name(device)} are compiled on this machine, which lacks "
            f"{problem}; without triton the optimizer uses the library's kernels"
        )
    from spectral.kernels import symmetric

    try:
        ones = torch.ones(1, 64, 64, device=device)
        symmetric.product(ones, ones, TILE)
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        said = first_line(error)
        raise DeviceError(
            f"a Triton kernel does not start on {device_name(device)}: {said}"
        ) from error
