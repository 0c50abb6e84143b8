"""A study runs every variant with every seed and compares them seed by seed."""

import json
from pathlib import Path
from statistics import mean, stdev

import pytest
import yaml

from scripts.study import Study, Variant, compare, main, markdown, read_study
from tests.token_files import write_token_set

TWO = Study("two", [1, 2, 3], {"a": Variant("a.yaml"), "b": Variant("b.yaml", [], "a")})


def test_differences_are_paired_by_seed():
    a, b = [2.0, 3.0, 4.0], [1.9, 2.8, 3.7]
    first, second = compare(TWO, {"a": a, "b": b})
    assert (first.loss, first.error) == (3.0, pytest.approx(1 / 3**0.5))
    assert first.difference is None
    assert second.difference == pytest.approx(mean([-0.1, -0.2, -0.3]))
    # Seeds differ by 1, variants by a tenth: only pairs show it.
    assert second.difference_error == pytest.approx(stdev([-0.1, -0.2, -0.3]) / 3**0.5)
    assert second.error > 5 * second.difference_error
    assert "| b | 2.8000 ± 0.5196 | -0.2000 ± 0.0577 | a |" in markdown([first, second])


@pytest.fixture
def study_file(minimal, tmp_path) -> Path:
    """A study of one-step runs."""
    config = yaml.safe_load(minimal.read_text())
    write_token_set(tmp_path / "tokens", tokens=4_000, vocab=120, seed=0)
    sets = {"walk": {"path": str(tmp_path / "tokens")}}
    config["data"] = {"train": sets, "validation": sets}
    config["model"] |= {"layers": 1, "hidden": 32, "heads": 2, "ffn": 48, "vocab_size": 120}
    config["train"] = {"steps": 1, "global_batch": 2, "micro_batch": 2, "sequence_length": 16}
    config["schedule"] = {"kind": "constant"}
    minimal.write_text(yaml.safe_dump(config))
    path = tmp_path / "study.yaml"
    study = {
        "title": "t",
        "seeds": [1, 2],
        "overrides": ["validation.samples=4", "checkpoint.interval=0"],
        "variants": {
            "plain": {"config": str(minimal)},
            "lr": {
                "config": str(minimal),
                "overrides": ["optimizer.embedding.lr=0.5"],
                "against": "plain",
            },
        },
    }
    path.write_text(yaml.safe_dump(study, sort_keys=False))
    return path


def test_a_study_runs_once_and_goes_on(study_file, tmp_path, capsys):
    output = tmp_path / "out"
    assert main([str(study_file), str(output)]) == 0
    result = json.loads((output / "results.json").read_text())
    plain, other = result["rows"]
    assert len(plain["losses"]) == 2 and len(set(plain["losses"] + other["losses"])) == 4
    lines = (output / "lr-2" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["val/walk/loss"] == other["losses"][1]
    capsys.readouterr()
    assert main([str(study_file), str(output)]) == 0
    assert "seed" not in capsys.readouterr().out  # nothing was trained again
    assert json.loads((output / "results.json").read_text()) == result


def test_a_failing_run_is_named(study_file, tmp_path, capsys):
    assert main([str(study_file), str(tmp_path / "out"), "train.steps=0"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: plain, seed 1, ended with 2") and "train.steps" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [1]}, "two or more different ones"),
        ({"variants": {"a": {"config": "x", "against": "b"}}}, "a is against b, which is no"),
        ({"variants": {"a": {"file": "x"}}}, "must have title, seeds and variants"),
        ({"runs": 3}, "must have title, seeds and variants"),
    ],
)
def test_what_is_no_study_is_refused(study_file, change, message, capsys):
    study_file.write_text(yaml.safe_dump(yaml.safe_load(study_file.read_text()) | change))
    assert main([str(study_file), str(study_file.parent / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_studies_of_the_repository_can_be_read(root):
    for path in sorted((root / "studies").glob("*.yaml")):
        study = read_study(path)
        assert all((root / each.config).is_file() for each in study.variants.values())
