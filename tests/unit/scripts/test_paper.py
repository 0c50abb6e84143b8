"""docs/papers.md: numbered tables and figures have rows, commands can be run, and results of tiny
runs are what sentences quote and what verdicts rest on."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.size import model_size
from scripts import plot, reproduce, study
from scripts.paper import main, plotting
from scripts.papers.catalogue import full_command, read_catalogue
from scripts.papers.gpu_hours import key_of, read_hours
from scripts.papers.measured import Measure, measure, statistics_of
from scripts.studies.schema import read_study
from tests.paths import ROOT
from tests.run_configs import tiny_config
from training.config import check, load_config
from training.run import train

PAPERS = read_catalogue()
# How many numbered figures and tables the papers have. "Towards a Principled Muon" has none.
NUMBERED = {
    "pc_layer": (15, 7),
    "sso": (12, 3),
    "muon_plus_plus": (0, 0),
    "gram_penalty": (7, 0),
    "spectral_updates": (28, 5),
}
ITEMS = {(n, key): item for n, paper in PAPERS.items() for key, item in paper.items.items()}


def test_every_numbered_table_and_figure_has_a_row() -> None:
    assert PAPERS.keys() == NUMBERED.keys()
    for name, (figures, tables) in NUMBERED.items():
        wanted = {f"figure_{n + 1}" for n in range(figures)}
        wanted |= {f"table_{n + 1}" for n in range(tables)}
        found = {key for key in PAPERS[name].items if key.startswith(("figure_", "table_"))}
        assert found == wanted, name
    assert len(PAPERS["muon_plus_plus"].items) >= 5


@pytest.mark.parametrize("text", sorted({text for item in ITEMS.values() for text in item.tiny}))
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
    for item in ITEMS.values():
        for arguments in plotting(item, Path("figure.svg"), full=False):
            assert plot.parse(arguments[2:])


@pytest.mark.parametrize("run", sorted({run for item in ITEMS.values() for run in item.full}))
def test_each_full_run_fits_its_gpus_and_has_its_hours(run: str) -> None:
    stored = read_hours()[key_of(run)]
    recipe, *overrides = shlex.split(run)
    config = load_config(ROOT / "configs" / f"{recipe}.yaml", overrides)
    check(config, stored["gpus"])
    # 6 FLOPs per parameter and token; no H100 does more than 1e15 in a second.
    given = config.train
    tokens = given.steps * given.global_batch * given.sequence_length
    size = model_size(config.model, given.sequence_length)
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


def ends_higher(*names: str) -> Callable[..., list[bool]]:
    """Whether figures end higher in the second run than in the first."""
    return lambda one, two: [getattr(one, n).last < getattr(two, n).last for n in names]


def conditioned_better(none: Any, pc: Any) -> list[bool]:
    """Whether each condition number ends lower under PC layers."""
    return ends_higher("covered", "qkv", "all")(pc, none)


quantiles_higher = ends_higher(
    "o_10", "o_50", "gate_10", "gate_50", "up_10", "up_50", "down_10", "down_50"
)
"""Whether each quantile of a role's singular values ends higher under PC layers."""


def tokens_level(run: Any) -> list[bool]:
    """Whether the stable rank of tokens stays level, above that of their embeddings."""
    return [
        run.tokens.greatest < 1.5 * run.tokens.least,
        run.embeddings.settled < run.tokens.settled,
    ]


def above_one(*ratios: str) -> Callable[..., list[bool]]:
    """Whether the ratios of the criterion never fall to 1."""
    return lambda run: [getattr(run, ratio).least > 1 for ratio in ratios]


