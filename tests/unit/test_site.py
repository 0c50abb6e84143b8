"""`make site`: all pages are in the menu, and links point to existing pages and headings."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.commands import output_of
from tests.paths import ROOT


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ("", ""),
        ("[x](results.md#no-such-heading)", "no-such-heading"),
        ("[x](no_such_page.md)", "no_such_page.md"),
        ("[x](../no_such_file.py)", "no_such_file.py"),
    ],
    ids=["as it is", "heading", "page", "file"],
)
def test_a_link_that_leads_nowhere_fails_the_site(added: str, problem: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.write(f"\n{added}\n")
    config = (ROOT / "mkdocs.yml").read_text().replace("scripts/", f"{ROOT}/scripts/")
    (tmp_path / "mkdocs.yml").write_text(config)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    assert problem in output_of(*command, folder=tmp_path, code=bool(problem))
    if not problem:
        assert (tmp_path / "site" / "search" / "search_index.json").exists()
