"""The corpus from Debian packages: reading, cutting, and refusals."""

import gzip
import hashlib
import json
import lzma
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from scripts.make_corpus import main
from tests.run_results import json_lines

pytestmark = pytest.mark.slow

needs_dpkg = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no dpkg-deb")


@pytest.fixture
def deb(tmp_path: Path) -> Path:
    """A package with three texts and another file, built by Debian's own tool."""
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
def description(tmp_path: Path, deb: Path) -> Path:
    """Return a corpus of the package and an additional file."""
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
