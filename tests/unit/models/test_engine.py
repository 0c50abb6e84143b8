"""What the project takes from megatron-core, and what it says of releases that it does not know."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from models.engine import (
    EngineError,
    Forward,
    Use,
    check_engine,
    engine_version,
    forwards_of,
    missing,
    uses,
    uses_of,
)
from tests.paths import ROOT

SOURCE = """
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec as Spec
from megatron.core.models.gpt.gpt_model import GPTModel
from models.other import Model
import torch

class Own(GPTModel):
    def __init__(self, *arguments, cap, **options):
        super().__init__(*arguments, share=True, **options)
        self.own()

    def own(self):
        pass

    def _postprocess(self, labels):
        return super().old(labels, loss=None)

Own(config, cap=2.0, vocab_size=8)
Model(config, cap=2.0, vocab_size=8)
Spec(module=torch.nn.Linear, **options)
parallel_state.initialize_model_parallel(2, context_parallel_size=2)
torch.zeros(2, dtype=torch.float32)
"""


def test_uses_are_names_and_keywords_of_the_engine() -> None:
    spec = ("megatron.core.transformer.spec_utils", "ModuleSpec", "a.py")
    model = ("megatron.core.models.gpt.gpt_model", "GPTModel")
    own = Forward(*model, frozenset({"cap"}))
    assert forwards_of(SOURCE) == {"Own": own}
    state = "megatron.core.parallel_state"
    assert set(uses_of(SOURCE, "a.py", {"Own": own, "Model": own})) == {
        Use(*model, "a.py"),
        Use(*model, "a.py", frozenset({"share"})),
        Use(*model, "a.py", frozenset({"vocab_size"})),
        Use(model[0], "GPTModel._postprocess", "a.py"),
        Use(model[0], "GPTModel.old", "a.py", frozenset({"loss"})),
        Use("megatron.core", "parallel_state", "a.py"),
        Use(*spec),
        Use(*spec, frozenset({"module"})),
        Use(state, "initialize_model_parallel", "a.py", frozenset({"context_parallel_size"})),
    }


def test_installed_engine_has_all_that_is_used() -> None:
    found = list(uses())
    assert {use.name for use in found} >= {"GPTModel", "TopKRouter", "ShardedTensor"}
    assert any("hidden_size" in use.keywords for use in found)
    assert any(use.name == "GPTModel" and "vocab_size" in use.keywords for use in found)
    assert {"TopKRouter._apply_expert_bias", "SequentialMLP.forward"} <= {u.name for u in found}
    assert [text for use in found if (text := missing(use)) is not None] == []


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (Use("megatron.core.nowhere", "Thing", "a.py"), "megatron.core.nowhere.Thing (for a.py)"),
        (
            Use("megatron.core.parallel_state", "no_such_thing", "a.py"),
            "megatron.core.parallel_state.no_such_thing (for a.py)",
        ),
        (
            Use("megatron.core", "ModelParallelConfig", "a.py", frozenset({"bf16", "new", "x"})),
            "arguments new, x of megatron.core.ModelParallelConfig (for a.py)",
        ),
        (
            Use("megatron.core.models.gpt.gpt_model", "GPTModel.no_such_hook", "a.py"),
            "megatron.core.models.gpt.gpt_model.GPTModel.no_such_hook (for a.py)",
        ),
    ],
)
def test_what_is_missing_is_named(use: Use, text: str) -> None:
    assert missing(use) == text


def test_what_the_engine_lacks_itself_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "engine_of_a_test.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    said = "what it imports itself: No module named 'no_such_package'"
    assert missing(Use("engine_of_a_test", "Thing", "a.py")) == said
    assert missing(Use("engine_of_a_test", "Other", "b.py")) == said


def test_installed_release_is_a_tested_one() -> None:
    assert engine_version() == version("megatron-core")
    assert check_engine() is None


def test_older_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import package_info

    monkeypatch.setattr(package_info, "__version__", "0.15.3")
    with pytest.raises(EngineError, match=r"must be 0\.16\.1 or newer, got 0\.15\.3"):
        check_engine()


def stand_in(folder: Path, *, lacks: str = "") -> dict[str, str]:
    """An environment whose engine is of version 99: the installed one, without `lacks`."""
    import megatron.core

    installed = Path(str(megatron.core.__file__)).parent
    core = folder / "megatron" / "core"
    core.mkdir(parents=True)
    for path in installed.iterdir():
        if path.name not in ("package_info.py", "__pycache__", "pipeline_parallel"):
            (core / path.name).symlink_to(path)
    info = (installed / "package_info.py").read_text()
    (core / "package_info.py").write_text(info + '\n__version__ = "99.0"\n')
    schedules = core / "pipeline_parallel"
    schedules.mkdir()
    for path in (installed / "pipeline_parallel").iterdir():
        (schedules / path.name).symlink_to(path)
    if lacks:
        entry = schedules / "__init__.py"
        text = entry.read_text()
        entry.unlink()
        entry.write_text(text + f"\ndel {lacks}\n")
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}


@pytest.mark.parametrize("lacks", ["", "get_forward_backward_func"])
def test_release_99(tmp_path: Path, lacks: str) -> None:
    """A newer release that has everything is used, with a warning; else a line says what lacks."""
    command = [sys.executable, "pretrain.py", "--config", "configs/tiny_sso.yaml", "--dry-run"]
    command.append("data.mock=true")
    environment = stand_in(tmp_path, lacks=lacks)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    newer = "megatron-core 99.0 is newer than 0.19.2, the newest tested"
    if lacks:
        assert done.returncode == 2
        assert done.stderr == (
            f"error: {newer}, and lacks megatron.core.pipeline_parallel.{lacks} "
            "(for parallel/model.py)\n"
        )
    else:
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(f"warning: {newer}; all that the project takes from it")
