"""A family added as described in CONTRIBUTING: a record, a builder, a recipe and an entry in a test
list are enough."""

from pathlib import Path

import pytest

import pretrain
from models.blocks.compiled import fuse_blocks_
from models.families import FAMILIES, Family
from models.units import check_coverage
from parallel.comm.groups import Groups
from tests.models import built
from tests.run_configs import tiny_config
from tests.run_results import metrics_of
from tests.tiny_families import SETTINGS, table, tiny_model
from training.config import Config, InvalidConfigError, check
from training.run import train

pytestmark = pytest.mark.slow

RECORD = Family(
    name="sandwich",
    about="Llama with norms after each block too",
    builder="sandwich_builder",
    post_norms=True,
)
BUILDER = """
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from models import dense
from models.blocks.norm import RMSNorm

transformer_config = dense.transformer_config
parameter_names = dense.parameter_names


def build(model, config, chunk, **options):
    specs = [dense.layer_spec(model, layer) for layer in chunk.layers]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=RMSNorm)
    return dense.assemble(model, config, block, chunk, **options)
"""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, folder: str, tmp_path: Path) -> Config:
    """The config of a run with the new family, which exists only during the test."""
    (tmp_path / "sandwich_builder.py").write_text(BUILDER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(FAMILIES, "sandwich", RECORD)
    monkeypatch.setitem(SETTINGS, "sandwich", {})
    return tiny_config(folder, model__family="sandwich", train__exit_step=2)


def test_its_checks_and_units(config: Config, world: Groups) -> None:
    check(config, 2)
    with pytest.raises(InvalidConfigError, match="qk_norm must be false for family sandwich"):
        tiny_config(str(Path(config.run.dir).parent), model__family="sandwich", model__qk_norm=True)
    model = tiny_model("sandwich")
    chunk, parameters = built(model)
    check_coverage(RECORD.units(model, layers=range(2)), parameters)
    assert fuse_blocks_([chunk], "aot_eager") == 2 * 7 + 2  # four norms, attention, block, layer
    assert "| sandwich | Llama with norms" in table()


def test_it_is_planned_and_trained(config: Config, world: Groups) -> None:
    folder = Path(config.run.dir).parent
    arguments = ["--config", str(folder / "config.yaml"), "model.family=sandwich"]
    plan = folder / "plan.json"
    assert pretrain.main([*arguments, "--dry-run", "--gpus", "4", "--json", str(plan)]) == 0
    assert '"gpus": 4' in plan.read_text()
    train(config, world)
    losses = [each["train/loss"] for each in metrics_of(folder / "run") if "train/loss" in each]
    assert losses
