"""The training benchmark: the real trainer, phases that add up, and no read of a tensor by the host
in a step."""

import json
from itertools import count
from pathlib import Path

import pytest
import torch

from models.blocks.router import Router
from models.size import model_size
from parallel.comm.groups import Groups
from scripts.bench import train as bench
from scripts.bench.train import PHASES, Phases
from tests.host_reads import host_reads
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.build import build_data, build_trainer
from training.config import load_config
from training.loop import Trainer

pytestmark = pytest.mark.slow

MOE = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
}
DEVICE_LIKE = {"optimizer__rules__spectral_sphere__early_exit": "false"}
"""By default the solver reads its own progress on a CPU and not on a GPU."""


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


def test_random_tokens_need_no_data_and_an_unknown_device_has_no_mfu(folder: str) -> None:
    tiny_config(folder)
    (Path(folder) / "tokens.bin").unlink()
    out = Path(folder) / "out.json"
    arguments = ["--config", f"{folder}/config.yaml", "--steps", "1", "--warmup", "1"]
    assert bench.main(arguments) == 2
    assert bench.main([*arguments, "--synthetic", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["mfu"] is None


def test_a_phase_within_a_phase_takes_its_time_from_it() -> None:
    ticks = count()
    phases = Phases(torch.device("cpu"), lambda: float(next(ticks)))
    phases.restart()
    with phases.phase("backward"), phases.phase("forward"), phases.phase("wait for weights"):
        pass
    found = {name: seconds for name, seconds in phases.seconds().items() if seconds}
    assert found == {"other": 2, "backward": 2, "forward": 2, "wait for weights": 1}


def test_reads_by_the_host_are_seen() -> None:
    x = torch.arange(4.0)
    reads = [
        lambda: x.sum().item(), lambda: bool(x.any()), lambda: x.tolist(), lambda: x.cpu(),
        lambda: x.nonzero(), lambda: x[x > 1], lambda: x.masked_select(x > 1),
        lambda: float(x[0]), lambda: x.unique(),
    ]  # fmt: skip
    for read in reads:
        with host_reads() as seen:
            read()
        assert seen, read
    with host_reads() as seen:
        y = x.clone()
        y[x > 1] = 0.0
        torch.where(x > 1, x, y).sum()
    assert not seen


@pytest.mark.parametrize("rule", ["adamw", "muon", "spectral_sphere"])
@pytest.mark.parametrize("extra", [{}, {"train__recompute": "full", "train__loss_chunk": 50}])
def test_no_step_of_a_dense_model_is_read_by_the_host(
    folder: str, world: Groups, rule: str, extra: dict[str, object]
) -> None:
    config = tiny_config(folder, rule, **DEVICE_LIKE, **extra)
    trainer = build_trainer(config, world, *build_data(config))
    trainer.step(0)
    with host_reads() as reads:
        trainer.step(1)
    assert not reads


@pytest.mark.parametrize(("backend", "reads_per_layer"), [("grouped", 0), ("sequential", 1)])
def test_a_step_of_experts_on_one_rank_is_read_for_sequential_products_alone(
    folder: str, world: Groups, backend: str, reads_per_layer: int
) -> None:
    config = tiny_config(folder, **MOE, **DEVICE_LIKE, model__moe__backend=backend)
    trainer = build_trainer(config, world, *build_data(config))
    trainer.step(0)
    with host_reads() as reads:
        trainer.step(1)
    passes = trainer.microbatches * sum(isinstance(m, Router) for m in modules(trainer))
    own = {place: n for place, n in reads.items() if "experts.py" not in place}
    assert sum(own.values()) == reads_per_layer * passes, own


def modules(trainer: Trainer) -> list[torch.nn.Module]:
    return [module for chunk in trainer.model.chunks for module in chunk.modules()]
