"""docs/spectral.md: its snippets run, and it names every optimizer and measure."""

import inspect
import re

import pytest
import torch

import spectral
from spectral import measures
from spectral.effective_weight import precondition
from tests.paths import ROOT

OPTIMIZERS = [
    kind
    for kind in vars(spectral).values()
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not spectral.SpectralOptimizer
]


@pytest.fixture(scope="module")
def page() -> str:
    root = ROOT
    return (root / "docs" / "spectral.md").read_text()


def test_snippets_run(page: str) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) > 8
    namespace: dict[str, object] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, "docs/spectral.md", "exec"), namespace)


def test_the_options_of_every_listed_rule_are_one_link_away(page: str) -> None:
    manual = (ROOT / "docs" / "configuration.md").read_text()
    for name in {kind.default_rule for kind in OPTIMIZERS}:
        assert f"[{name}](configuration.md#optimizerrules{name})" in page
        assert f"\n## optimizer.rules.{name}\n" in manual


def test_every_optimizer_is_listed_with_its_learning_rate(page: str) -> None:
    for kind in OPTIMIZERS:
        rate = f"{kind.default_lr:.0e}".replace("e-0", "e-")
        assert f"| `{kind.__name__}` | {rate} | `{kind.default_rule}` |" in page


def test_every_measure_and_argument_is_listed(page: str) -> None:
    functions = [f for f in vars(measures).values() if inspect.isfunction(f)]
    own = [f.__name__ for f in functions if f.__module__ == measures.__name__]
    for name in own:
        assert name.startswith("_") or f"`{name}(" in page
    for parameter in inspect.signature(precondition).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            shown = repr(parameter.default).replace("'", '"').replace("1e-07", "1e-7")
            assert f"| `{parameter.name}` | `{shown}` |" in page
