"""docs/spectral.md: its snippets run, and its tables name every optimizer, option and measure."""

import inspect
import re
from dataclasses import MISSING, fields

import pytest
import torch

import spectral
from spectral import measures
from spectral.effective_weight import precondition
from spectral.rules import RULES
from tests.paths import ROOT
from training.config.manual import field_sentences


@pytest.fixture(scope="module")
def page() -> str:
    root = ROOT
    return (root / "docs" / "spectral.md").read_text()


def option_rows(name: str) -> list[str]:
    """The rows of a rule's own options: those that no other rule of the registry has for it."""
    sentences = field_sentences(RULES[name])
    parents = [kind for kind in RULES[name].__mro__[1:] if kind in RULES.values()]
    inherited = {field.name for kind in parents for field in fields(kind)}
    rows = []
    for field in fields(RULES[name]):
        if field.name in RULES[name].__annotations__ or field.name not in inherited:
            assert field.default is not MISSING
            sentence = sentences[field.name].replace("|", r"\|")
            rows.append(f"| `{field.name}` | `{field.default}` | {sentence} |")
    return rows


def test_snippets_run(page: str) -> None:
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) > 8
    namespace: dict[str, object] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, "docs/spectral.md", "exec"), namespace)


@pytest.mark.parametrize("name", RULES)
def test_every_option_has_its_row(page: str, name: str) -> None:
    present = page.splitlines()
    missing = [row for row in option_rows(name) if row not in present]
    assert not missing, "docs/spectral.md lacks these rows:\n" + "\n".join(missing)


def test_no_row_outlives_its_option(page: str) -> None:
    tables = page[page.index("### Options") : page.index("### Which Muon++")]
    known = {row for name in RULES for row in option_rows(name)}
    stale = [line for line in tables.splitlines() if line.startswith("| `") and line not in known]
    assert not stale, "rows without an option:\n" + "\n".join(stale)


def test_every_optimizer_is_listed_with_its_learning_rate(page: str) -> None:
    optimizers = [
        kind
        for kind in vars(spectral).values()
        if inspect.isclass(kind)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not spectral.SpectralOptimizer
    ]
    assert {kind.default_rule for kind in optimizers} == set(RULES)
    for kind in optimizers:
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
