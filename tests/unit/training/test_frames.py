"""How many of our functions stand between the loop and a matrix product of a rule, in the plain
form of msign. A product of the Gram form, which chooses its kernel, is four further down."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from tests.paths import ROOT
from tests.run_configs import tiny_config
from training.run import train

MOST = 11


def test_few_functions_stand_between_the_loop_and_a_product(folder, world, monkeypatch):
    config = tiny_config(folder, "muon", train__exit_step=1)
    seen = list[list[str]]()

    def watched(
        product: Callable[..., torch.Tensor], *operands: torch.Tensor, **options: float
    ) -> torch.Tensor:
        calls = [
            f"{path.relative_to(ROOT)}:{frame.name}"
            for frame in traceback.extract_stack()[:-1]
            if (path := Path(frame.filename)).is_relative_to(ROOT) and ".venv" not in path.parts
        ]
        if "training/loop.py:step" in calls:
            seen.append(calls[calls.index("training/loop.py:step") :])
        return product(*operands, **options)

    with monkeypatch.context() as patched:
        for name in ("addmm", "baddbmm"):  # of one matrix and of several
            patched.setattr(torch, name, partial(watched, getattr(torch, name)))
        train(config, world)
    plain = [calls for calls in seen if "spectral/polar.py:_plain_form_" in calls]
    shortest = min(plain, key=len)
    assert shortest[-1] == "spectral/kernels/library.py:fused"
    assert len(shortest) <= MOST, "\n".join(shortest)