# What the papers state, of the statistics of the runs or variants of a row.
STATEMENTS: dict[tuple[str, str], Callable[..., list[bool]]] = {
    ("pc_layer", "figure_6"): quantiles_higher,
    ("pc_layer", "figure_11"): lambda pc: [
        getattr(pc, f"largest_{role}").greatest < 0.08 for role in ("o", "gate", "up", "down")
    ],
    ("pc_layer", "figure_13"): lambda adamw_level, adamw_flat, muon_level, muon_flat: [
        adamw_flat.difference.low > 0,
        muon_flat.difference.low > 0,
        adamw_level.difference.high < 0,
        muon_level.difference.high < 0,
    ],
    ("pc_layer", "figure_14"): conditioned_better,
    ("pc_layer", "figure_15"): quantiles_higher,
    ("sso", "figure_10"): ends_higher("loss"),
    ("sso", "figure_11"): lambda adamw, muon, muon_sphere, sso: [
        higher for other in (adamw, muon) for higher in ends_higher("rms", "absmax")(sso, other)
    ],
    ("spectral_updates", "figure_2"): lambda muon: [
        muon.largest.greatest < 0.05 * 512,
    ],
    ("spectral_updates", "figure_5"): above_one("up_ratio", "down_ratio"),
    ("spectral_updates", "figure_6"): lambda muon: [
        muon.attention_mean.settled < 10,
        muon.ffn_mean.settled < 10,
        muon.final.settled < 10,
    ],
    ("spectral_updates", "figure_8"): above_one("q_ratio", "k_ratio"),
    ("spectral_updates", "figure_10"): tokens_level,
    ("spectral_updates", "figure_21"): tokens_level,
    ("spectral_updates", "figure_24"): lambda swiglu: [
        swiglu.head.settled < swiglu.embedding.settled,
        swiglu.embedding.first < swiglu.embedding.last,
    ],
    ("spectral_updates", "figure_25"): lambda swiglu: [
        swiglu.up.settled < swiglu.down.settled,
        swiglu.gate.settled < swiglu.down.settled,
        swiglu.up_ratio.least > 1,
        swiglu.down_ratio.least > 1,
        swiglu.gate_ratio.least > 1,
    ],
    ("spectral_updates", "figure_26"): above_one("q_ratio", "k_ratio"),
    ("spectral_updates", "table_1"): lambda init: [
        init.embeddings.first < 1.67 * init.tokens.first,
        init.before.first < 1.67 * init.ffn.first,
        init.post.first < 1.67 * init.ffn.first,
        init.final.first < init.tokens.first,
    ],
}


class Figures:
    """The statistics of the series of a run, or what its study says of a variant, by name."""

    def __init__(self, run: dict[str, Any]) -> None:
        if "series" in run:
            for series, values in run["series"].items():
                setattr(self, series, SimpleNamespace(**statistics_of(values)))
        else:
            self.loss = SimpleNamespace(mean=run["loss"], error=run["error"])
            ends = {"low": run["low"], "high": run["high"]}
            self.difference = SimpleNamespace(mean=run["difference"], **ends)


@pytest.mark.parametrize(("paper", "key"), STATEMENTS)
def test_a_verdict_rests_on_what_the_paper_states(paper: str, key: str) -> None:
    item = ITEMS[paper, key]
    content = json.loads((ROOT / str(item.file)).read_text())
    runs = [Figures(run) for run in content.values()]
    assert all(STATEMENTS[paper, key](*runs)) is (item.status == "reproduced")


def test_what_is_reproduced_rests_on_a_committed_result() -> None:
    """On statements about a measured row, on passed checks of an experiment, or on a test."""
    passed = {
        entry["name"]: entry["passed"]
        for entry in json.loads((ROOT / "benchmarks/results/reproduce.json").read_text())
    }
    for name, item in ITEMS.items():
        if item.status != "reproduced" or name in STATEMENTS:
            continue
        commands = [shlex.split(each) for each in item.tiny]
        experiments = [
            each for words in commands if "scripts/reproduce.py" in words
            for each in reproduce.parse(words[2:]).names
        ]  # fmt: skip
        assert str(item.file).startswith("tests/") or experiments, name
        assert all(passed[each] for each in experiments), name


def test_statistics_are_those_of_the_series() -> None:
    assert statistics_of({str(10 * n + 10): float(n) for n in range(10)}) == {
        "first": 0, "last": 9, "least": 0, "greatest": 9,
        "mean": 4.5, "median": 4.5, "early": 0.5, "settled": 7,
    }  # fmt: skip


def test_series_are_the_figures_that_the_run_logged(world: Any, folder: str) -> None:
    """Of a run with PC layers."""
    keys = {"pc__level": 4, "train__steps": 3, "checkpoint__interval": 3}
    keys |= {"monitors__interval": 1, "log__interval": 1}
    train(tiny_config(folder, "muon", **keys), world)
    overrides = " ".join(f"{key.replace('__', '.')}={value}" for key, value in keys.items())
    command = f"python pretrain.py --config {folder}/config.yaml {overrides}"
    texts = {
        "loss": "metric train/loss",
        "mean": "mean stable_rank down",
        "mean of all": "metric monitor/stable_rank/down",
        "largest": "largest residual_rms blocks",
        "largest of all": "metric monitor/residual_rms/max",
        "top": "mean quantile_100 o",
    }
    found = measure(Measure(runs={"a": f"{folder}/run"}, series=texts), [command])["a"]
    assert found["command"] == command and found["steps"] == 3
    series = found["series"]
    assert [*series["loss"]] == [1, 2, 3]
    assert series["mean"] == series["mean of all"]
    assert series["largest"] == series["largest of all"]
    assert set(series["top"].values()) == {1.0}
