"""`make site`: all pages are in the menu, and links point to existing pages and headings."""

import shutil
import sys
from pathlib import Path

import pytest

from scripts.site import on_page_markdown
from tests.commands import output_of
from tests.paths import ROOT


def built(folder: Path, config: str, code: int) -> str:
    """Build FOLDER/docs, check that the exit code is `code`, and return the output."""
    (folder / "mkdocs.yml").write_text(config.replace("scripts/", f"{ROOT}/scripts/"))
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return output_of(*command, folder=folder, code=code)


def test_the_site_is_built(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    built(tmp_path, (ROOT / "mkdocs.yml").read_text(), code=0)
    assert (tmp_path / "site" / "search" / "search_index.json").exists()


def test_links_that_lead_nowhere_fail_the_site(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "other.md").write_text("# A heading\n")
    links = "other.md#no-such-heading", "no_such_page.md"
    page = "# Links\n\n[x](other.md#a-heading)\n" + "".join(f"\n[x]({link})\n" for link in links)
    (tmp_path / "docs" / "index.md").write_text(page)
    settings, _, _ = (ROOT / "mkdocs.yml").read_text().partition("nav:")
    printed = built(tmp_path, f"{settings}nav: [index.md, other.md]\n", code=1)
    assert all(link.rpartition("#")[2] in printed for link in links)
    assert "Aborted with 2 warnings" in printed


def test_a_link_to_no_file_of_the_repository_fails_the_site() -> None:
    assert on_page_markdown("A [b](../Makefile#L3).") == "A b (`Makefile`)."
    with pytest.raises(FileNotFoundError, match=r"no_such_file\.py"):
        on_page_markdown("[x](../no_such_file.py)")
