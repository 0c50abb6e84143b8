"""Sets of a run that contain the same text."""

import re
import shutil

import pytest

from scripts.prepare_data import main as prepare
from tests.text_files import TEXTS, write_jsonl
from training.config.data import DataConfig, TrainSet, ValidationSet
from training.data.build_data import unverified_sets
from training.data.manifest import shared_text
from training.data.token_set import TokenSet


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory):
    """Prepared folders: of one file, of the same file with a held-out share, and of another
    file."""
    home = tmp_path_factory.mktemp("prepared")
    write_jsonl(home / "rows.jsonl", TEXTS)
    write_jsonl(home / "others.jsonl", [text[::-1] for text in TEXTS])
    trained = ["--train-tokenizer", "257", "--workers", "1"]
    for name, options in {
        "whole": [f"a={home}/rows.jsonl"],
        "cut": [f"a={home}/rows.jsonl", "--validation-fraction", "0.2"],
        "other": [f"a={home}/others.jsonl", f"b={home}/others.jsonl"],
    }.items():
        assert prepare([*options, *trained, "--output", str(home / name)]) == 0
    (home / "link").symlink_to(home / "whole")
    shutil.copytree(home / "whole", home / "copy")
    shutil.copytree(home / "whole", home / "bare")
    (home / "bare/manifest.json").unlink()
    shutil.copytree(home / "bare", home / "bare_copy")
    shutil.copytree(home / "bare", home / "bare_changed")
    with (home / "bare_changed/a.train.bin").open("r+b") as file:
        file.write(b"\1\0")
    return home


@pytest.mark.parametrize(
    ("train", "validation", "how"),
    [
        ({"a": "whole/a.train"}, {"a": "whole/a.train"}, "both sets are"),
        ({"a": "whole/a.train"}, {"a": "link/a.train"}, "both sets are"),
        ({"a": "bare/a.train"}, {"a": "bare/a.train"}, "both sets are"),
        ({"a": "whole/a.train"}, {"a": "copy/a.train"}, "have equal tokens"),
        ({"a": "whole/a.train"}, {"a": "cut/a.validation"}, "have 1 inputs in common"),
        ({"a": "whole/a.train", "b": "cut/a.train"}, {}, "have 1 inputs in common"),
        ({"a": "other/a.train", "b": "other/b.train"}, {}, "have equal tokens"),
        ({"a": "cut/a.train"}, {"a": "cut/a.validation"}, None),
        ({"a": "whole/a.train", "b": "other/b.train"}, {}, None),
        ({"a": "bare/a.train"}, {"a": "cut/a.validation"}, None),
        ({"a": "bare/a.train"}, {"a": "bare_copy/a.train"}, "are equal in size and in the first"),
        ({"a": "bare/a.train", "b": "bare_copy/a.train"}, {}, "are equal in size"),
        ({"a": "whole/a.train"}, {"a": "bare/a.train"}, "are equal in size"),
        ({"a": "bare/a.train"}, {"a": "bare_changed/a.train"}, None),
        ({"a": "other/a.train"}, {"a": "cut/a.validation", "b": "whole/a.train"}, None),
        ({"a": "whole/a.train"}, {"a": "nowhere/a.train"}, None),
    ],
)
def test_sets_of_the_same_text_are_named(prepared, train, validation, how) -> None:
    data = DataConfig(
        train={name: TrainSet(path=str(prepared / path)) for name, path in train.items()},
        validation={n: ValidationSet(path=str(prepared / path)) for n, path in validation.items()},
    )
    said = list(shared_text(data))
    assert len(said) == (how is not None)
    other = "validation set a" if validation else "training set b"
    for text in said:
        assert text.startswith(f"training set a and {other} contain the same text: ")
        assert re.search(how or "", text)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {},
            "not verified, because no manifest.json contains their hashes: train.b, validation.a",
        ),
        ({"verify": "full"}, "no manifest.json contains their hashes: train.b, validation.a"),
        ({"verify": "none"}, None),
        ({"mock": True}, None),
        ({"train": {"a": "whole"}, "validation": {}}, None),
    ],
)
def test_sets_without_hashes_are_named(prepared, keys, expected) -> None:
    """`data.verify` cannot detect damage in these sets."""
    sets = {"train": {"a": "whole", "b": "bare"}, "validation": {"a": "bare"}} | keys
    opened = {
        kind: [
            TokenSet(k, prepared / folder / "a.train", 8) for k, folder in sets.pop(kind).items()
        ]
        for kind in ("train", "validation")
    }
    text = unverified_sets(DataConfig(**sets), opened)
    assert text is None if expected is None else text is not None and text.endswith(expected)
