"""The examples train: when started as in their first lines, their losses fall."""

import json
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.commands import output_of, torchrun
from tests.launch import environment


def losses(root: Path, folder: Path, *command: str) -> list[float]:
    """Return the losses that an example prints."""
    found = re.findall(r"^step \d+ loss ([\d.]+)", printed(root, folder, *command), re.MULTILINE)
    return [float(x) for x in found]


def printed(root: Path, folder: Path, *command: str) -> str:
    """Run Python in the folder of the examples, with the library under the wheel's name, and return
    the output."""
    (folder / "spectrain").symlink_to(root / "spectral")
    path = os.pathsep.join(
        [str(folder), str(root / "examples"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    variables = environment() | {"PYTHONPATH": path}
    return output_of(sys.executable, *command, folder=root / "examples", variables=variables)


def check(found: list[float]) -> None:
    # ln 256 = 5.55 at the start; byte frequencies of English alone give 3.1.
    assert found[0] > 5 and found[-1] < 3.9, found


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("plain_loop", "torch"),
        pytest.param("hf_trainer", "accelerate", marks=pytest.mark.slow),
        pytest.param("lightning_module", "lightning", marks=pytest.mark.slow),
    ],
)
def test_an_example_trains(root: Path, tmp_path: Path, name: str, needed: str) -> None:
    if find_spec(needed) is None:
        pytest.skip(f"examples/{name}.py needs {needed}, which is not installed")
    check(losses(root, tmp_path, f"{name}.py", "--steps", "60"))


def test_repeated_words_repeat_a_line(root: Path, tmp_path: Path) -> None:
    words = [a + b * 3 for a in "abcde" for b in "vwxyz"]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": f"Not, no, {' '.join(words)}"}))
    lines = printed(root, tmp_path, "data/repeated_words.py", str(tmp_path / "a.jsonl"))
    texts = [json.loads(line)["text"].splitlines() for line in lines.splitlines()]
    assert len({first for first, *_ in texts}) == len(texts) == 400
    for text in texts:
        first = text[0].split()
        assert text == [text[0]] * 6
        assert len(first) == len({*first} & {*words}) == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torchtitan_fsdp2", "accelerate_fsdp2"])
def test_an_example_trains_on_two_ranks(root: Path, tmp_path: Path, name: str) -> None:
    if name == "accelerate_fsdp2":
        pytest.importorskip("accelerate")
    check(losses(root, tmp_path, *torchrun(2), f"{name}.py", "--steps", "20"))


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(root: Path, tmp_path: Path) -> None:
    notebook = json.loads((root / "examples" / "first_look.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    stored = "".join("".join(output.get("text", [])) for output in outputs)
    script = tmp_path / "cells.py"
    lines = ["import matplotlib", "matplotlib.use('Agg')"]
    lines += ["".join(cell["source"]) for cell in cells]
    script.write_text("\n".join([*lines, "print(f'figures {len(plt.get_fignums())}')"]))
    text = printed(root, tmp_path, str(script))
    found = re.findall(r"^(\w+) loss ([\d.]+) ([\d.]+)", text, re.MULTILINE)
    assert [name for name, _, _ in found] == ["AdamW", "Muon", "SSO"]
    for _, first, last in found:
        check([float(first), float(last)])
    assert "figures 2" in text
    # The stored outputs belong to these cells, from another processor.
    shown = re.findall(r"^(\w+) loss ([\d.]+) ([\d.]+)", stored, re.MULTILINE)
    assert [float(last) for *_, last in shown] == pytest.approx(
        [float(last) for *_, last in found], rel=0.05
    )
    largest = re.search(r"^SSO largest [\d.]+ ([\d.]+)", text, re.MULTILINE)
    # On the sphere of radius sqrt(256 / 64), up to the error of few power iterations.
    assert largest is not None and float(largest[1]) == pytest.approx(2, rel=0.02)
