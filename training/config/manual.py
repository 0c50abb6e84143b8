"""The manual of the run config: Markdown tables of keys, made from the sentences under fields."""

import argparse
import inspect
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from typing import Any, Final, cast, get_args, get_origin, get_type_hints

from models.section import shown
from spectral.options import meanings_of
from training.config.binding import described, join, required, without_null
from training.config.schema import Config


def markdown_tables(root: type) -> str:
    """Return a Markdown table per section of the nested dataclass `root`, with its subsections."""
    return "\n".join(_section(root, "", "")).lstrip() + "\n"


def nested(kind: Any) -> type | None:
    """Return the dataclass that the annotation `kind` is or holds, or None for a leaf."""
    inner = get_args(kind)[1] if get_origin(kind) is dict else without_null(kind)
    return cast(type, inner) if is_dataclass(inner) else None


def _section(kind: type, path: str, sentence: str) -> Iterator[str]:
    """Yield a section line by line: its heading, or row if nested, its keys, its subsections."""
    hints = get_type_hints(kind)
    leaves = [f for f in fields(cast(Any, kind)) if nested(hints[f.name]) is None]
    named = [f for f in fields(cast(Any, kind)) if get_origin(hints[f.name]) is dict]
    sentences = meanings_of(kind) if leaves or named else {}
    if "." in path:
        yield f"| **{path}** | | | {_cell(sentence)} |"
    else:
        yield from ["", f"## {path or 'Top level'}", ""]
        yield from [sentence, ""] if sentence else []
        yield from ["| key | type | default | |", "|---|---|---|---|"]
    yield from (_row(f, hints[f.name], sentences[f.name], path) for f in leaves)
    for f in fields(cast(Any, kind)):
        inner = nested(hints[f.name])
        if inner is not None:
            suffix = ".NAME" if f in named else ""
            about = sentences.get(f.name) or " ".join(_summary(inner).split())
            yield from _section(inner, join(path, f.name) + suffix, about)


def _summary(kind: type) -> str:
    """The first paragraph of the docstring of `kind`."""
    return (inspect.getdoc(kind) or "").split("\n\n")[0]


def _row(field: Field[Any], kind: Any, sentence: str, path: str) -> str:
    default = "required" if required(field) else f"`{_plain(field)}`"
    cells = [f"`{join(path, field.name)}`", described(kind), default, sentence]
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")


def _plain(field: Field[Any]) -> str:
    """The default of a leaf as YAML writes it."""
    if isinstance(field.default, tuple):
        return f"[{', '.join(map(str, field.default))}]"
    return field.default if isinstance(field.default, str) else shown(field.default)


def manual() -> str:
    """Return docs/configuration.md: every key with its type, default and sentence."""
    return f"{MANUAL_HEAD}\n{markdown_tables(Config)}"


MANUAL_HEAD: Final = """\
# Configuration

Every key of a run config, a YAML file. `base: other.yaml`, or a list of files, names what the file
extends, relative to the file itself: sections are merged, lists and single values replaced.
`key=value` arguments after `--config FILE` come last. `${section.key}` is the value of another key;
in keys that are paths, `${oc.env:NAME}` is an environment variable. Paths of data are relative to
the working directory.

A run with an unknown key, a wrong type or a contradiction does not start; the error lists all
problems. The run folder gets the resolved config, itself a valid config. Names in bold are
subsections.
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the manual of the run config.")
    parser.add_argument("--markdown", action="store_true", required=True, help="as Markdown tables")
    parser.parse_args()
    print(manual(), end="")
