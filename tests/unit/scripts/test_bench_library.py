"""scripts/bench/library.py: steps that every library takes alike, and peers that are optional."""

import json
from pathlib import Path

import pytest
import torch

from scripts.bench.library import Side, main, own, shapes

pytestmark = pytest.mark.slow

SET = "2x16x24,1x32x16"


def test_every_side_steps_the_same_weights_on_the_same_gradients() -> None:
    sides = [Side(shapes(SET), make) for make in own().values()]
    first = [weight.detach().clone() for weight in sides[0].weights]
    assert [tuple(weight.shape) for weight in first] == [(16, 24), (16, 24), (32, 16)]
    for side in sides:
        assert all(map(torch.equal, side.weights, first))
        assert side.turn() >= 0
    for side in sides:
        for weight, before, reference in zip(side.weights, first, sides[0].weights, strict=True):
            assert torch.equal(weight.grad, reference.grad)  # type: ignore[arg-type]
            assert not torch.equal(weight, before)


def test_a_set_gets_a_time_for_every_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "library.json"
    assert main(["--sets", SET, "--steps", "1", "--only", "Muon", "torch Muon"]) == 0
    assert main(["--sets", SET, "--steps", "1", "--json", str(file)]) == 0
    content = json.loads(file.read_text())
    assert set(content["figures"][SET]) == set(own())
    assert all(ms >= 0 for ms in content["figures"][SET].values())
    assert capsys.readouterr().out.count(SET) == 2
