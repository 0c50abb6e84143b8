"""Generate malformed inputs: configs, and files with damaged bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

Keys = tuple[str, ...]

EXTREMES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**31, 2**63, 10**15, 10**30, -(10**30), 0.0, -0.5, 0.5,
    1e-300, 1e12, 1e300, -1e300, float("nan"), float("inf"), "", "x", "0", "none", "muon", "a/b",
    "${seed}", "${nowhere}", "${oc.env:HOME}", "${", "\\${seed}", "\x00", "é" * 300, [], [1], ["x"],
    [[]], [None], {}, {"x": 1}, {"x": {"y": {}}}, [0, 1], [3, 1], "2026-01-01", "1e5", "0x10",
]  # fmt: skip
"""Values to try for any key: valid, invalid and absurd."""


def leaves(content: dict[str, Any], path: Keys = ()) -> Iterator[Keys]:
    """Yield the path of every key in nested mappings that is not itself a section."""
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key)


def replaced(content: dict[str, Any], path: Keys, value: Any) -> dict[str, Any]:
    """Return `content` with the value at `path` replaced."""
    first, *rest = path
    inner = replaced(content.get(first) or {}, tuple(rest), value) if rest else value
    return {**content, first: inner}


def changes(content: dict[str, Any], more: list[Keys]) -> st.SearchStrategy[dict[Keys, Any]]:
    """Draw one to three keys from a config and `more`, with values from `EXTREMES`."""
    paths = sorted({*leaves(content), *more})
    return st.dictionaries(
        st.sampled_from(paths), st.sampled_from(EXTREMES), min_size=1, max_size=3
    )


def damages() -> st.SearchStrategy[tuple[str, float, bytes]]:
    """Draw damage to a file: the kind, the position as a fraction of the file, and bytes."""
    return st.tuples(
        st.sampled_from(["flip", "cut", "insert", "zero", "repeat", "replace"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=16),
    )


FLIP = ("flip", 0.5, b"")
"""Flip a bit in the middle."""


def damage(path: Path, how: tuple[str, float, bytes]) -> None:
    """Damage a file in one way."""
    kind, share, more = how
    content = path.read_bytes()
    position = int(share * len(content))
    before, after = content[:position], content[position:]
    match kind:
        case "flip":
            content = before + bytes(byte ^ 1 for byte in after[:1]) + after[1:]
        case "cut":
            content = before
        case "insert":
            content = before + more + after
        case "zero":
            content = before + bytes(len(after[:4096])) + after[4096:]
        case "repeat":
            content = content + after
        case _:
            content = before + more + after[len(more) :]
    path.write_bytes(content)
