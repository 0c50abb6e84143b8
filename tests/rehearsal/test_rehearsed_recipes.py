"""A recipe for every large model, rehearsed at full size on the recipe's number of simulated
GPUs."""

import pytest

from tests.paths import ROOT
from tests.small_recipes import recipes
from training.config import check, load_config
from training.data.build_data import on_mock_tokens
from training.dry_run import device_named
from training.rehearsal.rehearse import rehearse

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]  # 200 layers at full size take minutes


@pytest.mark.usefixtures("perform")
@pytest.mark.parametrize("recipe", [n[-1] for model, n in recipes().items() if "tiny" not in model])
def test_a_recipe_would_not_break(recipe: str) -> None:
    config = on_mock_tokens(load_config(ROOT / "configs" / f"{recipe}.yaml"))
    assert config.plan.gpus is not None
    check(config, config.plan.gpus)
    device = device_named(config.plan.device)
    report = rehearse(config, config.plan.gpus, device)
    assert report.error is None, report.error
