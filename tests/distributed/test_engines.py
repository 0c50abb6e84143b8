"""The oldest and the newest supported release of megatron-core give equal losses and
checkpoints."""

import os
import shutil
import sys

import pytest

from models.engine import TESTED, engine_version
from tests.commands import output_of
from tests.launch import environment
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.run_results import metrics_of
from tests.tiny_families import overrides, settings
from tests.token_files import write_token_set
from training.checkpoint.checkpoints import read_checkpoint, step_folder
from training.config import to_yaml

NEWEST = TESTED[1]
# float32 with the same operations in the same order, except for fused parts of newer releases.
LOSS_TOLERANCE = 1e-6
FAMILIES = {"llama": "tensor", "moe": "expert", "deepseek": "pipeline"}
"""Maps each family to the parallel axis used on two ranks."""
SAVED, LAST = 10, 13

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def newest():
    """The folder of the newest tested engine."""
    folder = ROOT / ".engines" / NEWEST
    if not folder.is_dir():
        pytest.skip(f"`make .engines/{NEWEST}` lays the other engine there")
    return folder


def trained(engine, version: str, run, last: int) -> list[float]:
    """Return the losses of a run up to step `last`, with the given or the installed megatron-core.
    The run resumes from its checkpoint if there is one."""
    variables = environment()
    if engine is not None:
        variables["PYTHONPATH"] = os.pathsep.join([str(engine), variables["PYTHONPATH"]])
    command = [sys.executable, "pretrain.py", "--ranks", "2", f"run.dir={run}"]
    command += ["--config", str(run.parent / "config.yaml"), f"train.exit_step={last}"]
    output_of(*command, variables=variables)
    assert read_checkpoint(step_folder(run, last)).meta["versions"]["megatron-core"] == version
    return [line["train/loss"] for line in metrics_of(run)]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_equal_and_checkpoints_cross(family: str, tmp_path, newest) -> None:
    """Train and save with each release, then train further steps with each release from the
    checkpoint of the oldest release."""
    write_token_set(tmp_path / "tokens", tokens=4000, vocab=120, seed=3)
    shape = {"hidden": 32, "ffn": 32, "kv_heads": 4}
    keys = overrides(shape | settings(family)) | {f"parallel__{FAMILIES[family]}": 2}
    keys |= {"train__steps": LAST, "log__interval": 1, "checkpoint__interval": SAVED}
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(tiny_config(str(tmp_path), "muon", **keys)))
    old, new = (None, engine_version()), (newest, NEWEST)
    own, other, crossed = (tmp_path / name for name in ("own", "other", "crossed"))
    trained(*old, own, SAVED)
    shutil.copytree(own, crossed)
    whole = trained(*old, own, LAST)
    assert len(whole) == LAST
    trained(*new, other, SAVED)
    for losses in (trained(*new, other, LAST), trained(*new, crossed, LAST)):
        assert losses == pytest.approx(whole, rel=LOSS_TOLERANCE)
