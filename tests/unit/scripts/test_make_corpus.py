"""The corpus out of Debian packages: what is read of one, how it is cut, what is refused."""

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.data.corpus import read_corpus
from scripts.data.debian import read_texts, version_of
from scripts.make_corpus import DESCRIPTION, main
from training.errors import DataError

pytestmark = pytest.mark.slow

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")


@pytest.fixture
def deb(tmp_path: Path) -> Path:
    """A package with three texts and a file that is none, built by Debian's own tool."""
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


@needs_dpkg
def test_texts_of_a_package_are_sorted_and_decompressed(deb: Path) -> None:
    patterns = ["usr/share/doc/thing/*.txt", "usr/share/doc/thing/*.txt.gz"]
    assert list(read_texts(deb, patterns, ["todo.txt"])) == [
        ("usr/share/doc/thing/a.txt.gz", "the fïrst\n"),
        ("usr/share/doc/thing/b.txt", "the second\n"),
    ]
    assert version_of(deb) == "1:2.0-3"
    with pytest.raises(DataError, match=r"thing-doc_2.0-3_all.deb has no file \*.rst"):
        list(read_texts(deb, ["*.rst"], []))
    with pytest.raises(DataError, match="picture.png is not UTF-8"):
        list(read_texts(deb, ["*.png"], []))
    deb.write_bytes(b"not a package")
    with pytest.raises(DataError, match="is not a readable package"):
        list(read_texts(deb, ["*"], []))


@pytest.fixture
def description(tmp_path: Path, deb: Path) -> Path:
    """A corpus of the package and a file of ours."""
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
    assert "  thing-doc 1:2.0-3: 1 documents, 11 bytes, GPL-2.0\n" in printed
    lines = (output / "texts.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["the second\n", "A\n  a\n", "B\n  b\n"]
    assert hashlib.sha256((output / "texts.jsonl").read_bytes()).hexdigest() in printed


@needs_dpkg
def test_other_texts_are_refused_and_the_package_is_named(description, tmp_path, capsys) -> None:
    content = yaml.safe_load(description.read_text())
    content["sets"]["texts"]["sha256"] = "0" * 64
    content["sets"]["texts"]["sources"][0]["sha256"] = "1" * 64
    description.write_text(yaml.safe_dump(content))
    assert main([str(tmp_path / "out"), "--corpus", str(description)]) == 2
    error = capsys.readouterr().err
    assert "the documents of texts have sha256" in error and "expected 0000" in error
    assert "not the recorded packages: thing-doc 1:2.0-3. Run `apt-get update` and try" in error
    assert not (tmp_path / "out" / "texts.jsonl").exists()
    assert main([str(tmp_path / "out"), "--corpus", str(description), "--accept-changed"]) == 0
    printed = capsys.readouterr().out
    assert f", recorded were {'0' * 64}\n  thing-doc 1:2.0-3 (not the recorded ver" in printed
    assert (tmp_path / "out" / "texts.jsonl").exists()


def test_the_description_of_the_corpus_is_whole() -> None:
    corpus = read_corpus(DESCRIPTION)
    assert list(corpus.sets) == ["manuals", "prose", "reference"]
    for content in corpus.sets.values():
        assert len(content.sha256) == 64
        for source in content.sources:
            assert source.licence and (source.file or len(source.sha256) == 64)
