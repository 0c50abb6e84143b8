"""docs/library.md: its snippets run under the name of the wheel, and its tables are true."""

import importlib
import re
import sys

import pytest

import spectral
from spectral.parameter_split import FUSED
from tests.paths import ROOT


def test_snippets_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spectrain", importlib.import_module("spectral"))
    page = (ROOT / "docs" / "library.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(snippets) == 5
    namespace: dict[str, object] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, "docs/library.md", "exec"), namespace)
    assert "12 of 8x32" in str(namespace["split"])


def test_tables_name_what_exists() -> None:
    page = (ROOT / "docs" / "library.md").read_text()
    for name in re.findall(r"^\| `(\w+)` \| .* \| lr \S+ \|$", page, re.MULTILINE):
        rate = f"{vars(spectral)[name].default_lr:.0e}".replace("e-0", "e-")
        assert f"| `{name}` |" in page and f"lr {rate}" in page
    assert all(f"`{name}`" in page for name in FUSED if not name.startswith(("wq_", "wkv")))
