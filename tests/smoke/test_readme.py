"""The commands of the pages, run in order in a fresh copy of the repository, and the demo corpus
that the first command prepares."""

import lzma
import re
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from scripts.prepare_data import main
from tests.commands import copy_repository
from tests.launch import ROOT, environment
from tests.run_results import hashes
from tests.text_files import documents, texts
from training.data.manifest import read_manifest
from training.data.token_bytes import token_byte_lengths

SHORT = "train.exit_step=2 log.interval=1 validation.samples=2 validation.samples_tokens=2"
MAKE_TEST = re.compile(r"^make test\b.*\n", re.MULTILINE)
BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FAST = ("make", "source", "--html", "prepare_data.py", "mine.yaml")
"""The fast test runs the commands in README that contain one of these words."""
OTHER = ("--dry-run", "--fit", "--rehearse")
DEMO_SETS = ("kjv", "jargon", "devils_dictionary")


def fresh_copy(folder: Path) -> Path:
    """Copy the files of the repository, with an environment as after `make setup`."""
    target = folder / "spectrain"
    copy_repository(target, "-co", "--exclude-standard")
    venv = target / ".venv"
    venv.mkdir()
    for entry in ("bin", "lib", "pyvenv.cfg"):
        if (Path(sys.prefix) / entry).exists():
            (venv / entry).symlink_to(Path(sys.prefix) / entry)
    (venv / ".installed").touch()
    return target


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the kind and the text of each bash and YAML block in a page, in order."""
    return BLOCK.findall((ROOT / page).read_text())


def run(copy: Path, commands: list[tuple[str, str]]) -> str:
    """Run the blocks of a page in the copy, writing YAML blocks to mine.yaml."""
    script = ["set -eo pipefail"]
    for kind, text in commands:
        script.append(text if kind == "bash" else f"cat > mine.yaml <<'END'\n{text}END")
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=copy,
        env=environment() | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=5000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stderr
    return done.stdout


def shortened(text: str) -> str:
    """Return the commands of a block for the fast test. Training takes two steps on one rank, and
    `make test` is left out because it runs this test."""
    lines = []
    for line in MAKE_TEST.sub("", text).splitlines():
        command = line.split("  #")[0].strip()
        if command == "make train":
            command = f'make train NPROC=1 ARGS="{SHORT}"'
        if not any(word in command for word in FAST) or any(word in command for word in OTHER):
            continue
        if "pretrain.py" in command:
            command = f"{command.replace('--ranks 2', '')} {SHORT}"
        lines.append(command)
    return "".join(f"{line}\n" for line in lines)


@pytest.fixture(scope="module")
def way_in(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A copy in which the commands of README have run, up to a run on a user's text, and their
    output."""
    copy = fresh_copy(tmp_path_factory.mktemp("way_in"))
    short = [
        (kind, shortened(text) if kind == "bash" else text) for kind, text in blocks("README.md")
    ]
    return copy, run(copy, short)


@pytest.fixture
def demo(way_in: tuple[Path, str]) -> Path:
    """The embedded corpus as prepared by `make train`."""
    return way_in[0] / "data/demo"


def test_the_way_in_works_from_a_fresh_copy(way_in: tuple[Path, str]) -> None:
    """The config of the last run is the config that prepare_data.py prints."""
    copy, said = way_in
    (mine,) = [text for kind, text in blocks("README.md") if kind == "yaml"]
    assert mine in said and "and run: python pretrain.py --config mine.yaml --ranks 2\n" in said
    assert said.count("done: step 2 of") == 2 and "data pages: 100.0% of the samples" in said
    assert (copy / "runs/tiny_sso/report.html").exists() and (copy / "runs/mine").is_dir()


def test_the_first_commands_are_those_of_ci() -> None:
    """The first command sets up the environment and trains. The second command runs the tests, as
    CI does."""
    first = blocks("README.md")[0][1]
    assert [line.split("  #")[0].strip() for line in first.splitlines()] == [
        "make train",
        "make test",
    ]
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text()


