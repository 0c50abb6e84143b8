"""Every recipe on pretended GPUs, as it is and with its model cut: small, and at full size on the
GPUs that it names, which takes hours."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from parallel.plan.devices import device_named
from tests.paths import ROOT
from tests.rehearsal.programs import H100, check_rank
from tests.small_recipes import recipes, small_recipe
from training.build import on_mock_tokens
from training.config import Config, InvalidConfigError, check, load_config
from training.rehearsal.processes import Processes
from training.rehearsal.rank import Job
from training.rehearsal.rehearse import rehearse

pytestmark = pytest.mark.slow

NAMES = [name for names in recipes().values() for name in names]
RATES = {
    "lr", "weight_decay", "beta1", "beta2", "epsilon", "momentum", "max_norm", "std",
    "embedding_std", "head_std", "radius_scaler", "rope_base", "norm_epsilon", "min_ratio",
}  # fmt: skip
"""Numbers that change no operation."""
NOT_REHEARSED = ("run", "data", "seed", "plan", "schedule")
PEERS = 2
CUTS = ("tensor", "pipeline", "context", "expert")
OWN = ""


def form(config: Any) -> Any:
    """What of a section of a config decides which operations there are."""
    if isinstance(config, dict):
        return tuple((key, form(value)) for key, value in config.items() if key not in RATES)
    return tuple(map(form, config)) if isinstance(config, list | tuple) else config


def small_forms() -> dict[str, list[str]]:
    """Recipes that are one when they are small, by the first of them; of tiny recipes, those whose
    model or precision no other has."""
    found: dict[Any, list[str]] = {}
    for name in NAMES:
        config = asdict(small_recipe(name, "nowhere"))
        for key in NOT_REHEARSED:
            del config[key]
        found.setdefault(form(config), []).append(name)
    some = ("tiny_gemma2_sso", "tiny_gpt_muon_gram", "tiny_muon")
    return {
        names[0]: names
        for names in found.values()
        if names[0] in some or not names[0].startswith("tiny")
    }


FORMS = small_forms()


def test_all_large_recipes_have_a_small_form() -> None:
    assert {n for n in NAMES if not n.startswith("tiny")} <= {n for f in FORMS.values() for n in f}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recipe", FORMS)
def test_a_small_recipe_would_not_break(
    recipe: str, cut: str, processes: Processes, tmp_path: Any
) -> None:
    try:
        config = small_recipe(recipe, str(tmp_path), **{cut: PEERS})
        config = replace(
            config,
            data=replace(config.data, mock=True),
            train=replace(config.train, global_batch=2 * config.train.micro_batch),
            checkpoint=replace(config.checkpoint, interval=2),
            monitors=replace(config.monitors, interval=2 * bool(config.monitors.interval)),
        )
        check(config, PEERS)
    except InvalidConfigError as error:
        pytest.skip(str(error).splitlines()[0])
    rank = PEERS - 1  # also the last stage of a pipeline
    (report,) = processes.perform([Job(config, PEERS, rank, H100)])
    check_rank(report)


def planned(recipe: str, cut: str) -> tuple[Config, int]:
    """The config of a recipe on made tokens, with an axis cut in two, and the GPUs that it names.

    Raises InvalidConfigError for what it may not.
    """
    overrides = [f"parallel.{cut}=2"] if cut else []
    config = on_mock_tokens(load_config(ROOT / "configs" / f"{recipe}.yaml", overrides))
    assert config.plan.gpus is not None
    check(config, config.plan.gpus)
    return config, config.plan.gpus


@pytest.mark.parametrize("cut", [OWN, *CUTS])
@pytest.mark.parametrize("recipe", NAMES)
def test_a_recipe_would_not_break(recipe: str, cut: str, processes: Processes) -> None:
    try:
        config, gpus = planned(recipe, cut)
    except InvalidConfigError as error:
        assert cut, error
        pytest.skip(str(error).splitlines()[0])
    report = rehearse(config, gpus, device_named(config.plan.device), processes=processes)
    assert report.ok, report.error
