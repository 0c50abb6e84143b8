"""Configs from other people: they read nothing, execute nothing, and load in bounded time."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.minimal_config import MINIMAL, problems
from tests.run_configs import tiny_config
from training.config import (
    InvalidConfigError,
    MissingRuleError,
    load_config,
    load_saved_config,
    to_yaml,
)
from training.config.yaml_files import LARGEST, escaped, unescaped
from training.report.console import next_commands, start_line

SECRET = "hunter2"


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)


@pytest.mark.usefixtures("secret")
@pytest.mark.parametrize("value", ["${oc.env:SECRET}", "${run.dir}", "${oc.decode:${oc.env:X}}"])
def test_nothing_in_a_saved_config_refers_to_anything(tmp_path: Path, value: str) -> None:
    config = tiny_config(str(tmp_path))
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(config).replace("name: test", f"name: {value}"))
    assert load_saved_config(saved).run.name == value
    saved.write_text(f"base: {tmp_path}/config.yaml\n" + to_yaml(config))
    with pytest.raises(InvalidConfigError, match="unknown key base"):
        load_saved_config(saved)


@pytest.mark.parametrize("base", ["/proc/kmsg", "/proc/self/environ", "/sys/kernel/notes"])
def test_a_base_that_the_kernel_makes_is_not_read(base: str, tmp_path: Path) -> None:
    """Links to such files are rejected as well. Reading /proc/kmsg would wait for the next
    message."""
    (tmp_path / "link.yaml").symlink_to(base)
    for name in (base, "link.yaml"):
        (tmp_path / "config.yaml").write_text(f"base: {name}\n")
        with pytest.raises(InvalidConfigError, match="Not a file on disk"):
            load_config(tmp_path / "config.yaml")


@pytest.mark.usefixtures("secret")
def test_the_environment_is_read_only_where_a_key_is_a_path(minimal: Path) -> None:
    keys = ["run.dir=runs/${oc.env:SECRET}", "data.train.text.path=${run.dir}"]
    config = load_config(minimal, keys)
    assert config.run.dir == config.data.train["text"].path == f"runs/{SECRET}"
    for value in ("${oc.env:SECRET}", "x ${ oc.env :SECRET}", "${oc.decode:${oc.env:SECRET}}"):
        (problem,) = problems(minimal, f"run.name={value}")[:1]
        assert problem.startswith("run.name must not use '${") and SECRET not in problem
    (problem,) = problems(minimal, "run.dir=${oc.create:1}")
    assert problem.startswith("run.dir must not use")


@given(st.lists(st.sampled_from(["\\", "${", "a", "}", "$", "{", ":", " ", "oc.env", "#"])))
def test_text_is_what_it_was_after_escaping(parts: list[str]) -> None:
    assert unescaped(escaped("".join(parts))) == "".join(parts)


def fan_out(folder: Path) -> None:
    """Write thirty files, each of which names the next file twice, so that a billion files would
    have to be read."""
    for number in range(30):
        following = f"{number + 1}.yaml"
        (folder / f"{number}.yaml").write_text(f"base: [{following}, {following}]\n")
    (folder / "30.yaml").write_text(MINIMAL)
    (folder / "config.yaml").write_text("base: 0.yaml\n")


def aliases(folder: Path) -> None:
    """Write a config with aliases that expand to lists of ten lists of ten lists and so on."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    (folder / "config.yaml").write_text("\n".join(lines))


def written(text: str | bytes) -> Callable[[Path], None]:
    """Return a function that writes `text` as the config."""
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / "config.yaml").write_bytes(content) and None


def endless_base(folder: Path) -> None:
    """Write a config whose base is a pipe without a writer."""
    os.mkfifo(folder / "fifo")
    (folder / "config.yaml").write_text("base: fifo\n")


