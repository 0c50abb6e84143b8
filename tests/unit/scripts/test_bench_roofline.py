"""The roofline of optimizers' steps: ours and torch's on the same matrices, by parts."""

import json
from pathlib import Path

import pytest

from scripts.bench.roofline import Row, changes_nothing, goals, main
from training.rehearsal.guard import GuardError, built


@pytest.mark.slow
def test_steps_are_counted_by_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        built()
    except GuardError as error:
        pytest.skip(str(error))
    file = tmp_path / "roofline.json"
    arguments = ["--small", "--ranks", "2", "--rules", "adamw", "muon", "--pc", "no"]
    assert main([*arguments, "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["constants"]["copy_rate"] == 3.0e12
    rows = {(r["side"], r["rule"], r["scope"]): r for r in found["rows"]}
    assert len(rows) == 6 and all(row["error"] is None for row in rows.values())
    for row in rows.values():
        assert row["host_reads"] == 0
        assert row["launches"] == sum(part["launches"] for part in row["parts"].values())
    step = rows["ours", "muon", "step"]["parts"]
    assert {"clip", "momentum", "exchange", "products", "update", "elementwise", "gather"} <= {
        *step
    }
    assert step["products"]["flops"] > 0
    assert "modelled for name NVIDIA H100" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["dion", "nobody=/tmp", "dion=/nowhere"])
def test_a_peer_is_a_known_name_and_a_folder(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--peer", text])
    assert "must" in capsys.readouterr().err


def test_a_rule_that_cannot_take_the_recipes_msign_is_refused_in_a_line(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is traced: the rules before it would be lost after minutes."""
    recipe = str(root / "configs/llama1b_muon.yaml")
    arguments = ["--config", recipe, "--ranks", "8", "--pc", "no"]
    assert main([*arguments, "--rules", "muon", "spectral_sphere"]) == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    assert line.startswith("error: rule spectral_sphere cannot take the msign of rule muon: ")
    assert "tolerance must be given" in line


def step(rule: str, launches: int, milliseconds: float, without: str = "") -> Row:
    return Row(
        8, "ours", rule, False, "step", without, launches=launches, milliseconds=milliseconds
    )


def test_goals_are_those_of_the_rules_in_the_run() -> None:
    rows = [step("muon", 310, 10.0), step("spectral_sphere", 1100, 25.0)]
    lines = [line.split() for line in goals(rows).splitlines()]
    assert ["launches,", "muon", "310", "300"] in lines
    assert ["modelled", "time,", "spectral_sphere", "/", "muon", "2.50", "2.0"] in lines
    assert len(lines) == 4  # a header, two counts and one ratio


def test_what_takes_nothing_away_is_seen() -> None:
    whole = step("muon", 310, 10.0)
    assert changes_nothing(step("muon", 310, 9.0, "symmetric kernels"), [whole])
    assert not changes_nothing(step("muon", 400, 9.0, "batching"), [whole])
    assert not changes_nothing(whole, [whole])
