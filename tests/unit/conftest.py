"""Fixtures of the unit tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.config import ModelConfig
from models.units import Unit
from parallel.comm import groups as process_groups
from parallel.model import ModelOptions, ParallelModel, build_model
from parallel.optimizer.build import build_optimizer
from parallel.optimizer.routing import Assign, Assignment
from spectral.rules import RULES
from spectral.rules.base import Rule
from tests.minimal_config import MINIMAL
from training.config import group_of

ModelAndStep = tuple[ParallelModel, Callable[..., dict[str, Tensor]]]


def matrices_to(rule: Rule, lr: float = 1.0) -> Assign:
    """Matrices to `rule`, everything else to AdamW."""

    def assign(unit: Unit) -> Assignment:
        group = group_of(unit.role)
        if group == "matrix":
            return Assignment(group, "under test", rule, lr, 0.1 if lr else 0.0)
        return Assignment(group, "adamw", RULES["adamw"](), 1e-3, 0.0)

    return assign


@pytest.fixture
def one_process_model(world: process_groups.Groups) -> Callable[..., ModelAndStep]:
    """`(model, step)` of a float64 two-layer model whose matrices a given rule updates.

    `step(lr)` fills random gradients, steps, and returns the gradients by unit name.
    """
    config = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)

    def make(rule: Rule, **unit_options: Any) -> ModelAndStep:
        model = build_model(
            config,
            world,
            ModelOptions(
                seed=3,
                sequence_length=8,
                dtype=torch.float64,
                elementwise=lambda unit: (
                    not (rule.whole_matrix and group_of(unit.role) == "matrix")
                ),
                **unit_options,
            ),
        )
        optimizer = build_optimizer(model, matrices_to(rule))

        def step(lr: float) -> dict[str, Tensor]:
            gradients = {}
            for unit in model.units:
                model.gradient(unit).normal_()
                gradients[unit.name] = model.gradient(unit).reshape(unit.shape).clone()
            optimizer.step(lr, torch.tensor(True))
            return gradients

        return model, step

    return make


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """The shortest run config, in a file."""
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path
