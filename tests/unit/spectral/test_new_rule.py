"""A rule that is added as CONTRIBUTING says: its file, a line of the registry, a test. Nothing else
has to know it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

COPIED = ("spectral", "models", "parallel", "training", "configs", "tests", "docs")

RULE = '''"""Normalized descent: steps along the momentum divided by its Frobenius norm."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from spectral.cost import Product
from spectral.rules.base import (
    Rate, Report, Rule, State, decay_, require_fraction, require_matrices, subtract_,
)


@dataclass(frozen=True, kw_only=True)
class NormalizedRule(Rule):
    """W - lr M / ||M||_F."""

    whole_matrix: ClassVar[bool] = True
    elementwise_state: ClassVar[tuple[str, ...]] = ("momentum",)

    momentum: float = 0.9
    """Decay of the momentum, in [0, 1)."""

    def __post_init__(self) -> None:
        require_fraction("momentum", self.momentum)

    def init_state(self, weight: Tensor) -> State:
        """Create the momentum."""
        require_matrices(weight, "NormalizedRule")
        return {"momentum": torch.zeros_like(weight)}

    @torch.no_grad()
    def accumulate(self, grad: Tensor, state: State, active: Tensor | None) -> Tensor:
        """Add the gradient to the momentum and return a copy of it; see `Rule.accumulate`."""
        new = self.momentum * state["momentum"] + grad
        state["momentum"].copy_(
            new if active is None else torch.where(active, new, state["momentum"])
        )
        return grad.copy_(state["momentum"])

    @torch.no_grad()
    def update(
        self, weight: Tensor, momentum: Tensor, state: State, *,
        lr: Rate, weight_decay: Rate, active: Tensor | None,
    ) -> Report:
        """Decay and step the weights; see `Rule.update`. Reports `update_rms`."""
        decay_(weight, lr, weight_decay, active)
        norm = torch.linalg.vector_norm(momentum, dim=(-2, -1), keepdim=True)
        direction = momentum / norm.clamp_min(torch.finfo(norm.dtype).tiny)
        rms = direction.square().mean((-2, -1)).sqrt()
        subtract_(weight, direction, lr, active)
        return {"update_rms": rms}

    def matrix_cost(self, short: int, long: int, product: Product) -> float:
        """Count no products; see `Rule.matrix_cost`."""
        return 0.0
'''
TEST = '''"""The first step has the direction of the gradient and the length of the rate."""

import numpy
import torch

from spectral.rules import RULES


def test_first_step() -> None:
    weight = torch.randn(2, 3, 5, dtype=torch.float64)
    grad, before, rule = torch.randn_like(weight), weight.numpy().copy(), RULES["normalized"]()
    expected = before - [0.1 * g / numpy.sqrt((g * g).sum()) for g in grad.numpy().copy()]
    rule.step(weight, grad, rule.init_state(weight), lr=0.1)
    numpy.testing.assert_allclose(weight.numpy(), expected, rtol=1e-12)
'''
IMPORT = "from spectral.rules.normalized import NormalizedRule\n"
ENTRY = '    "normalized": NormalizedRule,\n'


@pytest.fixture(scope="module")
def copy(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with the rule in it."""
    folder = tmp_path_factory.mktemp("project")
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
        elif path.name in COPIED:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)  # read only
    (folder / "spectral/rules/normalized.py").write_text(RULE)
    (folder / "tests/unit/spectral/test_normalized.py").write_text(TEST)
    registry = folder / "spectral/rules/__init__.py"
    text = registry.read_text().replace("\nRULES:", f"{IMPORT}\nRULES:", 1)
    registry.write_text(re.sub(r"(RULES: .*?\n)\}", rf"\1{ENTRY}}}", text, count=1, flags=re.S))
    return folder


def run(copy: Path, *arguments: str) -> str:
    """What a Python command prints in the copy, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=copy, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_small() -> None:
    written = "".join((RULE, TEST, IMPORT, ENTRY))
    assert len(written.splitlines()) <= 100


def test_it_passes_what_every_rule_must(copy: Path) -> None:
    manual = run(copy, "-m", "training.config.manual", "--markdown")
    assert "optimizer.rules.normalized.momentum" in manual
    (copy / "docs/configuration.md").write_text(manual)
    passed = run(
        *(
            copy,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            "normalized or manual or page",
        ),
        "tests/unit/spectral/test_normalized.py",
        "tests/unit/spectral/test_rules_contract.py",
        "tests/unit/parallel/optimizer/test_asked_rules.py",
        "tests/unit/spectral/test_cost.py",
        "tests/unit/training/config/test_config.py",
        "tests/unit/docs/test_architecture_page.py",
    )
    assert int(re.findall(r"(\d+) passed", passed)[0]) >= 20


def test_it_is_planned(copy: Path) -> None:
    recipe = ("--config", "configs/llama1b_muon.yaml", "optimizer.matrix.rule=normalized")
    plan = run(copy, "pretrain.py", *recipe, "--dry-run", "--gpus", "8")
    assert "normalized" in plan


def test_a_wrong_field_is_named(copy: Path) -> None:
    wrong = "optimizer.rules.normalized.momentum=2"
    done = subprocess.run(
        [sys.executable, "pretrain.py", "--config", "configs/tiny_sso.yaml", wrong, "--dry-run"],
        cwd=copy,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "momentum must be in [0, 1), got 2" in done.stderr
