"""The wheel contains one import package, which requires only torch and works next to any other
package."""

import os
import re
import shutil
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.commands import output_of

pytestmark = pytest.mark.slow

IMPORTS = """
import sys
import torch
from torch import nn

torch.optim.SGD(nn.Linear(2, 2).parameters())
of_torch = set(sys.modules)  # with Triton where torch's build brings it
import spectrain
from spectrain import AdamW, Muon, MuonPlusPlus, MuonSphere, SpectralDescent, SpectralSphere

for kind in (AdamW, Muon, MuonPlusPlus, MuonSphere, SpectralDescent, SpectralSphere):
    torch.manual_seed(0)
    layer = nn.Linear(8, 12, bias=False)
    before = layer.weight.detach().clone()
    optimizer = kind(layer.parameters())
    layer(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    assert torch.isfinite(layer.weight).all() and not torch.equal(layer.weight, before)
    assert "`spectral." not in kind.__doc__, "help names modules as they are installed"
found = {"numpy", "triton", "megatron", "spectral"} & (set(sys.modules) - of_torch)
assert not found, f"torch alone is needed, got {found}"
"""

OTHERS = [path for path in os.environ.get("TORCH_PYTHONS", "").split(os.pathsep) if path]

USER = """
from torch import Tensor, nn
from spectrain import SpectralSphere, msign

optimizer = SpectralSphere(nn.Linear(4, 8).parameters(), lr=5e-3)
direction: Tensor = msign(nn.Linear(4, 8).weight)
wrong: int = msign(nn.Linear(4, 8).weight)
"""


def run(*command: str | Path, folder: Path, code: int = 0) -> str:
    """Run a command in `folder`, where it finds no other checkout, and return the output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MYPYPATH")}
    return output_of(*command, folder=folder, variables=environment, code=code)


def closure(name: str) -> set[str]:
    """Return the installed distributions that `name` requires, including `name`."""
    found, queue = set(), [name]
    while queue:
        dist = distribution(queue.pop())
        if dist.name in found:
            continue
        found.add(dist.name)
        needed = [Requirement(line) for line in dist.requires or ()]
        queue += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="session")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources."""
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheel"))
    for name in ("pyproject.toml", "LICENSE", "docs/library.md"):
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(root / name, source / name)
    shutil.copytree(root / "spectral", source / "spectral")
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(target)]
    run(sys.executable, "-m", "pip", "wheel", *options, source, folder=source)
    (found,) = target.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that contains torch, the requirements of torch, and the
    wheel."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    python = folder / "bin" / "python"
    line = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(python, "-c", line, folder=folder).strip())
    places = {
        Path(str(distribution(name).locate_file(file.parts[0])))
        for name in closure("torch")
        for file in distribution(name).files or ()
        if file.parts[0] not in ("..", "__pycache__")
    }
    for place in places:  # each once, as the packages of CUDA share a folder
        if place.exists():
            (packages / place.name).symlink_to(place)
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-index", "--no-deps", wheel, folder=folder)
    return python


def test_the_wheel_holds_the_library_and_nothing_else(root: Path, wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    own = {name for name in names if ".dist-info/" not in name}
    sources = (root / "spectral").rglob("*")
    wanted = {
        f"spectrain/{path.relative_to(root / 'spectral').as_posix()}"
        for path in sources
        if path.suffix in (".py", ".json", ".typed")
    }
    assert own == wanted


def test_every_optimizer_steps_beside_other_packages(environment: Path, tmp_path: Path) -> None:
    """The user's own folder models/, and another package named spectral, are not imported."""
    for name in ("models", "parallel", "training", "spectral"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('not the library')")
    (tmp_path / "own.py").write_text(IMPORTS)
    run(environment, "own.py", folder=tmp_path)


@pytest.mark.parametrize("python", OTHERS or ["none"])
def test_another_torch_takes_the_wheel(python, wheel, root, tmp_path) -> None:
    """`TORCH_PYTHONS=PYTHON:PYTHON ...` lists interpreters that have torch but not the wheel."""
    if python == "none":
        pytest.skip("TORCH_PYTHONS names no interpreter with another torch")
    zipfile.ZipFile(wheel).extractall(tmp_path / "packages")
    (tmp_path / "own.py").write_text(IMPORTS)
    there = f"import sys; sys.path.insert(0, {str(tmp_path / 'packages')!r}); import runpy; "
    run(python, "-c", there + "runpy.run_path('own.py')", folder=tmp_path)
    arguments = "sys.path.insert(0, '.'); sys.argv = ['plain_loop.py', '--steps', '40']; "
    start = there + arguments + "runpy.run_path('plain_loop.py', run_name='__main__')"
    printed = run(python, "-c", start, folder=root / "examples")
    found = [float(x) for x in re.findall(r"^step \d+ loss ([\d.]+)", printed, re.MULTILINE)]
    assert found[0] > 5 and found[-1] < 3.9, printed


@pytest.mark.slow  # mypy reads all of torch; `make lint` checks the types, another test py.typed
def test_mypy_knows_the_types(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(USER)
    options = ["--strict", "--follow-imports=silent", f"--cache-dir={tmp_path / 'cache'}"]
    command = [sys.executable, "-m", "mypy", *options, "--python-executable", environment, "own.py"]
    out = run(*command, folder=tmp_path, code=1)
    assert re.findall(r"own.py:(\d+): error: .*\[(.*)\]", out) == [("7", "assignment")]
