"""The first thing that a run does: settle its environment and its device, before CUDA starts."""

import os
from typing import Literal

from training.config import Config
from training.machine import environment
from training.machine.device import choose, gpus_here, hide_gpus


def start(config: Config) -> Literal["cuda", "cpu"]:
    """The kind of device that this rank trains on; what it needs of the environment is then set.

    Raises DeviceError if the device that the config asks for cannot be had.
    """
    wanted = config.run.device
    if wanted == "cpu":
        hide_gpus()
        return "cpu"
    environment.prepare(config)
    return choose(wanted, gpus_here(), int(os.environ.get("LOCAL_RANK", "0")))
