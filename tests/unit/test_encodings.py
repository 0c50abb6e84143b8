"""Text files are UTF-8 in every locale: every call names the encoding."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_imports import files

WHOLE = ("read_text", "write_text")
OTHERS = ("os", "tarfile", "gzip", "lzma")
"""Modules whose `open` is binary by default."""


def left_to_the_locale(source: str) -> Iterator[str]:
    """Yield each call that opens a text file without an encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(k.arg == "encoding" for k in call.keywords):
            continue
        function, mode = call.func, "r"
        if isinstance(function, ast.Attribute):
            name, place, owner = function.attr, 0, ast.unparse(function.value)
        else:
            name, place, owner = ast.unparse(function), 1, ""
        named = [k.value for k in call.keywords if k.arg == "mode"]
        for argument in call.args[place : place + 1] + named:
            mode = argument.value if isinstance(argument, ast.Constant) else mode
        of_text = name == "open" and owner not in OTHERS and "b" not in str(mode)
        if name in WHOLE or of_text:
            yield ast.unparse(call)


def test_files_of_text_name_their_encoding(root: Path) -> None:
    found = {place: [*left_to_the_locale(source)] for place, source in files(root).items()}
    assert {place: calls for place, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("path.write_text('a')", 1),
        ("path.read_text(errors='replace')", 1),
        ("open(path)", 1),
        ("path.open('a')", 1),
        ("open(path, mode='w')", 1),
        ("path.open('rb'); open(path, 'wb', 0); os.open(path, 0)", 0),
        ("path.read_text(encoding='utf-8'); open(path, 'a', encoding='utf-8')", 0),
    ],
)
def test_a_call_without_an_encoding_is_seen(source: str, count: int) -> None:
    assert len([*left_to_the_locale(source)]) == count
