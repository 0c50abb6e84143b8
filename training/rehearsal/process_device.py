"""The device of a process that rehearses, which importing this module makes.

It must be there before torch is imported. Forks of the process rehearse a rank each.
"""

import gc
import warnings

from training.rehearsal import fake_driver


def prepare() -> None:
    """Make the device, and import what ranks need, which takes seconds."""
    warnings.filterwarnings("ignore")
    fake_driver.load()
    import torch

    torch.set_num_threads(1)
    # What is compiled when it is imported is rehearsed as the operations it is made of.
    setattr(torch, "compile", uncompiled)  # noqa: B010
    from training.rehearsal import rank  # noqa: F401
    from training.rehearsal.triton_launches import liger_installed, liger_kernels

    if liger_installed():
        liger_kernels()
    gc.freeze()  # forks need not search what they share for garbage


def uncompiled(function: object = None, **options: object) -> object:
    """What takes the place of `torch.compile`: the function itself."""
    return (lambda each: each) if function is None else function


prepare()
