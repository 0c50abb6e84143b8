"""The rule of CONTRIBUTING in a package of its own, which nothing in the checkout knows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

FIRST_STEP = """
import numpy, torch
from spectral import SpectralOptimizer
from spectral.rules import RULES, register_rule

weight = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
weight.grad = torch.randn_like(weight)
mean = (1 - 0.95**2) * weight.grad.numpy()  # of the first step, with Nesterov's look ahead
expected = weight.detach().numpy() * (1 - 0.1 * 0.1) - 0.1 * mean / numpy.linalg.norm(mean)
SpectralOptimizer([weight], rule="normalized", lr=0.1, weight_decay=0.1).step()
numpy.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12)
register_rule("normalized", RULES["normalized"])
for name, rule, error in (("muon", RULES["normalized"], ValueError), ("x", int, TypeError)):
    try:
        register_rule(name, rule)
    except error:
        continue
    raise AssertionError(name)
"""


def rule_of_the_page(root: Path) -> str:
    """The example of CONTRIBUTING."""
    (example,) = re.findall(
        r"```python\n(.*?)```", (root / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    return example


@pytest.fixture(scope="module")
def package(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rule and what an installation of its package leaves."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "normalized.py").write_text(rule_of_the_page(root))
    facts = folder / "normalized-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: normalized\nVersion: 1.0\n")
    entry = "[spectrain.rules]\nnormalized = normalized:NormalizedRule\n"
    (facts / "entry_points.txt").write_text(entry)
    return folder


def run(root: Path, package: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in the checkout with the package installed."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{root}"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_it_is_small(root: Path) -> None:
    assert len(rule_of_the_page(root).splitlines()) <= 30


def test_its_first_step_is_that_of_numpy(root: Path, package: Path) -> None:
    done = run(root, package, "-c", FIRST_STEP)
    assert done.returncode == 0, done.stderr


def test_it_keeps_the_contract_of_rules(root: Path, package: Path) -> None:
    done = run(
        *(root, package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "normalized"),
        "tests/unit/spectral/test_rules_contract.py",
        "tests/unit/parallel/optimizer/test_asked_rules.py",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) >= 15


def test_a_config_uses_and_plans_it(root: Path, package: Path) -> None:
    recipe = ("pretrain.py", "--config", "configs/llama1b_muon.yaml", "--dry-run", "--gpus", "8")
    plan = run(root, package, *recipe, "optimizer.matrix.rule=normalized")
    assert plan.returncode == 0 and "normalized" in plan.stdout, plan.stderr
    wrong = run(root, package, *recipe, "optimizer.rules.normalized.momentum=2")
    assert wrong.returncode == 2 and "momentum must be in [0, 1), got 2" in wrong.stderr
