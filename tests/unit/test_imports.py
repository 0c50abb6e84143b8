"""Who may import whom: spectral <- models <- parallel <- training <- pretrain.py and scripts."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

LAYERS = {"spectral": 0, "models": 1, "parallel": 2, "training": 3, "scripts": 4, "pretrain": 4}
RANKS = ("spectral/sharded/ranks.py", "spectral/sharded/dtensors.py")
"""Files of the library that may import torch.distributed; others name ProcessGroup alone."""
ONE_FILE_EACH = ("transformer_engine", "wandb", "datasets", "torch.utils.tensorboard")


def imported(source: str, place: str = "") -> Iterator[str]:
    """Dotted names that `source` imports or, under torch, reaches as attributes.

    `place` is the file's path relative to the root, from which relative imports start.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = place.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "torch":
                yield f"torch.{node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant))


def within(name: str, module: str) -> bool:
    """Whether the dotted `name` is `module` or lies in it."""
    return name == module or name.startswith(module + ".")


def violations(place: str, source: str) -> list[str]:
    """The imports of the file `place` (relative to the root) that its layer must not have."""
    own = place.split("/")[0].removesuffix(".py")
    found = []
    for name in imported(source, place):
        top = name.split(".")[0]
        if LAYERS.get(top, -1) > LAYERS[own]:
            found.append(f"{place} imports {name}, which lies above it")
        if own == "spectral" and within(name, "megatron"):
            found.append(f"{place} imports {name}: the library needs torch alone")
        of_ranks = within(name, "torch.distributed") and name != "torch.distributed.ProcessGroup"
        if own == "spectral" and of_ranks and place not in RANKS:
            found.append(f"{place} imports {name}: of ranks only {' and '.join(RANKS)} know")
        if within(name, "triton") and not place.startswith("spectral/kernels/"):
            found.append(f"{place} imports {name}: kernels live in spectral/kernels/")
        if within(name, "tests"):
            found.append(f"{place} imports {name}")
    tree = ast.walk(ast.parse(source))
    for node in (each for each in tree if isinstance(each, (ast.Import, ast.ImportFrom))):
        relative = isinstance(node, ast.ImportFrom) and node.level > 0
        # The library is installed as `spectrain`, and is `spectral` in a checkout.
        inside = any(within(name, "spectral") for name in imported(ast.unparse(node), place))
        if relative != (own == "spectral" and inside):
            wanted = "absolute" if relative else "relative"
            found.append(f"{place} must have {wanted} imports: {ast.unparse(node)}")
    return found


def files(root: Path) -> dict[str, str]:
    """Source by place of every Python file of the project but its tests."""
    paths = [p for name in LAYERS for p in (root / name).rglob("*.py")]
    paths += [p for name in LAYERS if (p := root / f"{name}.py").exists()]
    return {path.relative_to(root).as_posix(): path.read_text() for path in sorted(paths)}


def test_imports_point_downwards(root: Path) -> None:
    sources = files(root)
    assert {place.split("/")[0] for place in sources} >= {"spectral", "models", "training"}
    assert [line for place, text in sources.items() for line in violations(place, text)] == []


@pytest.mark.parametrize("module", ONE_FILE_EACH)
def test_an_optional_package_is_imported_in_one_file(root: Path, module: str) -> None:
    users = [
        place
        for place, text in files(root).items()
        if any(within(name, module) for name in imported(text))
    ]
    assert len(users) <= 1, f"{module} is imported by {', '.join(users)}"


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("models/llama.py", "from training.config.schema import Config"),
        ("spectral/polar.py", "import torch.distributed as dist"),
        ("spectral/polar.py", "from torch import distributed"),
        ("spectral/polar.py", "import torch\ndef f(): torch.distributed.barrier()"),
        ("spectral/polar.py", "def f():\n    from megatron.core import parallel_state"),
        ("spectral/rules/muon.py", "import models"),
        ("spectral/rules/muon.py", "from spectral.polar import msign"),
        ("spectral/rules/muon.py", "def f(): import spectral"),
        ("training/loop.py", "from .schedule import factor"),
        ("training/loop.py", "import pretrain"),
        ("training/loop.py", "import importlib\nimportlib.import_module('scripts.convert')"),
        ("parallel/comm/groups.py", "import triton.language as tl"),
        ("pretrain.py", "from tests.unit import test_imports"),
    ],
)
def test_a_violation_is_found(place: str, source: str) -> None:
    assert violations(place, source)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("training/loop.py", "from spectral.rules import RULES\nimport torch.distributed"),
        ("spectral/kernels/gram.py", "import triton\nfrom ..polar import msign"),
        ("pretrain.py", "from training import config"),
    ],
)
def test_what_is_allowed_is_not_found(place: str, source: str) -> None:
    assert violations(place, source) == []
