"""docs/running.md is true: its commands are understood, its tables name every file."""

import re
import shlex
from functools import reduce

import pretrain
from tests.paths import ROOT
from tests.run_configs import read_config, tiny_config
from tests.token_files import write_token_set
from training.config import load_config
from training.run import train

PAGE = (ROOT / "docs" / "running.md").read_text()
BLOCKS = re.findall(r"(?:^    .*\n)+", PAGE, re.MULTILINE)
COMMANDS = [
    line.strip()
    for block in BLOCKS
    for line in re.sub(r"\\\n\s+", "", block).splitlines()
    if line.strip()
]


def after(command: str, word: str) -> list[str]:
    """The arguments that follow a word of a command."""
    words = shlex.split(command)
    return words[words.index(word) + 1 :]


def test_every_training_command_is_understood():
    found = [command for command in COMMANDS if "pretrain.py" in command]
    assert len(found) >= 6
    for command in found:
        options = pretrain.parse(after(command, "pretrain.py"))
        load_config(ROOT / options.config, options.overrides)


def test_keys_in_the_text_exist():
    config = load_config(ROOT / "configs" / "tiny_sso.yaml")
    names = set(re.findall(r"`([a-z]+(?:\.[a-z_]+)+)(?:=|:|`)", PAGE))
    files = ("json", "jsonl", "pt", "py", "yaml")
    keys = {name for name in names if name.split(".")[-1] not in files}
    assert len(keys) > 8
    for key in keys:
        reduce(getattr, key.split("."), config)


def test_containers_are_those_of_the_dockerfile():
    dockerfile = (ROOT / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM base AS (\w+)", dockerfile, re.MULTILINE))
    (owner,) = re.findall(r"^WORKDIR (\S+)", dockerfile, re.MULTILINE)
    builds = {after(c, "--target")[0] for c in COMMANDS if c.startswith("docker build")}
    assert builds == targets == {"cpu", "cuda"}
    runs = [command for command in COMMANDS if command.startswith("docker run")]
    assert {re.search(r"spectrain:(\w+)", command)[1] for command in runs} == targets
    for command in runs:
        for place in re.findall(r"\$PWD/(?:data|runs):([^:\"]+)", command):
            assert place in (f"{owner}/data", f"{owner}/runs")
    # Pinned, and not as root.
    assert re.findall(r"^ARG PYTHON=(\S+)", dockerfile, re.MULTILINE) == ["3.12.12"]
    assert re.findall(r"^FROM (?!base)(\S+)", dockerfile, re.MULTILINE) == [
        "python:${PYTHON}-slim-bookworm"
    ]
    stages = dockerfile.split("\nFROM ")[2:]
    assert all(re.findall(r"^USER (\S+)", stage, re.MULTILINE) == ["1000"] for stage in stages)
    assert all("requirements/cpu.txt" in stage for stage in stages)


def test_the_tables_name_every_file_of_a_run(tmp_path, world):
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    tiny_config(str(tmp_path))
    keys = {"checkpoint__interval": 1, "train__exit_step": 3, "train__steps": 3}
    train(read_config(str(tmp_path), **keys), world)
    run_dir = tmp_path / "run"
    _, table = PAGE.split("## The run folder")
    named = re.findall(r"`([^`]+?)/?`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    of_run, of_checkpoint = named[: named.index("state")], named[named.index("state") :]
    for folder, names in ((run_dir, of_run), (run_dir / "checkpoints" / "step_00000003", [])):
        for path in folder.iterdir():
            options = names or of_checkpoint
            assert any(path.match(option.split("/")[0]) for option in options), path
    assert any((run_dir / "checkpoints" / "latest").match(name) for name in of_run)
    for name in of_checkpoint:
        assert (run_dir / "checkpoints" / "step_00000003" / name).exists(), name
