"""Code, configs and pages use the field's words, those of the glossary in docs/architecture.md."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDERS = (
    "benchmarks", "configs", "docs", "examples", "models", "parallel", "requirements", "scripts",
    "spectral", "studies", "tests", "training",
)  # fmt: skip
ENDINGS = (".py", ".md", ".yaml")

WORDS = {
    r"[Jj]ourneys?": "transfer",
    r"Passages?": "transfer plan",
    r"Holdings?": "shard part",
    r"[Tt]ravel(?:s|led|ling)?|[Tt]ravellers?": "sent",
    r"[Hh]om(?:e|es|ed)": "owner, owned unit",
    r"[Cc]ensus": "unit gather",
    r"[Ll]ooked at|monitors look|(?:a|the|per|one) looks?": "inspection, monitored step",
    r"[Vv]iewers?": "inspection rank",
    r"FirstWeights|first_weights": "InitialWeights",
    r"calm": "is_not_spike",
    r"look_memory": "monitor_memory",
    r"own_work_begins": "start_local_timer",
    r"whole_matrix_roles": "clip_matrix_roles",
    r"take_back": "scatter_from_owner",
}
"""Private words, and what to say instead."""

IDENTIFIERS = {"Look", "Setting", "Turns", "alike", "bring", "stays", "staying"}
"""Good English, but no names of ours."""

LEGITIMATE = (re.compile(r"~/|\$HOME|Path\.home\(\)|home folder|home page"),)
"""Lines in which a word has its ordinary meaning."""

BAD_DOCSTRING = re.compile(r'^\s*"""(?:None|0|Nothing);')


def texts(root: Path) -> dict[str, str]:
    """The text by place of every file in the project's folders and beside them, but this one."""
    paths = [path for name in FOLDERS for path in (root / name).rglob("*")]
    paths += root.glob("*")
    chosen = (p for p in sorted(paths) if p.suffix in ENDINGS and p != Path(__file__))
    return {path.relative_to(root).as_posix(): path.read_text() for path in chosen}


def private_words(text: str) -> Iterator[str]:
    """`line number: what is wrong` for every line with a private word or a bad docstring."""
    for number, line in enumerate(text.splitlines(), 1):
        if any(pattern.search(line) for pattern in LEGITIMATE):
            continue
        for word, instead in WORDS.items():
            found = re.search(rf"\b(?:{word})\b", line)
            if found:
                yield f"{number}: {found[0]!r}, say {instead}"
        if BAD_DOCSTRING.match(line):
            yield f"{number}: a docstring must begin with what a function does"


def private_names(source: str) -> Iterator[str]:
    """`line number: name` for every Python identifier that is a private word."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME and token.string in IDENTIFIERS:
            yield f"{token.start[0]}: {token.string!r} is not the name of anything"


def test_every_file_uses_the_fields_words(root: Path) -> None:
    found = []
    for place, text in texts(root).items():
        problems = [*private_words(text)]
        if place.endswith(".py"):
            problems += private_names(text)
        found += [f"{place}:{problem}" for problem in problems]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "class Journey:",
        "the unit's home keeps W",
        "a step that is looked at",
        "what monitors look at",
        "it costs a third of a look",
        '    """None; one update of every unit."""',
        '"""0; the exit code."""',
        "momentum travels in bfloat16",
    ],
)
def test_a_private_word_is_found(line: str) -> None:
    assert [*private_words(line)]


@pytest.mark.parametrize(
    "line",
    ["look up a key", "keys of the home folder ~/runs", "settings of a run", 'x = """None"""'],
)
def test_ordinary_english_is_not_found(line: str) -> None:
    assert not [*private_words(line)]


def test_a_private_name_is_found_and_the_same_word_in_prose_is_not() -> None:
    assert [*private_names("alike = same_shape(units)")]
    assert not [*private_names("# two ranks are alike\nvalue = 'alike'")]
