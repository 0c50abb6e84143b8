"""The example rule in CONTRIBUTING, in a separate package that the checkout does not know."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import output_of, torchrun
from tests.run_configs import tiny_config
from tests.run_results import metrics_of

pytestmark = pytest.mark.slow

FIRST_STEP = """
import numpy, pytest, torch
from normalized import NormalizedRule  # before the library, which loads the entry point later
from spectrain import SpectralOptimizer
from spectral.rules import RULES, MomentumRule, register_rule

assert list(RULES)[-1] == "normalized" and len(RULES) == len(list(RULES))

weight = torch.nn.Parameter(torch.randn(3, 5, dtype=torch.float64))
weight.grad = torch.randn_like(weight)
mean = (1 - 0.95**2) * weight.grad.numpy()  # of the first step, with Nesterov's look ahead
expected = weight.detach().numpy() * (1 - 0.1 * 0.1) - 0.1 * mean / numpy.linalg.norm(mean)
SpectralOptimizer([weight], rule="normalized", lr=0.1, weight_decay=0.1).step()
numpy.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-12)
for name, rule in {"muon": NormalizedRule, "x": int, "y": MomentumRule}.items():
    with pytest.raises((TypeError, ValueError)):
        register_rule(name, rule)
"""


THREE_STEPS = """
import sys, torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from spectral import SpectralOptimizer, split_parameters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 21, bias=False), torch.nn.Linear(21, 5)).double()
x, y = torch.randn(8, 12).double(), torch.randn(8, 5).double()
sharded = sys.argv[2] == "sharded"
if sharded:
    dist.init_process_group("gloo")
    fully_shard(model)
optimizer = SpectralOptimizer(split_parameters(model), rule="normalized", lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    (model(x) - y).square().mean().backward()
    optimizer.step()
weights = {n: p.full_tensor() if sharded else p for n, p in model.state_dict().items()}
if not sharded or dist.get_rank() == 0:
    torch.save(weights, sys.argv[1])
if sharded:
    dist.destroy_process_group()
"""


def rule_of_the_page(root: Path) -> str:
    """Return the code of the example in CONTRIBUTING."""
    (example,) = re.findall(
        r"```python\n(.*?)```", (root / "CONTRIBUTING.md").read_text(), re.DOTALL
    )
    assert len(example.splitlines()) <= 30
    return example


@pytest.fixture(scope="module")
def package(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the rule and the metadata of an installed package."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "normalized.py").write_text(rule_of_the_page(root))
    facts = folder / "normalized-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: normalized\nVersion: 1.0\n")
    entry = "[spectrain.rules]\nnormalized = normalized:NormalizedRule\n"
    (facts / "entry_points.txt").write_text(entry)
    return folder


def run(root: Path, package: Path, *arguments: str, code: int = 0) -> str:
    """Run Python in the checkout with the package installed, and return the output."""
    variables = os.environ | {"PYTHONPATH": f"{package}{os.pathsep}{root}"}
    return output_of(sys.executable, *arguments, folder=root, variables=variables, code=code)


def test_its_first_step_is_that_of_numpy(root: Path, package: Path) -> None:
    run(root, package, "-c", FIRST_STEP)


def test_it_keeps_the_contract_of_rules(root: Path, package: Path) -> None:
    said = run(
        *(root, package, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "normalized"),
        "tests/unit/spectral/test_rules_contract.py",
        "tests/unit/parallel/optimizer/test_asked_rules.py",
    )
    assert int(re.findall(r"(\d+) passed", said)[0]) > 10  # the name selects them


def test_a_config_uses_and_plans_it(root: Path, package: Path) -> None:
    recipe = ("pretrain.py", "--config", "configs/llama1b_muon.yaml", "--dry-run", "--gpus", "8")
    plan = run(root, package, *recipe, "optimizer.matrix.rule=normalized")
    assert re.search("not counted +FLOPs of rule normalized, which has no `cost`", plan)
    wrong = run(root, package, *recipe, "optimizer.rules.normalized.momentum=2", code=2)
    assert "momentum must be in [0, 1), got 2" in wrong


def test_ranks_train_by_it(root: Path, package: Path, folder: str, tmp_path: Path) -> None:
    """Test a config with tensor and data parallelism, and the library with FSDP2."""
    tiny_config(folder, "muon")
    losses = []
    for ranks, layout in ((1, ()), (4, ("parallel.tensor=2",))):
        keys = ("optimizer.matrix.rule=normalized", "train.exit_step=4", "log.interval=1")
        run(
            *(root, package, *torchrun(ranks), "pretrain.py"),
            *("--config", f"{folder}/config.yaml", f"run.dir={folder}/{ranks}"),
            *(*keys, *layout),
        )
        losses.append([line["train/loss"] for line in metrics_of(tmp_path / str(ranks))])
    assert len(losses[0]) == 4 and losses[0][3] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # float32, summed in another order

    (tmp_path / "steps.py").write_text(THREE_STEPS)
    for start, name in (((), "alone"), (torchrun(2), "sharded")):
        run(root, package, *start, f"{folder}/steps.py", f"{folder}/{name}.pt", name)
    alone, sharded = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "sharded"))
    torch.testing.assert_close(sharded, alone, rtol=1e-12, atol=1e-14)