@pytest.mark.slow
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(
    "page", ["README.md", "docs/running.md", "docs/data.md", "docs/huggingface.md"]
)
def test_every_command_of_a_page_works_after_those_before_it(page: str, tmp_path: Path) -> None:
    """Run all commands except `make test`, which `make test-all` runs first."""
    commands = [(kind, MAKE_TEST.sub("", text)) for kind, text in blocks(page)]
    said = run(fresh_copy(tmp_path), commands)
    assert "next: python scripts/plot.py" in said
    if page == "README.md":  # of the three texts after `make train`
        assert said.count(" is below its unigram entropy") >= 3


# --- the demo corpus ----------------------------------------------------------------------------


def test_demo_holds_the_embedded_texts_to_the_byte(demo: Path, root: Path) -> None:
    manifest = read_manifest(demo)
    lengths = token_byte_lengths(manifest.tokenizer_path)
    assert manifest.tokenizer.vocab_size == 4096
    assert lengths is not None and len(lengths) == 4096
    for name in DEMO_SETS:
        text = lzma.decompress((root / f"examples/data/{name}.txt.xz").read_bytes()).decode()
        train, validation = texts(demo, f"{name}.train"), texts(demo, f"{name}.validation")
        # A twentieth, evenly spaced and rounded to the nearest: documents 9, 29, 49, ...
        total = len(train) + len(validation)
        held_out = set(range(9, total, 20))
        assert len(validation) == len(held_out)
        left, right = iter(train), iter(validation)
        assert "".join(next(right) if i in held_out else next(left) for i in range(total)) == text
        size = sum(
            int(lengths[ids].sum())
            for part in ("train", "validation")
            for ids in documents(demo, f"{name}.{part}")
        )
        assert size == len(text.encode())


def test_manifest_agrees_with_the_files(demo: Path) -> None:
    manifest = read_manifest(demo)
    files = hashes(demo)
    assert set(manifest.sets) == {f"{n}.{part}" for n in DEMO_SETS for part in
                                  ("train", "validation")}  # fmt: skip
    for name, entry in manifest.sets.items():
        found = documents(demo, name, keep_eod=True)
        assert entry.documents == len(found)
        assert entry.tokens == sum(map(len, found))
        assert entry.max_token == max(map(max, found))
        assert entry.bytes == sum(len(text.encode()) for text in texts(demo, name))
        assert entry.sha256 == {part: files[f"{name}.{part}"] for part in ("bin", "idx", "blocks")}
        assert entry.dtype == "uint16"
        # EOD ends every document and occurs nowhere else.
        assert all(each[-1] == 0 and 0 not in each[:-1] for each in found)
        assert len(IndexedDataset(str(demo / name))) == len(found)  # Megatron also reads it
    assert manifest.tokenizer.sha256 == files["tokenizer.json"]
    assert manifest.tokenizer.eod_id == 0
    assert manifest.files == {
        each.name: each.stat().st_size for each in demo.iterdir() if each.name != "manifest.json"
    }


def test_demo_again_says_so_and_changes_nothing(demo, capsys, tmp_path, monkeypatch) -> None:
    """The command works in another working directory, because all paths of the corpus are relative
    to the repository."""
    monkeypatch.chdir(tmp_path)
    before = {each: each.stat().st_mtime_ns for each in demo.iterdir()}
    assert main(["--demo", "--output", str(demo)]) == 0
    assert capsys.readouterr().out == f"{demo} already contains this data\n"
    assert {each: each.stat().st_mtime_ns for each in demo.iterdir()} == before


def test_what_a_killed_run_left_beside_a_complete_folder_goes(demo: Path) -> None:
    lock, *folders = (
        demo.with_name(f"{demo.name}.{end}") for end in ("preparing.lock", "preparing", "replaced")
    )
    lock.touch()
    for folder in folders:
        folder.mkdir()
    assert main(["--demo", "--output", str(demo)]) == 0
    assert not any(path.exists() for path in (lock, *folders))
