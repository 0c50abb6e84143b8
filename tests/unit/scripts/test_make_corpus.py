"""The corpus from Debian packages: reading, cutting, and errors."""

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess

import pytest
import yaml

from scripts.data.debian import documents, read_texts
from scripts.make_corpus import main
from tests.run_results import json_lines

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")


@pytest.fixture
def deb(tmp_path):
    """A package with three texts and another file, built with Debian's tool."""
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN" / "control").write_text(
        "Package: thing-doc\nVersion: 1:2.0-3\nArchitecture: all\nMaintainer: x <x@y.z>\n"
        "Description: d\n"
    )
    folder = tree / "usr/share/doc/thing"
    folder.mkdir(parents=True)
    (folder / "b.txt").write_text("the second\n")
    (folder / "a.txt.gz").write_bytes(gzip.compress("the fïrst\n".encode()))
    (folder / "todo.txt").write_text("left out\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    packages = tmp_path / "out" / "packages"
    packages.mkdir(parents=True)
    path = packages / "thing-doc_2.0-3_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "-b", str(tree), str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


@pytest.fixture
def description(tmp_path, deb):
    """The description of a corpus that consists of the package and an additional file."""
    own = tmp_path / "own.txt.xz"
    own.write_bytes(lzma.compress(b"A\n  a\n\nB\n  b\n"))
    sources = [
        {
            "package": "thing-doc", "version": "1:2.0-3", "licence": "GPL-2.0",
            "sha256": hashlib.sha256(deb.read_bytes()).hexdigest(),
            "files": ["usr/share/doc/thing/*.txt"], "leave_out": ["todo.txt"],
        },
        {"file": str(own), "licence": "public domain", "entry": r"\S"},
    ]  # fmt: skip
    rows = [
        {"text": "the second\n", "source": "thing-doc:usr/share/doc/thing/b.txt"},
        {"text": "A\n  a\n", "source": f"{own}:{own}"},
        {"text": "B\n  b\n", "source": f"{own}:{own}"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    sha256 = hashlib.sha256(lines.encode()).hexdigest()
    path = tmp_path / "corpus.yaml"
    path.write_text(yaml.safe_dump({"sets": {"texts": {"sources": sources, "sha256": sha256}}}))
    return path


@needs_dpkg
def test_a_corpus_is_made_of_what_was_recorded(description, tmp_path, capsys) -> None:
    output = tmp_path / "out"
    assert main([str(output), "--corpus", str(description)]) == 0
    printed = capsys.readouterr().out
    assert "  thing-doc 1:2.0-3: 1 document, 11 bytes, GPL-2.0\n" in printed
    found = [line["text"] for line in json_lines(output / "texts.jsonl")]
    assert found == ["the second\n", "A\n  a\n", "B\n  b\n"]
    assert hashlib.sha256((output / "texts.jsonl").read_bytes()).hexdigest() in printed


@needs_dpkg
def test_other_texts_are_refused_with_the_packages_that_differ(description, tmp_path, refusal):
    output, content = [str(tmp_path / "out")], yaml.safe_load(description.read_text())
    arguments = [*output, "--corpus", str(description)]
    package, own = content["sets"]["texts"]["sources"]
    for change, said in (
        ({"sha256": "0" * 64}, None),  # another build of the package with the same texts
        ({"sha256": "0" * 64, "leave_out": []}, "from the recorded one: thing-doc 1:2.0-3. Run"),
        ({"leave_out": []}, "from the recorded one: none. Run"),
        ({"files": ["usr/share/doc/thing/*.gz"]}, "from the recorded one: none. Run"),
        ({"files": ["usr/share/doc/thing/*.md"]}, "contains no files matching usr/share/doc"),
        ({"files": ["usr/share/doc/thing/*.png"]}, "thing/picture.png is not UTF-8: "),
    ):
        content["sets"]["texts"]["sources"] = [package | change, own]
        description.write_text(yaml.safe_dump(content))
        (tmp_path / "out" / "texts.jsonl").unlink(missing_ok=True)
        code = main(arguments)
        assert code == 0 if said is None else said in refusal(code)
        assert (tmp_path / "out" / "texts.jsonl").exists() is (said is None)


@needs_dpkg
def test_compressed_texts_are_read_by_path(deb) -> None:
    texts = read_texts(deb, ["usr/*.gz", "*/b.txt", "*/todo*"], ["todo.*"])
    place = "usr/share/doc/thing/"
    assert [*texts] == [(f"{place}a.txt.gz", "the fïrst\n"), (f"{place}b.txt", "the second\n")]


@pytest.mark.parametrize(
    ("text", "entry", "expected"),
    [
        ("\na\n\nb\n\n", None, ["a\n\nb\n"]),
        ("A\n a\nB\n\n b\n \t\nC\n\n\n\nD", "[A-Z]", ["A\n a\nB\n\n b\n", "C\n", "D\n"]),
        (" \n\n\t\n", "x", []),
    ],
)
def test_an_entry_starts_a_document_only_after_a_blank_line(text, entry, expected) -> None:
    assert [*documents(text, entry)] == expected
