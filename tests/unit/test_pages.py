"""Pages refer to existing files, make targets and config keys. Their commands parse, and their
snippets run."""

import importlib
import re
import shlex
import sys

import pytest

from tests.line_links import with_lines
from tests.paths import ROOT
from training.config import Config, check, load_config
from training.config.binding import schema_paths

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text() for page in PAGES}
READ = {name: text for name, text in TEXTS.items() if name not in ("papers.md", "configuration.md")}
"""Pages written by hand. papers.md and configuration.md are generated."""

each_page = pytest.mark.parametrize("name", READ)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return the module and the arguments of every project command in indented or fenced lines."""
    lines = re.sub(r"\\\n\s+", "", text).splitlines()
    found = []
    for line in lines:
        line = re.sub(r'^(\s*)[A-Z]+="(.*)"$', r"\1\2", line)  # a command in a variable
        match = re.match(
            r"\s*(?:\S*python|torchrun|RUN_DIR)\b.*?\b(pretrain|scripts/[\w/]+)\.py(.*)", line
        )
        if match and (line.startswith("    ") or line[0] in "pt") and "`" not in line:
            found.append((match[1].replace("/", "."), shlex.split(match[2], comments=True)))
    return found


def keys() -> set[str]:
    """Return all config keys and their sections."""
    parts = [path.replace("[N]", "").split(".") for path, _ in schema_paths(Config)]
    return {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}


@each_page
def test_every_command_is_understood(name: str) -> None:
    for module, arguments in commands(READ[name]):
        program = importlib.import_module(module)
        options = program.parse(arguments)
        path = getattr(options, "config", None)
        # The output of an earlier command does not exist.
        if isinstance(path, str) and path.startswith("configs/"):
            config = load_config(ROOT / path, options.overrides)
            if module == "pretrain" and (options.dry_run or options.rehearse):
                check(config, options.gpus or config.plan.gpus or 1)


@each_page
def test_files_exist(name: str) -> None:
    folder = ROOT if name in ("README.md", "CONTRIBUTING.md") else ROOT / "docs"
    # A paragraph with a commit is about the files of that commit.
    parts = READ[name].split("\n\n")
    text = "\n\n".join(
        part for part in parts if not re.search(r"\b(?=\d*[a-f])[0-9a-f]{7}\b", part)
    )
    folders = (
        "configs|scripts|docs|requirements|examples|studies|tests|training|models|parallel|spectral"
    )
    quoted = re.findall(
        rf"(?<![\w/.])((?:{folders})/[\w/.-]*\.(?:yaml|py|md|txt|sh|sbatch))\b", text
    )
    links = [link.partition("#")[0] for link in re.findall(r"\]\((?!https?:)([^)\s=]+)\)", text)]
    paths = [ROOT / each for each in quoted] + [folder / each for each in links if each]
    # Capitals are placeholders, such as NAME.py.
    missing = [
        path for path in paths if not re.search(r"[A-Z]{4}\.", path.name) and not path.exists()
    ]
    assert missing == []


@each_page
def test_links_lead_to_the_lines_of_a_reference(name: str) -> None:
    assert with_lines(READ[name]) == READ[name], "run `make pages`"


def test_two_clicks_lead_from_readme_to_every_algorithm() -> None:
    linked = set(re.findall(r"spectral/([\w/]+)\.py#L", TEXTS["README.md"]))
    rules = {"muon", "muon_sphere", "muon_plus_plus", "spectral_sphere"}
    assert linked == {f"rules/{rule}" for rule in rules} | {"effective_weight"}


@pytest.mark.parametrize("name", TEXTS)
def test_rows_of_a_table_have_as_many_cells_as_its_header(name: str) -> None:
    for block in re.findall(r"(?:^\|.*\n)+", TEXTS[name], re.MULTILINE):
        header, *rows = block.splitlines()
        # Pages are rendered without a row's surplus cells.
        bars = re.compile(r"(?<!\\)\|")
        count = len(bars.findall(header))
        assert [row for row in rows if len(bars.findall(row)) != count] == []


@each_page
def test_config_keys_exist(name: str) -> None:
    known = keys() | {"optimizer.rules.normalized"}  # of CONTRIBUTING's example
    sections = {key.partition(".")[0] for key in known}
    named = {
        key
        for key in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=[^`]*)?`", READ[name])
        if key.partition(".")[0] in sections
    }
    files = ("json", "jsonl", "pt", "py", "yaml", "md")
    assert {key for key in named if key.rpartition(".")[2] not in files} - known == set()


@pytest.mark.filterwarnings("error:.* unnamed parameters")
@pytest.mark.parametrize("name", ["library.md", "spectral.md"])
def test_snippets_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "spectrain", importlib.import_module("spectral"))
    snippets = re.findall(r"^```python\n(.*?)^```$", TEXTS[name], re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 3
    namespace: dict[str, object] = {"__name__": "page"}
    for snippet in snippets:
        exec(compile(snippet, f"docs/{name}", "exec"), namespace)
