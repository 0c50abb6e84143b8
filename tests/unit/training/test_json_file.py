"""Damaged or malicious JSON raises a ValueError, and values with a wrong shape are named."""

import pytest

from tests.token_files import write_manifest
from training.data.manifest import read_manifest
from training.errors import DataError, InputError
from training.json_file import check_shape, parse_json


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff", b"", b"{", b"1" * 5000]
)
def test_what_cannot_be_read_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "b": 2}', '[{"c": {"b": null, "b": 0}}]'])
def test_a_key_that_is_twice_in_an_object_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="^keys of an object must be unique, got 'b' twice$"):
        parse_json(text)


def test_a_pointer_of_git_lfs_is_named() -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    for each in (text, text.encode()):
        with pytest.raises(ValueError, match="a Git LFS pointer, .* git lfs pull"):
            parse_json(each)


SHAPE = {"step": int, "windows": [[int]], "files": {...: {"bytes": int}}, "rate": float | int}
GOOD = {"step": 1, "windows": [[1, 2]], "files": {"a": {"bytes": 3}}, "rate": 2, "more": None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": "1"}, "meta.step must be of type int, got '1'"),
        ({"step": True}, "meta.step must be of type int, got True"),
        ({"windows": [[1], 2]}, r"meta.windows\[1\] must be a list, got 2"),
        ({"windows": [[1.5]]}, r"meta.windows\[0\]\[0\] must be of type int, got 1.5"),
        ({"files": {"b": {}}}, "meta.files.b must have the key bytes"),
        ({"files": []}, r"meta.files must be a mapping, got \[\]"),
        ({"rate": None}, r"meta.rate must be of type float \| int, got None"),
    ],
)
def test_the_first_wrong_value_is_named(change: dict[str, object], said: str) -> None:
    check_shape(GOOD, SHAPE, "meta")
    with pytest.raises(InputError, match=f"^{said}$"):
        check_shape({**GOOD, **change}, SHAPE, "meta")


def test_an_entry_of_another_type_is_named(tmp_path) -> None:
    write_manifest(tmp_path, sha256="text")
    with pytest.raises(DataError, match="sets.a.sha256 must be a section, got 'text'"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["../secret.json", "/etc/hostname", ""])
def test_a_manifest_that_names_a_file_elsewhere_is_refused(tmp_path, name: str) -> None:
    write_manifest(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(path.read_text().replace("tokenizer.json", name))
    with pytest.raises(DataError, match="must list only files in the same folder, got"):
        read_manifest(tmp_path)
