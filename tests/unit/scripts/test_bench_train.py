"""The training benchmark: the real trainer, phases that add up, and no read of a tensor by the host
in a step."""

import json
from pathlib import Path

import pytest

from models.size import model_size
from scripts.bench import train as bench
from scripts.bench.train import PHASES
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.config import load_config

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A folder with a token set."""
    write_token_set(tmp_path / "tokens", tokens=5_000, vocab=120, seed=0)
    return str(tmp_path)


def test_the_result_of_a_recipe(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_config(folder)
    out = Path(folder) / "out.json"
    steps = ["--steps", "2", "--warmup", "1", "--peak-flops", "1e9", "--json", str(out)]
    steps += ["--profile", f"{folder}/trace.json"]
    code = bench.main(["--config", f"{folder}/config.yaml", "train.micro_batch=4", *steps])
    assert code == 0
    result = json.loads(out.read_text())
    assert result["tokens_per_step"] == 8 * 32
    speed = result["tokens_per_second"]
    assert speed == pytest.approx(8 * 32 / result["seconds_per_step"])
    flops = model_size(load_config(f"{folder}/config.yaml").model, 32).flops_per_token
    assert result["mfu"] == pytest.approx(speed * flops / 1e9)
    assert set(result["phase_shares"]) == set(PHASES)
    assert sum(result["phase_shares"].values()) == pytest.approx(1)
    for phase in ("data", "forward", "backward", "clip", "optimizer"):
        assert result["phase_seconds"][phase] > 0, phase
    assert sum(result["phase_seconds"].values()) <= 1.01 * result["seconds_per_step"]
    assert result["command"].startswith("python scripts/bench/train.py --config")
    assert {"torch", "megatron-core", "commit"} <= set(result["versions"])
    assert json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    assert "tokens/s on 1 x cpu" in capsys.readouterr().out
    assert not (Path(folder) / "run").exists()
