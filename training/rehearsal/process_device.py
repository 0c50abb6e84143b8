"""Importing this module creates the simulated device of a rehearsal process.

The device must exist before torch is imported. Each fork of the process rehearses one rank.
"""

import gc
import warnings

from training.rehearsal import fake_driver


def prepare() -> None:
    """Create the device and import the modules that all ranks use. The imports take seconds."""
    warnings.filterwarnings("ignore")
    gc.disable()  # imports create no garbage
    fake_driver.load()
    import torch

    torch.set_num_threads(1)
    # Functions compiled on import are rehearsed operation by operation.
    setattr(torch, "compile", uncompiled)  # noqa: B010
    from training.machine.backends import has_liger
    from training.rehearsal import rank  # noqa: F401
    from training.rehearsal.fake_kernels import liger_kernels

    if has_liger():
        liger_kernels()
    gc.freeze()  # forks share these objects, so exclude them from garbage collection
    gc.enable()


def uncompiled(function: object = None, **options: object) -> object:
    """Stand in for `torch.compile`: return the function unchanged."""
    return (lambda each: each) if function is None else function


prepare()
