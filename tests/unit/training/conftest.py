"""Fixtures for the training tests."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from training.loop import Hooks, Loop
from training.step import StepResult, Trainer


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """A function that makes the next trainer set its weights to NaN once after each of the given
    steps, and returns the list to which the trainer adds its steps. `change(trainer)` is called
    before the first step and may return another `on_step`."""

    def poison(*steps: int, change: Callable[[Any], Any] = lambda trainer: None) -> list[int]:
        taken: list[int] = []

        def loop(trainer: Trainer, hooks: Hooks) -> Loop:
            def after_step(step: int, result: StepResult) -> None:
                if step in steps and step not in taken:
                    next(iter(trainer.model.parameters.values())).data.fill_(torch.nan)
                taken.append(step)

            return Loop(trainer, replace(hooks, on_step=change(trainer) or after_step))

        monkeypatch.setattr("training.run.Loop", loop)
        return taken

    return poison
