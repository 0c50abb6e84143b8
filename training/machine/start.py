"""The first thing that a run does: settle its environment and its device, before CUDA starts."""

import os
from typing import Literal

from training.config import Config
from training.machine import environment
from training.machine.device import choose, gpus_here


def prepare(config: Config) -> None:
    """Set what the run needs of the environment; before CUDA starts, and again without effect."""
    if config.run.device == "cpu":
        # PyTorch and the engine, which ask for CUDA in many places, find no GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        environment.prepare(config)


def start(config: Config) -> Literal["cuda", "cpu"]:
    """Prepare the environment, and return the kind of device that this rank trains on.

    Raises DeviceError if the device that the config asks for cannot be had.
    """
    prepare(config)
    wanted = config.run.device
    if wanted == "cpu":
        return "cpu"
    return choose(wanted, gpus_here(), int(os.environ.get("LOCAL_RANK", "0")))
