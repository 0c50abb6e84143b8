"""scripts/bench/library.py: steps that every library takes alike, and peers that are optional."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.bench.library import Side, main, own, peers, shapes

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


@pytest.mark.parametrize("text", ["16x24", "axbxc"])
def test_a_set_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sets", text]) == 2
    assert "--sets must be COUNTxROWSxCOLS" in capsys.readouterr().err


PEER = """
import torch

class SingleDeviceMuon(torch.optim.SGD):
    def __init__(self, parameters, lr, weight_decay):
        super().__init__(parameters, lr, weight_decay=weight_decay)
"""


@pytest.fixture
def checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a folder of checkouts, of which keller_jordan has the given source."""

    def made(source: str) -> Path:
        (tmp_path / "keller_jordan").mkdir()
        (tmp_path / "keller_jordan" / "muon.py").write_text(source)
        return tmp_path

    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "muon", raising=False)
    return made


def test_a_checkout_is_a_side(checkouts, capsys) -> None:
    found = peers(checkouts(PEER))
    assert list(found) == ["KellerJordan Muon"]
    assert Side(shapes(SET), found["KellerJordan Muon"]).turn() >= 0
    assert "dion Muon left out: no " in capsys.readouterr().out


def test_a_checkout_that_does_not_run_here_is_named(checkouts, capsys) -> None:
    assert peers(checkouts("import nowhere\n")) == {}
    assert "KellerJordan Muon left out: No module named 'nowhere'" in capsys.readouterr().out
