"""docs/monitors.md names every figure that a run writes, and its commands and keys are real."""

import json
import re
from pathlib import Path

import yaml

from scripts.bench import monitors as bench
from tests.minimal_config import problems
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.config import load_config
from training.run import train

GROUPS = "[weights,gradients,updates,noise,activations,attention]"


def test_every_figure_of_a_run_is_on_the_page(root: Path, tmp_path, world):
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    page = (root / "docs" / "monitors.md").read_text()
    named = set(re.findall(r"`(\w+)`", page))
    named |= {f"{block}_{end}" for block in named for end in ("rms", "absmax")}
    written: set[str] = set()
    for rule, keys in (
        ("spectral_sphere", {"optimizer__auto_rule__lr": 1e-3}),
        ("muon_plus_plus", {"pc__level": 2}),
    ):
        config = tiny_config(
            str(tmp_path),
            rule,
            monitors__interval=1,
            monitors__groups=GROUPS,
            train__exit_step=2,
            **keys,
        )
        train(config, world)
        text = (tmp_path / "run" / "monitors.jsonl").read_text().splitlines()[-1]
        line = json.loads(text)
        for record in (*line["units"].values(), *line["blocks"].values()):
            written |= {
                name if name in named else name.removeprefix("effective_") for name in record
            }
    written -= {"role", "layer"}
    assert len(written) > 40
    assert written - named == set()


def test_the_bench_command_is_understood_and_says_what_a_look_costs(root: Path, capsys):
    page = (root / "docs" / "monitors.md").read_text()
    (command,) = re.findall(r"python scripts/bench/monitors.py (.*)", page)
    options = bench.parse(command.split())
    assert (root / options.config).exists()
    bench.print_costs([[3.0], [1.0], [1.0], [1.5]], 100)
    assert "extra 2.50 steps per look, 2.50% at interval 100" in capsys.readouterr().out


def test_the_example_of_the_choice_of_rules_is_a_config(root: Path, minimal: Path):
    page = (root / "docs" / "monitors.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    content = yaml.safe_load(minimal.read_text())
    content["optimizer"] |= yaml.safe_load(example)["optimizer"]
    minimal.write_text(yaml.safe_dump(content))
    assert load_config(minimal).optimizer.auto_rule is not None
    assert problems(minimal, "monitors.groups=[spectra]")
