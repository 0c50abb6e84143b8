"""`make site`: all pages are in the menu, and links point to existing pages and headings."""

import shutil
import sys
from pathlib import Path

import pytest

from scripts.site import on_page_markdown
from tests.commands import output_of
from tests.paths import ROOT


@pytest.mark.parametrize("links", [[], ["results.md#no-such-heading", "no_such_page.md"]], ids=len)
def test_a_link_that_leads_nowhere_fails_the_site(links: list[str], tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    with (tmp_path / "docs" / "index.md").open("a") as page:
        page.writelines(f"\n[x]({link})\n" for link in links)
    config = (ROOT / "mkdocs.yml").read_text().replace("scripts/", f"{ROOT}/scripts/")
    (tmp_path / "mkdocs.yml").write_text(config)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    printed = output_of(*command, folder=tmp_path, code=bool(links))
    assert all(link.rpartition("#")[2] in printed for link in links)
    if not links:
        assert (tmp_path / "site" / "search" / "search_index.json").exists()


def test_a_link_to_no_file_of_the_repository_fails_the_site() -> None:
    with pytest.raises(FileNotFoundError, match=r"no_such_file\.py"):
        on_page_markdown("[x](../no_such_file.py)")
