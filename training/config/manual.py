"""The manual of a config schema: Markdown tables made from the sentences under the fields."""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from itertools import pairwise
from typing import Any, Final, cast, get_args, get_origin, get_type_hints

from models.section import shown
from training.config.binding import described, join, required, without_null
from training.config.schema import Config


def markdown_tables(root: type) -> str:
    """One Markdown table per section of the nested dataclass `root`, in the order of its fields."""
    return "\n\n".join(_section(root, "", "")) + "\n"


def field_sentences(kind: type) -> dict[str, str]:
    """Per field of the dataclass `kind`, base classes included, the docstring under it."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not is_dataclass(base):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for node, below in pairwise(tree.body):
            if isinstance(node, ast.AnnAssign) and isinstance(below, ast.Expr):
                target, text = node.target, below.value
                if isinstance(target, ast.Name) and isinstance(text, ast.Constant):
                    found[target.id] = " ".join(str(text.value).split())
    return found


def nested(kind: Any) -> type | None:
    """The dataclass that the annotation `kind` is, or holds by name; None for a leaf."""
    inner = get_args(kind)[1] if get_origin(kind) is dict else without_null(kind)
    return cast(type, inner) if is_dataclass(inner) else None


def _section(kind: type, path: str, sentence: str) -> Iterator[str]:
    """The heading, sentence and table of one section, then those of the sections inside it."""
    hints = get_type_hints(kind)
    leaves = [f for f in fields(cast(Any, kind)) if nested(hints[f.name]) is None]
    named = [f for f in fields(cast(Any, kind)) if get_origin(hints[f.name]) is dict]
    sentences = field_sentences(kind) if leaves or named else {}
    yield f"## {path or 'Top level'}"
    if sentence:
        yield sentence
    if leaves:
        yield "\n".join(
            ["| key | type | default | |", "|---|---|---|---|"]
            + [_row(f, hints[f.name], sentences[f.name], path) for f in leaves]
        )
    for f in fields(cast(Any, kind)):
        inner = nested(hints[f.name])
        if inner is not None:
            suffix = ".NAME" if f in named else ""
            about = sentences.get(f.name) or (inner.__doc__ or "").split("\n")[0]
            yield from _section(inner, join(path, f.name) + suffix, about)


def _row(field: Field[Any], kind: Any, sentence: str, path: str) -> str:
    default = "required" if required(field) else f"`{_plain(field)}`"
    cells = [f"`{join(path, field.name)}`", described(kind), default, sentence]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _plain(field: Field[Any]) -> str:
    """The default of a leaf as YAML writes it."""
    return field.default if isinstance(field.default, str) else shown(field.default)


def manual() -> str:
    """docs/configuration.md: every key with its type, default and sentence."""
    return f"{MANUAL_HEAD}\n{markdown_tables(Config)}"


MANUAL_HEAD: Final = """\
# Configuration

Every key of a run config. A file is YAML; `base: other.yaml` (or a list of files), relative to the
file that says it, names what the file is merged over: sections are merged, lists and single values
replaced. `key=value` arguments after `--config FILE` are merged last, and `${section.key}` stands
for another key's value. Paths of data are relative to the working directory.

An unknown key, a wrong type or a contradiction stops the run before it starts; all problems are
reported at once. The resolved config is written to the run folder and is itself a valid config.

This page is generated: `python -m training.config.manual --markdown > docs/configuration.md`.
"""

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the manual of the run config.")
    parser.add_argument("--markdown", action="store_true", required=True, help="as Markdown tables")
    parser.parse_args()
    print(manual(), end="")
