"""Allowed imports: spectral <- models <- parallel <- training <- pretrain.py and scripts.

Within a package, imports never point to a higher level or form a cycle. Starting a run imports no
compiler.
"""

import ast
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.commands import output_of

LAYERS = {"spectral": 0, "models": 1, "parallel": 2, "training": 3, "scripts": 4, "pretrain": 4}
RANKS = ("spectral/sharded/ranks.py",)
"""Files of the library that may import torch.distributed. Other files only use ProcessGroup."""
ONE_FILE_EACH = ("transformer_engine", "wandb", "datasets", "torch.utils.tensorboard")


LEVELS = {
    "parallel": [
        {"disk", "error_text"},
        {"comm"},
        {"storage"},
        {"model"},
        {"optimizer"},
        {"plan", "checkpoint", "observe"},
    ],
    "training": [
        {"errors", "local_path"},
        {"json_file", "command_line"},
        {"config"},
        {"assignments", "data", "machine"},
        {"report", "monitor", "nonfinite"},
        {"checkpoint"},
        {"lifecycle"},
        {"evaluation", "launcher"},
        {"samples", "step_profile"},
        {"step"},
        {"loop"},
        {"opening_notes", "run_log"},
        {"build", "dry_run"},
        {"planning"},
        {"run"},
        {"rehearsal"},
    ],
}
"""Folders and files of each package, from the lowest level to the highest. Folders and files on the
same level do not import each other."""


@cache
def imported(source: str, place: str = "") -> list[str]:
    """Return the dotted names that `source` imports, and all names under torch that it uses as
    attributes.

    `place` is the file's path relative to the root, from which relative imports start.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = place.split("/")[: -node.level] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"torch.{node.attr}"] if node.value.id == "torch" else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return found


def within(name: str, module: str) -> bool:
    """Return whether the dotted `name` is `module` or is inside `module`."""
    return name == module or name.startswith(module + ".")


def violations(place: str, source: str) -> list[str]:
    """Return the forbidden imports of the file `place` (relative to the root)."""
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
    """Return the source of every Python file of the project except tests, by path."""
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
        if any(within(name, module) for name in imported(text, place))
    ]
    assert len(users) <= 1, f"{module} is imported by {', '.join(users)}"


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Map each module to the modules that it imports, without the packages that contain it."""
    names = {
        place.removesuffix(".py").removesuffix("/__init__").replace("/", "."): place
        for place in sources
    }
    edges = {}
    for name, place in names.items():
        others = set(imported(sources[place], place))
        others |= {other.rpartition(".")[0] for other in others}
        edges[name] = {
            other
            for other in others & names.keys()
            if other != name and not name.startswith(f"{other}.")
        }
    return edges


def climbs(name: str, other: str) -> bool:
    """Return whether the module `other`, which the module `name` imports, is on the same level as
    `name` or higher."""
    package, _, rest = name.partition(".")
    other_package, _, other_rest = other.partition(".")
    if package != other_package or package not in LEVELS or not rest or not other_rest:
        return False
    part, other_part = rest.split(".")[0], other_rest.split(".")[0]
    level = {part: i for i, parts in enumerate(LEVELS[package]) for part in parts}
    return part != other_part and level[other_part] >= level[part]


def test_no_circles(root: Path) -> None:
    try:
        TopologicalSorter(graph(files(root))).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' <- '.join(error.args[1])}")


def test_every_part_has_a_level_and_no_import_climbs(root: Path) -> None:
    edges = graph(files(root))
    for package, levels in LEVELS.items():
        found = {name.split(".")[1] for name in edges if name.startswith(package + ".")}
        assert found == set().union(*levels)
    found = [
        f"{name} imports {other}"
        for name, others in edges.items()
        for other in sorted(others)
        if climbs(name, other)
    ]
    assert found == []


LOADED = "import sys; print(*(n in sys.modules for n in ('torch', 'torch._dynamo', 'wandb')))"
HELP = """
import contextlib, importlib, io, sys
heavy = {"torch", "pandas", "matplotlib", "transformers"}
for name in NAMES:
    main = importlib.import_module(name).main
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(["--help"])
    assert not heavy & sys.modules.keys(), name
"""
PROGRAMS = ["pretrain", "scripts.average", "scripts.convert_hf", "scripts.evaluate"]
PROGRAMS += ["scripts.generate", "scripts.make_corpus", "scripts.paper", "scripts.plot"]
PROGRAMS += ["scripts.prepare_data", "scripts.prepare_task", "scripts.reproduce"]
PROGRAMS += ["scripts.study", "scripts.verify"]
"""All programs except scripts/preflight.py, whose help text contains a size that depends on this
machine's GPUs."""


@pytest.mark.parametrize(
    ("code", "loaded"),
    [
        (f"NAMES = {PROGRAMS}\n{HELP}", ["False"] * 3),
        ("from scripts.evaluate import main; main(['none', '--tasks', 'a'])\n", ["False"] * 3),
        (
            "from pathlib import Path; from scripts.command import check_free\n"
            "check_free(Path('none'))\n",
            ["False"] * 3,
        ),
        (
            "from models.engine import import_engine; import_engine(); import training.run\n"
            "from spectral import Muon, SpectralSphere\n",
            ["True", "False", "False"],
        ),
    ],
)
def test_no_compiler_or_wandb_is_imported(root: Path, code: str, loaded: list[str]) -> None:
    assert output_of(sys.executable, "-c", code + LOADED, folder=root).split() == loaded
