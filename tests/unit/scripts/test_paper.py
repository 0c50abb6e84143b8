"""docs/papers.md: every numbered table and figure has a row, and each command can be run."""

import shlex
import sys
from pathlib import Path

import pytest

from models.size import model_size
from scripts import plot, reproduce, study
from scripts.paper import main, plotting
from scripts.papers.catalogue import full_command, read_catalogue
from scripts.papers.gpu_hours import key_of, read_hours
from scripts.studies.schema import read_study
from tests.paths import ROOT
from training.config import check, load_config

PAPERS = read_catalogue()
# How many numbered figures and tables the papers have. "Towards a Principled Muon" has none.
NUMBERED = {
    "pc_layer": (15, 7),
    "sso": (12, 3),
    "muon_plus_plus": (0, 0),
    "gram_penalty": (7, 0),
    "spectral_updates": (28, 5),
}
ITEMS = [item for paper in PAPERS.values() for item in paper.items.values()]


def test_every_numbered_table_and_figure_has_a_row() -> None:
    assert PAPERS.keys() == NUMBERED.keys()
    for name, (figures, tables) in NUMBERED.items():
        wanted = {f"figure_{n + 1}" for n in range(figures)}
        wanted |= {f"table_{n + 1}" for n in range(tables)}
        found = {key for key in PAPERS[name].items if key.startswith(("figure_", "table_"))}
        assert found == wanted, name
    assert len(PAPERS["muon_plus_plus"].items) >= 5


@pytest.mark.parametrize("text", sorted({text for item in ITEMS for text in item.tiny}))
def test_each_tiny_command_parses_and_its_files_exist(text: str) -> None:
    program, *words = shlex.split(text)
    if program == "make":
        assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
        return
    script, *arguments = words
    assert program == "python" and (ROOT / script).is_file()
    if script == "pretrain.py":
        assert arguments[0] == "--config"
        check(load_config(ROOT / arguments[1], arguments[2:]), 1)
    elif script == "scripts/reproduce.py":
        assert reproduce.parse(arguments).names
    elif script == "scripts/study.py":
        assert read_study(ROOT / study.parse(arguments).study).variants
    elif script == "scripts/plot.py":
        plot.parse(arguments)


def test_figures_are_drawn_by_commands_that_parse() -> None:
    for item in ITEMS:
        for arguments in plotting(item, Path("figure.svg"), full=False):
            assert plot.parse(arguments[2:])


@pytest.mark.parametrize("run", sorted({run for item in ITEMS for run in item.full}))
def test_each_full_run_fits_its_gpus_and_has_its_hours(run: str) -> None:
    stored = read_hours()[key_of(run)]
    recipe, *overrides = shlex.split(run)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)
    check(config, stored["gpus"])
    # 6 FLOPs per parameter and token; no H100 does more than 1e15 in a second.
    train = config.train
    tokens = train.steps * train.global_batch * train.sequence_length
    size = model_size(config.model, train.sequence_length)
    least = size.flops_per_token * tokens / 1e15 / 3600
    assert least < stored["gpu_hours"] < 20 * least
    assert (overrides == []) or config.run.dir != f"runs/{recipe}"
    command = full_command(run, stored["gpus"])
    assert f"configs/{recipe}.yaml" in command
    if stored["gpus"] > 8:
        # The script takes the folder from RUN_DIR, and refuses it as an override.
        assert command[0] == "sbatch" and not any(w.startswith("run.dir=") for w in command)
        assert f"--export=ALL,RUN_DIR={config.run.dir}" in command
    else:
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]


def test_a_dry_run_prints_commands_hours_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pc_layer", "figure_3", "--full", "--dry-run"]) == 0
    out = capsys.readouterr().out
    hours = read_hours()["llama271m_adamw"]["gpu_hours"]
    assert f"configs/llama271m_adamw.yaml  # {hours:,.0f} GPU-hours" in out
