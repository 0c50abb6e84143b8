"""Markdown tables of all config keys, generated from the docstrings of the fields."""

import ast
import inspect
import sys
from collections.abc import Collection, Iterator
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, cast

from models.section import join, shown
from training.config.binding import allowed_values, one_section, types_of, without_null
from training.config.schema import Config

Row = tuple[str, str, str, str]
"""Key, type, default and description of a leaf."""


def nested(kind: Any) -> type | None:
    """Return the dataclass inside the annotation `kind`, or None for a leaf."""
    inner = without_null(one_section(kind)[0])
    return cast(type, inner) if is_dataclass(inner) else None


def meanings_of(kind: type) -> dict[str, str]:
    """Map the fields of a dataclass and its bases to their docstrings, each as a single line."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        for node, below in pairwise(_classes_of(base.__module__)[base.__name__].body):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                target, text = node.target, below.value
                if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                    meanings[target.id] = " ".join(str(text.value).split())
    return meanings


@cache
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    # Parse the whole module: to find the source of a single class, inspect would tokenize the
    # module, which is far slower.
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def _section(kind: type, path: str, sentence: str, omitted: Collection[Row] = ()) -> Iterator[str]:
    """Yield the lines of a section: its heading (a table row if the section is nested), its keys
    and its subsections.

    Rows in `omitted` are skipped, because they are listed elsewhere for several sections at once.
    """
    types = types_of(kind)
    children = {name: child for name, inner in types.items() if (child := nested(inner))}
    if "." in path:
        yield f"| **{path}** | | | {_cell(sentence)} |"
    else:
        yield from ["", f"## {path or 'Top level'}", ""]
        yield from [sentence, ""] if sentence else []
        yield from ["| key | type | default | |", "|---|---|---|---|"]
    yield from (_line(path, row) for row in _rows(kind) if row not in omitted)
    sections: dict[Row, list[str]] = {}
    for name, child in children.items():
        for row in _rows(child) if types[name] is child and path else ():
            sections.setdefault(row, []).append(name)
    shared = {row: names for row, names in sections.items() if len(names) > 1}
    for row, names in shared.items():
        yield _line(f"{path}.*", (*row[:3], f"{row[3]} For {', '.join(names)}."))
    sentences = meanings_of(kind)
    for name, child in children.items():
        first = (inspect.getdoc(child) or "").split("\n\n")[0]  # paragraph
        about = sentences.get(name) or " ".join(first.split())
        yield from _section(child, join(path, name) + one_section(types[name])[1], about, shared)


def _rows(kind: type) -> list[Row]:
    """Return a row for each leaf of a section."""
    types, sentences = types_of(kind), meanings_of(kind)
    rows = []
    for f in fields(cast(Any, kind)):
        if nested(types[f.name]) is None:
            values = allowed_values(types[f.name]).removeprefix("a ").removeprefix("an ")
            default = f.default if f.default_factory is MISSING else f.default_factory()
            text = "required" if default is MISSING else f"`{shown(default).replace(chr(39), '')}`"
            rows.append((f.name, values, text, sentences[f.name]))
    return rows


def _line(path: str, row: Row) -> str:
    return f"| {' | '.join(map(_cell, (f'`{join(path, row[0])}`', *row[1:])))} |"


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")


def manual() -> str:
    """Return docs/configuration.md: every key with its type, default and description."""
    tables = "\n".join(_section(Config, "", "")).lstrip()
    return f"{MANUAL_HEAD}\n{tables}\n"


MANUAL_HEAD: Final = """\
# Configuration

This page lists all keys of a run's config, which is a YAML file. With `base: other.yaml`, a config
inherits from another config; `base` can also be a list of files. Base paths are relative to the
file containing `base`. Sections are merged; lists and scalars are replaced. `key=value` arguments
after `--config FILE` override the keys in the files. `${section.key}` expands to the value of
another key. In keys whose values are paths, `${oc.env:NAME}` expands to an environment variable.
Data paths are relative to the working directory.

An invalid config raises a single error listing all unknown keys, wrong types and contradictions.
The resolved config is saved in the run folder and can be passed to `--config`. Names in bold are
subsections. In a key, `*` stands for each of the names listed at the end of the row.
"""

if __name__ == "__main__":
    print(manual(), end="")