HARMFUL: dict[str, tuple[Callable[[Path], None], str]] = {
    "a fan-out of bases": (fan_out, "its bases must not exceed 64 files"),
    "aliases of aliases": (aliases, "aliases must not expand to more than 100000 values"),
    "an alias of itself": (written("a: &a [*a]"), "aliases must not expand to more than"),
    "a FIFO as a base": (endless_base, "fifo, the base of .*config.yaml must be a regular file"),
    "a folder": (lambda folder: (folder / "config.yaml").mkdir(), "must be a regular file"),
    "deep nesting": (written("a: " + "[" * 2000 + "]" * 2000), "too many nested levels"),
    "deep sections": (
        written("a: " + "{a: " * 300 + "1" + "}" * 300),
        "too many nested levels|unknown",
    ),
    "a huge file": (written("a" * (LARGEST + 1)), f"must have at most {LARGEST} bytes"),
    "a number of many digits": (written("a: " + "1" * 5000), "is not valid YAML: Exceeds"),
    "not UTF-8": (written(b"a: \xff"), "the text must be UTF-8, got byte 0xff at offset 3"),
    "UTF-16": (written("a: 1".encode("utf-16")), "the text must be UTF-8, got byte 0xff at"),
    "a reference to a default": (
        written("run: {name: '${seed}'}"),
        "run.name refers to a missing key .*'seed'.* not keys with defaults",
    ),
    "two colons": (written("a: b: c"), "not allowed in this context at line 1, column 5"),
    "a tag": (written("a: !!python/object/apply:os.system [id]"), "is not valid YAML"),
    "two merges": (written("a: {<<: {b: 1}, <<: {b: 2}}"), "a mapping must have at most one <<"),
    "a mapping as a truth": (written("a: !!bool {=: foo}"), "must not have the tag !!bool"),
    "no truth": (written("a: !!bool foo"), "must match its tag, got !!bool 'foo'"),
    "no time": (written("a: [!!timestamp x]"), "must match its tag, got !!timestamp 'x'"),
    "no number": (written("a: !!int ''"), "must match its tag, got !!int ''"),
    "nothing": (written(""), "is required"),
    "a list": (written("[1]"), "must contain a mapping"),
    "text": (written("text"), "is not valid YAML|must contain a mapping|unknown key"),
    "a reference to itself": (
        written("a: ${b}\nb: ${a}"),
        "too many nested levels|Recursive|cycle",
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", HARMFUL)
def test_a_harmful_file_is_a_line(case: str, tmp_path: Path) -> None:
    write, said = HARMFUL[case]
    write(tmp_path)
    with pytest.raises(InvalidConfigError, match=said):
        load_config(tmp_path / "config.yaml")
    if case not in ("a fan-out of bases", "a FIFO as a base", "a reference to itself"):
        with pytest.raises(InvalidConfigError):
            load_saved_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    "override",
    [
        "a=" + "[" * 2000,
        "a=" + "1" * 5000,
        "run.name=${",
        "a=&x [*x]",
        "a[0]=1",
        "a.b.c" * 500 + "=1",
    ],
)
def test_a_harmful_override_is_a_line(override: str, minimal: Path) -> None:
    assert problems(minimal, override)


@pytest.mark.parametrize("text", ["/x/a #1", "#1", "x\n#y", "[a] # b", "b: c #d", "'#1' # b"])
def test_a_comment_in_an_override_is_refused(minimal: Path, text: str) -> None:
    (problem,) = problems(minimal, f"run.dir={text}")
    assert problem.endswith("text after # is a comment; quote strings containing #")
    assert load_config(minimal, ["run.dir='/x/a #1'"]).run.dir == "/x/a #1"


DECIMAL = "decimal"
NUMBERS = ["010", "1:30", "-0_7", "1:30.5", "1_0", "0b11", ".1_5", "0x1F", "1_0e3", "-1_0.5"]
TINY = ["1e-400", "1.0e-400", "-.5E-999"]


@pytest.mark.parametrize(
    ("number", "rule"),
    [*((n, DECIMAL) for n in NUMBERS), *((n, "0 or at least 1e-323 in magnitude") for n in TINY)],
)
def test_a_number_that_yaml_reads_as_another_is_refused(minimal, number, rule):
    wanted = f"a number must be {rule}, got {number}"
    (problem,) = problems(minimal, f"train.steps={number}")
    assert wanted in problem
    minimal.write_text(minimal.read_text() + f"\nseed: {number}\n")
    (problem,) = problems(minimal)
    assert wanted in problem


@pytest.mark.parametrize("name", ["no", "On", "TRUE", "1.50", "1e3"])
def test_a_key_that_yaml_reads_as_another_is_refused(minimal: Path, name: str) -> None:
    (problem,) = problems(minimal, f"data.train={{{name}: {{path: x}}}}")
    assert problem.endswith(f"a key must be a string (quote it), got {name}")
    quoted = load_config(minimal, [f"data.train={{'{name}': {{path: x}}}}"])
    assert name in quoted.data.train


@pytest.mark.parametrize(("key", "before"), [("pc", "pc.level=4"), ("data.train", "seed=1")])
def test_an_empty_section_that_would_change_nothing_is_refused(minimal, key, before) -> None:
    (problem,) = problems(minimal, before, f"{key}={{}}")
    assert problem.startswith(f"{key}={{}} changes nothing, because sections are merged")
    minimal.write_text(f"{minimal.read_text()}pc: {{level: 4}}\n")
    config = load_config(minimal, ["pc={replace: true}"])
    assert config.pc is not None and config.pc.level != 4


@pytest.mark.parametrize("name", ["''", "' '", "..", "../a", "a//b", "a/.", '"a\\nb"', '"\\e[2J"'])
def test_a_name_makes_a_folder_of_its_own(minimal: Path, name: str) -> None:
    (problem,) = problems(minimal, f"run.name={name}", "run.dir='runs/${run.name}'")
    assert problem.startswith("run.name must consist of names other than '.' and '..', separated")


def test_a_run_folder_is_a_path(minimal: Path) -> None:
    (problem,) = problems(minimal, "run.dir=''")
    assert problem.startswith("run.dir must be a folder path, got")


def test_commands_that_a_run_prints_are_quoted(tmp_path: Path) -> None:
    config = tiny_config(str(tmp_path), run__dir="a; b", checkpoint__interval=5)
    assert "`touch 'a; b/STOP'` saves and stops" in start_line(config)
    unsaved = replace(config, checkpoint=replace(config.checkpoint, interval=0))
    assert "stops without saving, because checkpoint.interval is 0" in start_line(unsaved)
    assert all("'a; b'" in command for command in next_commands(config))


@pytest.mark.parametrize(
    ("keys", "scripts", "end"),
    [
        ({}, ["plot", "generate", "convert_hf"], "exported/tiny.2"),
        ({"checkpoint__interval": 0}, ["plot"], "--html"),
        ({"data__mock": True}, ["plot", "convert_hf"], "exported/tiny.2 --no-tokenizer"),
        (
            {"model__family": "gpt", "model__activation": "relu2"},
            ["plot", "convert_hf"],
            "exported/tiny.2 --format consolidated",
        ),
    ],
)
def test_commands_that_a_run_prints_are_not_refused(keys, scripts, end, tmp_path, monkeypatch):
    """An export would reject an existing target, a model without a class, and a missing
    tokenizer."""
    monkeypatch.chdir(tmp_path)
    for name in ("tiny", "tiny.1"):
        Path("exported", name).mkdir(parents=True)
    config = tiny_config(str(tmp_path), **{"run__name": "tiny", "checkpoint__interval": 5, **keys})
    commands = list(next_commands(config))
    assert [Path(command.split()[1]).stem for command in commands] == scripts
    assert commands[-1].endswith(end)


def test_a_saved_config_may_contain_a_key_that_is_gone(minimal: Path) -> None:
    config = load_config(minimal)
    section = "  distributed:\n"
    minimal.write_text(to_yaml(config).replace(section, f"{section}    storage: auto\n"))
    assert load_saved_config(minimal) == config
    with pytest.raises(InvalidConfigError, match="unknown key optimizer.distributed.storage"):
        load_config(minimal)


@pytest.mark.parametrize(
    ("old", "new"),
    [("rule: adamw\n", "rule: elsewhere\n"), ("roles: {}", "roles: {o: {rule: elsewhere}}")],
)
def test_a_run_needs_the_packages_of_the_rules_that_it_uses(minimal, old, new) -> None:
    """Settings of other rules that were installed cause no error."""
    config = load_config(minimal)
    text = to_yaml(config).replace("  rules:\n", "  rules:\n    elsewhere: {strength: 2}\n")
    minimal.write_text(text)
    assert load_saved_config(minimal) == config and old in text
    minimal.write_text(text.replace(old, new))
    with pytest.raises(MissingRuleError, match="^no installed package provides rule elsewhere$"):
        load_saved_config(minimal)
