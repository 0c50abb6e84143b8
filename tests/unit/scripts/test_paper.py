"""docs/papers.md: every numbered table and figure has a row, and each command can be run."""

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from models.size import model_size
from scripts import plot, reproduce, study
from scripts.paper import commands, main, plotting
from scripts.papers.catalogue import Item, full_command, read_catalogue
from scripts.papers.gpu_hours import key_of, planned, read_hours
from scripts.studies.schema import read_study
from tests.paths import ROOT
from training.config import check, load_config
from training.config.files import read_merged

PAPERS = read_catalogue()
# How many numbered figures and tables the papers have. "Towards a Principled Muon" has none.
NUMBERED = {
    "pc_layer": (15, 7),
    "sso": (12, 3),
    "muon_plus_plus": (0, 0),
    "gram_penalty": (7, 0),
    "spectral_updates": (28, 5),
}
ITEMS = [(name, key) for name, paper in PAPERS.items() for key in paper.items]


def item(paper: str, key: str) -> Item:
    return PAPERS[paper].items[key]


def full_runs() -> Iterator[str]:
    for paper, key in ITEMS:
        yield from item(paper, key).full


def test_every_numbered_table_and_figure_has_a_row() -> None:
    assert PAPERS.keys() == NUMBERED.keys()
    for name, (figures, tables) in NUMBERED.items():
        wanted = {f"figure_{n + 1}" for n in range(figures)}
        wanted |= {f"table_{n + 1}" for n in range(tables)}
        found = {key for key in PAPERS[name].items if key.startswith(("figure_", "table_"))}
        assert found == wanted, name
    assert len(PAPERS["muon_plus_plus"].items) >= 5


@pytest.mark.parametrize(("paper", "key"), ITEMS)
def test_each_tiny_command_parses_and_its_files_exist(paper: str, key: str) -> None:
    folders = set()
    for text in item(paper, key).tiny:
        program, *words = shlex.split(text)
        if program == "make":
            assert f"\n{words[0]}:" in (ROOT / "Makefile").read_text()
            continue
        script, *arguments = words
        assert program == "python" and (ROOT / script).is_file()
        if script == "pretrain.py":
            assert arguments[0] == "--config"
            config = load_config(ROOT / arguments[1], arguments[2:])
            check(config, 1)
            folders.add(config.run.dir)
        elif script == "scripts/reproduce.py":
            assert reproduce.parse(arguments).names
        elif script == "scripts/study.py":
            options = study.parse(arguments)
            found = read_study(ROOT / options.study)
            common = [f"{k}={v:g}" for k, v in found.full.items()] + found.overrides
            for variant in found.variants.values():
                load_config(ROOT / variant.config, [*common, *variant.overrides])
            folders.add(f"{options.output}/results.json")
        elif script == "scripts/plot.py":
            plot.parse(arguments)
    for arguments in plotting(item(paper, key), Path("figure.svg"), full=False):
        options = plot.parse(arguments[2:])
        drawn = {*map(str, vars(options).get("runs", []))}
        drawn |= {str(vars(options)[each]) for each in ("results", "run") if each in vars(options)}
        assert drawn <= folders, "it draws from the runs of its commands"


@pytest.mark.parametrize("run", sorted(set(full_runs())))
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


def test_tiny_runs_of_one_folder_have_one_config() -> None:
    """The second command would find the run done, whatever its monitors."""
    configs: dict[str, dict[str, Any]] = {}
    for paper, key in ITEMS:
        for command in item(paper, key).tiny:
            words = shlex.split(command)
            if "pretrain.py" not in words:
                continue
            overrides = [word for word in words if "=" in word]
            config = dict(read_merged(ROOT / words[words.index("--config") + 1], overrides))
            folder = config["run"]["dir"]
            assert configs.setdefault(folder, config) == config, (paper, key, folder)


def test_no_two_full_runs_share_a_folder() -> None:
    folders: dict[str, str] = {}
    for run in full_runs():
        recipe, *overrides = shlex.split(run)
        folder = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides).run.dir
        assert folders.setdefault(folder, run) == run


def test_stored_hours_are_the_planners() -> None:
    assert read_hours().keys() == {key_of(run) for run in full_runs()}
    assert planned("llama271m_adamw") == read_hours()["llama271m_adamw"]


def test_results_have_files() -> None:
    for paper, key in ITEMS:
        found = item(paper, key)
        assert found.result is None or found.file is not None, (paper, key)
        if found.file is not None:
            # What is not run has the file that --measure will write.
            assert (ROOT / found.file).is_file() == (found.status != "not run"), (paper, key)


def test_numbers_of_the_small_study_are_those_of_its_results() -> None:
    """Losses and differences that rows quote from the committed table."""
    folder = ROOT / "studies" / "optimizers" / "results" / "llama_0.1m"
    table = (folder / "table.md").read_text()
    assert json.loads((folder / "results.json").read_text())["complete"]
    for quoted in ("4.6481", "4.5751", "-0.0730 ± 0.0079", "4.5238", "4.5759", "+0.0522 ± 0.0014"):
        assert quoted in table
    for quoted in ("-0.1243 ± 0.0071", "-0.0235 ± 0.0099", "-0.0373 ± 0.0091"):
        assert quoted in table and quoted in str(item("sso", "figure_1").result)
    for quoted in ("-0.0501 ± 0.0060", "+0.0142 ± 0.0062"):
        assert quoted in table and quoted in str(item("muon_plus_plus", "algorithms").result)


def test_a_dry_run_prints_commands_hours_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pc_layer", "figure_3", "--full", "--dry-run"]) == 0
    out = capsys.readouterr().out
    hours = read_hours()["llama271m_adamw"]["gpu_hours"]
    assert f"configs/llama271m_adamw.yaml  # {hours:,.0f} GPU-hours" in out
    assert "paper's numbers: 271M: 2.5944 to 2.5397" in out and "draws: " in out
    assert main(["sso", "figure_3", "--tiny", "--dry-run"]) == 0
    assert "scripts/reproduce.py solver_curve" in capsys.readouterr().out
    assert main(["--list"]) == 0
    assert "gram_penalty: Learning in Transformers" in capsys.readouterr().out


def test_what_is_unknown_or_has_no_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["pc_layr", "figure_3"], "paper must be one of pc_layer, sso,"),
        (["pc_layer", "figure_33"], "got figure_33; did you mean figure_3?"),
        (["pc_layer"], "item must be one of figure_1,"),
        (["pc_layer", "figure_1"], "figure_1 has no tiny command"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_a_tiny_command_runs_as_it_is_printed(tmp_path: Path) -> None:
    """The maps of PC layers, the one tiny command of a second, to another folder."""
    (command,) = commands(item("pc_layer", "figure_2"), full=False)
    assert command[0] == sys.executable and "runs/papers/pc_maps.svg" in command
    target = str(tmp_path / "maps.svg")
    words = [target if word == "runs/papers/pc_maps.svg" else word for word in command]
    subprocess.run(words, cwd=ROOT, check=True)
    assert Path(target).stat().st_size > 1000
