"""docs/monitors.md names every figure that a run writes, and its commands and keys are real."""

import json
import re
from pathlib import Path

import pytest

from parallel.comm import groups as process_groups
from scripts.bench import train as bench
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.run import train

MSIGN = "optimizer__rules__spectral_sphere__msign_dtype"
GROUPS = "[weights,gradients,updates,noise,activations,attention]"


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    """The page."""
    return (root / "docs" / "monitors.md").read_text()


@pytest.fixture(scope="module")
def last_lines(tmp_path_factory) -> list[dict]:
    """The last lines of two runs that have every figure between them."""
    folder = tmp_path_factory.mktemp("page")
    write_token_set(folder / "tokens", tokens=8_000, vocab=120, seed=0)
    world = process_groups.initialize()
    found = []
    for rule, keys in (
        ("spectral_sphere", {MSIGN: "float16"}),
        ("muon_plus_plus", {"pc__level": 2}),
    ):
        config = tiny_config(
            str(folder),
            rule,
            monitors__interval=1,
            monitors__groups=GROUPS,
            monitors__noise_samples=2,
            train__exit_step=2,
            **keys,
        )
        train(config, world)
        found.append(json.loads((folder / "run" / "monitors.jsonl").read_text().splitlines()[-1]))
    process_groups.shutdown()
    return found


def test_every_figure_of_a_run_is_on_the_page(page: str, last_lines: list[dict]):
    named = set(re.findall(r"`(\w+)`", page))
    named |= {f"{block}_{end}" for block in named for end in ("rms", "absmax")}
    written: set[str] = set()
    for line in last_lines:
        for record in (*line["units"].values(), *line["blocks"].values()):
            written |= {
                name if name in named else name.removeprefix("effective_") for name in record
            }
    written -= {"role", "layer"}
    assert len(written) > 40
    assert written - named == set()
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, re.MULTILINE)
    promised = set(re.findall(r"`(\w+)`", " ".join(table)))
    assert promised - written == set()


def test_the_line_on_the_page_has_the_keys_of_a_run(page: str, last_lines: list[dict]):
    shown = json.loads(re.findall(r"```json\n(.*?)```", page, re.DOTALL)[0])
    real = last_lines[0]
    assert shown.keys() == real.keys() | {"step"}
    for part in ("units", "blocks", "layers"):
        assert shown[part].keys() <= real[part].keys()
        for name, record in shown[part].items():
            assert record.keys() <= real[part][name].keys(), name
    (unit,) = shown["units"].values()
    assert len(unit["quantiles"]) == 11 and unit["quantiles"][-1] == unit["spectral_norm"]
    ratio = unit["gradient_nuclear_rank"] / unit["input_stable_rank"]
    assert unit["criterion_ratio"] == pytest.approx(ratio, rel=0.01)


def test_the_bench_command_is_one(root: Path, page: str):
    (command,) = re.findall(r"python scripts/bench/train.py (.*)", page)
    options = bench.parse([*command.split(), "model.vocab_size=512"])
    options.config = root / options.config
    config, variant = bench.variants(options).values()
    assert config.monitors.interval > variant.monitors.interval == 1
