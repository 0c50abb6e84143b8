"""All scripts follow the conventions for arguments, errors and exit codes in CONTRIBUTING.md."""

import argparse
import io
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from models.engine import EngineError
from parallel.comm.collectives import CollectiveError
from scripts.command import add_config, add_json, command, new_parser, require
from tests.commands import output_of
from tests.paths import ROOT
from training.command_line import Parser
from training.errors import InputError


def test_wrong_input_is_a_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    @command
    def wrong() -> int:
        raise InputError("steps must be positive, got 0\nseed must be an integer, got x")

    @command
    def unreadable() -> int:
        return len(Path("nowhere").read_text())

    assert wrong() == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: steps must be positive, got 0", "error: seed must be an integer, got x"
    ]  # fmt: skip
    assert unreadable() == 2
    assert capsys.readouterr().err == "error: No such file or directory: nowhere\n"

    @command
    def without_engine() -> int:
        raise EngineError("megatron-core must be 0.16.1 or newer, got 0.1")

    @command
    def bug() -> int:
        raise RuntimeError("a bug")

    assert without_engine() == 2
    assert capsys.readouterr().err == "error: megatron-core must be 0.16.1 or newer, got 0.1\n"
    with pytest.raises(RuntimeError, match="a bug"):
        bug()


def test_a_failed_check_and_an_interruption_have_codes_of_their_own(capsys) -> None:
    @command
    def interrupted() -> int:
        raise KeyboardInterrupt

    @command
    def too_large() -> int:
        return len(bytearray(1 << 60))

    @command
    def alone() -> int:
        raise CollectiveError("not all ranks connected")

    assert command(lambda: 1)() == 1 and interrupted() == 130
    assert alone() == 1 and capsys.readouterr().err.endswith("error: not all ranks connected\n")
    assert too_large() == 1 and "error: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(("encoding", "name"), [("ascii", "stdout"), ("latin-1", "stderr")])
def test_what_a_stream_cannot_encode_is_escaped(encoding, name, monkeypatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, name, stream)
    assert command(lambda: print("runs/\u732b", file=getattr(sys, name)) or 0)() == 0
    stream.seek(0)
    assert stream.read() == "runs/\\u732b\n"


SHELL_SCRIPTS = sorted((ROOT / "scripts").rglob("*.s[hb]*"))


@pytest.mark.parametrize("script", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_shell_scripts_print_their_usage(script: Path) -> None:
    said = output_of("bash", script, "--help")
    assert f"{script.relative_to(ROOT)} " in said and "#SBATCH" not in said and "set -" not in said


def test_options_may_follow_overrides() -> None:
    parser = argparse.ArgumentParser()
    add_config(parser)
    parser.add_argument("--steps", type=int)
    given = ["--config", "a.yaml", "train.steps=1", "--steps", "2", "seed=3"]
    options = parser.parse_intermixed_args(given)
    assert (options.config, options.overrides) == (Path("a.yaml"), ["train.steps=1", "seed=3"])
    assert options.steps == 2


def test_an_option_with_two_values_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    parser = new_parser("Read.")
    add_config(parser)
    parser.add_argument_group("more").add_mutually_exclusive_group().add_argument("-n", nargs="+")
    sub = Parser()
    sub.add_subparsers().add_parser("a").add_argument("--steps", default=5, type=int)
    for read, given in (
        (parser.parse_intermixed_args, ["--config", "a", "seed=1", "--config=b"]),
        (parser.parse_args, ["--config", "a", "-n", "1", "2", "-n", "1"]),
        (sub.parse_args, ["a", "--steps", "5", "--steps", "6"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            read(given)
        assert re.search("must be given only once, got .*, then ", capsys.readouterr().err)
    assert sub.parse_args(["a", "--steps", "6", "--steps", "6"]).steps == 6
    assert sub.parse_args(["a", "--steps", "7"]).steps == 7


@pytest.mark.parametrize("text", ["s3://bucket/x", "hf://a/b.json", "~/x.json", "$HOME/x.json"])
def test_outputs_that_are_no_local_paths_are_refused(text, capsys) -> None:
    parser = new_parser("Test.")
    add_json(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--json", text])
    assert f"got '{text}'" in capsys.readouterr().err
    assert parser.parse_args(["--json", "a/b.json"]).json == Path("a/b.json")


def test_every_command_line_is_read_by_that_parser() -> None:
    files = [ROOT / "pretrain.py", *ROOT.glob("scripts/**/*.py"), *ROOT.glob("training/**/*.py")]
    texts = {path.name: path.read_text("utf-8") for path in files}
    assert "Parser(" in texts["pretrain.py"] and "Parser(" in texts["evaluate.py"]
    assert not [name for name, text in texts.items() if "argparse.ArgumentParser(" in text]


@pytest.fixture(scope="module")
def parsers() -> list[argparse.ArgumentParser]:
    """The parsers of all commands and subcommands."""
    parsers: list[argparse.ArgumentParser] = []

    def parsed(parser: argparse.ArgumentParser, *_, **__) -> None:
        parsers.append(parser)
        raise InputError("only the parser is needed")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
        for path in (ROOT / "pretrain.py", *ROOT.glob("scripts/**/*.py")):
            if "\ndef parse(arguments" in path.read_text("utf-8"):
                module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
                with pytest.raises(InputError, match="only the parser"):
                    module.parse([])
    for parser in parsers:
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()  # these are read later in this loop
    assert len(parsers) > 20
    return parsers


def test_a_default_that_a_help_states_is_the_default(parsers) -> None:
    stated = 0
    for parser in parsers:
        for action in parser._actions:
            said = re.search(r"\(default: ([^%]*?)([,;].*)?\)", action.help or "")
            if said and action.default is not None:
                stated += 1
                default = action.default if isinstance(action.default, list) else [action.default]
                for text, value in zip(said[1].split(), default, strict=True):
                    word, given = (
                        (action.type or str)(each) if isinstance(each, str) else each
                        for each in (text, value)
                    )
                    assert word == given or ROOT / text == given, (parser.prog, action)
    assert stated > 5


def test_every_output_must_be_a_local_path(parsers) -> None:
    names = {"output", "target", "--output", "--results", "--json", "--write"}
    actions = [each for parser in parsers for each in parser._actions]
    actions = [each for each in actions if {each.dest, *each.option_strings} & names]
    assert names == {name for each in actions for name in (each.dest, *each.option_strings)} & names
    home = os.path.expanduser("~/x")
    expanded = []
    for action in actions:
        with pytest.raises(argparse.ArgumentTypeError, match="got 's3://x'"):
            action.type("s3://x")
        try:
            expanded.append(action.type("~/x"))
        except argparse.ArgumentTypeError as error:
            assert "got '~/x'" in str(error)
    assert expanded == [home]  # only prepare_data.py expands it


def test_a_missing_package_is_named_with_its_command() -> None:
    with pytest.raises(InputError, match="no_such is not installed: pip install no_such"):
        require("no_such")
