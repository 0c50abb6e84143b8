"""What megatron-core and this project take from Transformer Engine 2, read in its sources.

Its compiled part runs on GPUs only, but its wheel has the Python files, so nothing is imported.
"""

import ast
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import megatron.core
import pytest

from models.dense import MEGATRON_LAYER_NAMES
from tests.paths import ROOT

pytestmark = pytest.mark.slow

RELEASE = "transformer-engine==2.20.2"
EXTENSION = Path("megatron/core/extensions/transformer_engine.py")
CLASSES = {
    "TELinear": ("Linear", "module/linear.py"),
    "TELayerNormColumnParallelLinear": ("LayerNormLinear", "module/layernorm_linear.py"),
    "TEDotProductAttention": (
        "DotProductAttention",
        "attention/dot_product_attention/dot_product_attention.py",
    ),
}
"""Each module of megatron-core's spec, the class of Transformer Engine that it is, and its file."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python files of Transformer Engine."""
    folder = tmp_path_factory.mktemp("transformer_engine")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*pip, "--dest", folder, RELEASE], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{RELEASE} cannot be downloaded: {done.stderr.strip().splitlines()[-1]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    return folder / "transformer_engine"


@pytest.fixture(scope="module", params=["installed", "0.19.2"])
def engine(request: pytest.FixtureRequest) -> ast.Module:
    """The file of megatron-core that calls Transformer Engine, of two releases."""
    folder = Path(str(megatron.core.__file__)).parents[2]
    if request.param != "installed":
        folder = ROOT / ".engines" / request.param
        if not folder.is_dir():
            pytest.skip(f"`make .engines/{request.param}` lays the other engine there")
    return ast.parse((folder / EXTENSION).read_text())


def class_of(tree: ast.AST, name: str) -> ast.ClassDef:
    """The definition of a class."""
    return next(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)


def keywords_to_super(tree: ast.ClassDef) -> Iterator[str]:
    """The keywords that a class passes to its base's constructor."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            yield from (each.arg for each in node.keywords if each.arg is not None)


def parameters(tree: ast.ClassDef) -> set[str]:
    """The parameters of a class's constructor."""
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "__init__")
    return {each.arg for each in (*function.args.args, *function.args.kwonlyargs)}


@pytest.mark.parametrize("name", CLASSES)
def test_constructors_take_what_the_engine_passes(
    name: str, engine: ast.Module, sources: Path
) -> None:
    base, file = CLASSES[name]
    found = class_of(ast.parse((sources / "pytorch" / file).read_text()), base)
    passed = set(keywords_to_super(class_of(engine, name)))
    assert len(passed) >= 8
    assert passed <= parameters(found)


def test_parameters_have_the_names_that_units_are_found_by(sources: Path) -> None:
    """The fused norm and linear has `layer_norm_weight` and `weight`, a linear `weight`."""
    text = (sources / "pytorch/module/layernorm_linear.py").read_text()
    registered = {
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self.register_parameter"
        and isinstance(node.args[0], ast.Constant)
    }
    ours = {name.rsplit(".", 1)[1] for name in MEGATRON_LAYER_NAMES if "layer_norm_" in name}
    assert ours == {"layer_norm_weight"}
    assert ours <= registered
    # Without `parameters_split`, which megatron-core does not pass, the one weight is named so.
    for file in ("layernorm_linear", "linear"):
        source = (sources / f"pytorch/module/{file}.py").read_text()
        assert 'self.weight_names = ["weight"]' in source


def test_formats_of_fp8_are_those_of_the_config(sources: Path) -> None:
    recipes = ast.parse((sources / "common/recipe/__init__.py").read_text())
    members = {
        target.id
        for node in class_of(recipes, "Format").body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {"HYBRID", "E4M3"} <= members
    assert "fp8_format" in ast.unparse(class_of(recipes, "DelayedScaling"))
