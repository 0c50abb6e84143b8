"""The number of project functions between the training loop and a matmul of a rule."""

import traceback
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.paths import ROOT
from tests.run_configs import tiny_config
from training.run import train


@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_few_functions_stand_between_the_loop_and_a_product(rule, folder, world, monkeypatch):
    seen = list[list[str]]()

    def watched(product, *operands, **options: float):
        calls = [
            f"{path.relative_to(ROOT)}:{frame.name}"
            for frame in traceback.extract_stack()[:-1]
            if (path := Path(frame.filename)).is_relative_to(ROOT) and ".venv" not in path.parts
        ]
        if "training/step.py:step" in calls:
            seen.append(calls[calls.index("training/step.py:step") :])
        return product(*operands, **options)

    with monkeypatch.context() as patched:
        for name in ("mm", "bmm", "addmm", "baddbmm"):  # of one and of several matrices
            patched.setattr(torch, name, partial(watched, getattr(torch, name)))
        train(tiny_config(folder, rule, train__exit_step=1), world)
    forms = {name for calls in seen for name in calls if "form_" in name}
    assert forms == {f"spectral/polar.py:_{form}_form_" for form in ("plain", "gram")}
    for calls in seen:
        assert len(calls) <= 11, "\n".join(calls)
