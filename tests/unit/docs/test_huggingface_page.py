"""The commands of docs/huggingface.md are commands of ours."""

import re
import shlex
from pathlib import Path

from scripts import convert_hf, evaluate, generate

PROGRAMS = {
    "convert_hf": convert_hf,
    "evaluate": evaluate,
    "generate": generate,
}


def test_every_command_is_understood(root: Path) -> None:
    text = (root / "docs" / "huggingface.md").read_text()
    commands = re.findall(r"^ *\S*python scripts/(\w+)\.py (.*)$", text, re.MULTILINE)
    assert {name for name, _ in commands} == PROGRAMS.keys()
    assert len(commands) >= 6
    for name, arguments in commands:
        PROGRAMS[name].parse(shlex.split(arguments))


def test_the_environments_it_names_are_there(root: Path) -> None:
    text = (root / "docs" / "huggingface.md").read_text()
    files = re.findall(r"-r (requirements/\S+)", text)
    assert len(files) == 1 and all((root / file).is_file() for file in files)
