"""docs/papers.md: all numbered tables and figures have rows, commands can run, and sentences and
verdicts agree with the results of tiny runs."""

import html
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from models.families import model_size
from scripts import plot, reproduce, study
from scripts.paper import main
from scripts.papers.catalogue import (
    Item,
    commands,
    full_command,
    key_of,
    plotting,
    read_catalogue,
    read_hours,
)
from scripts.papers.measured import (
    Measure,
    measure,
    runs_of,
    statistics_of,
    statistics_table,
    to_json,
    trained_series,
)
from scripts.papers.page import draw, figure_file
from scripts.studies.description import read_study
from scripts.studies.records import Record
from scripts.studies.tables import paired
from scripts.studies.trainer import summary
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.run_results import json_lines
from training.config import check, load_config
from training.errors import InputError
from training.run import train

PAPERS = read_catalogue()
# Numbers of figures and tables in the papers. "Towards a Principled Muon" has none.
NUMBERED = {
    "pc_layer": (15, 7),
    "sso": (12, 3),
    "muon_plus_plus": (0, 0),
    "gram_penalty": (7, 0),
    "spectral_updates": (28, 5),
}
ITEMS = {(n, key): item for n, paper in PAPERS.items() for key, item in paper.items.items()}
MEASURED = [name for name, item in ITEMS.items() if item.measure is not None]
TEXTS = re.compile(">([^<>]+)</text>")
OF_STUDIES = [name for name in MEASURED if str(ITEMS[name].measure.study).startswith("studies/")]


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
        # The script reads the folder from RUN_DIR, and refuses it as an override.
        assert command[0] == "sbatch" and not any(w.startswith("run.dir=") for w in command)
        assert f"--export=ALL,RUN_DIR={config.run.dir}" in command
        assert 8 * int(command[1].removeprefix("--nodes=")) == stored["gpus"]
    else:
        assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
        assert f"--nproc-per-node={stored['gpus']}" in command


def test_a_dry_run_prints_commands_hours_and_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pc_layer", "figure_3", "--full", "--dry-run"]) == 0
    lines = re.findall(r"^runs: .*", capsys.readouterr().out, re.MULTILINE)
    hours = {run: read_hours()[run]["gpu_hours"] for run in ITEMS["pc_layer", "figure_3"].full}
    assert len({f"{each:,.0f}" for each in hours.values()}) == len(lines) == 4
    for line, (run, each) in zip(lines, hours.items(), strict=True):
        assert line.endswith(f"configs/{run}.yaml  # {each:,.0f} GPU-hours")


def test_the_commands_of_a_row_run_in_order_up_to_a_failure(tmp_path, monkeypatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=3 if len(ran) == fails else 0)

    monkeypatch.setattr("scripts.paper.subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr("scripts.paper.ROOT", tmp_path)
    name, figure = ["pc_layer", "figure_3"], Path("runs/papers/pc_layer_figure_3.svg")
    item = ITEMS["pc_layer", "figure_3"]
    tiny, full = (commands(item, full=full) for full in (False, True))
    drawn, redrawn = (plotting(item, figure, full=full) for full in (False, True))
    for options, fails, expected in (
        ([], 0, [*tiny, *drawn]),
        (["--tiny"], 1, tiny[:1]),
        (["--plot-only"], 0, drawn),
        (["--dry-run"], 0, []),
        (["--full"], 0, [*full, *redrawn]),
        (["--full", "--plot-only"], 0, redrawn),
    ):
        ran.clear()
        assert main([*name, *options]) == (3 if fails else 0) and ran == expected


def test_a_row_without_commands_is_refused(refusal) -> None:
    paper, item = next(name for name, each in ITEMS.items() if each.status == "nothing to run")
    for options, said in (
        (["pc_layr"], "paper must be"),
        (["sso", "figure_99"], "item must be"),
        ([paper, item], f"{item} has no tiny command"),
        ([paper, item, "--full"], f"{item} has no full command"),
        ([paper, item, "--measure"], "--measure requires an item with `measure` in papers.yaml"),
    ):
        assert said in refusal(main(options))


def test_a_row_is_measured_into_its_committed_file_and_figure(tmp_path, monkeypatch) -> None:
    for module in ("scripts.paper", "scripts.papers.catalogue"):
        monkeypatch.setattr(f"{module}.ROOT", tmp_path)
    figure, file = figure_file("sso", "figure_5"), ITEMS["sso", "figure_5"].file
    (tmp_path / figure).parent.mkdir(parents=True)
    assert main(["sso", "figure_5", "--measure"]) == 0
    assert (tmp_path / str(file)).read_bytes() == (ROOT / str(file)).read_bytes()
    old, new = ((root / figure).read_text() for root in (ROOT, tmp_path))
    assert TEXTS.findall(new) == TEXTS.findall(old)


@pytest.mark.parametrize(("paper", "key"), MEASURED)
def test_results_are_printed_and_written_by_run_and_seed(paper: str, key: str) -> None:
    text = (ROOT / str(ITEMS[paper, key].file)).read_text()
    content = json.loads(text)
    assert to_json(content) == text
    rows = statistics_table(content).to_dict("records")
    for name, run in content.items():
        own = [row for row in rows if row["run"] == name]
        if "losses" in run:
            assert own.pop(0)["loss"] == run["loss"]
        if "seeds" in run or "losses" not in run:
            for seed, results in runs_of(run).items():
                for series, values in results["series"].items():
                    row = own.pop(0)
                    assert (row["seed"], row["series"]) == (seed, series)
                    assert row["last"] == [*values.values()][-1]
        assert not own


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Item(shows="x", status="reproduced"), "`result` must be set"),
        (
            lambda: Item(shows="x", status="nothing to run"),
            "`why` must be set for status 'nothing to run'",
        ),
        (
            lambda: Item(shows="x", status="nothing to run", why="y", tiny=["z"]),
            "`full` must be empty",
        ),
        (lambda: Item(shows="x", status="not run"), "`why` must be set for status 'not run'"),
        (
            lambda: Item(shows="x", status="not run", why="y", measure=Measure(runs={})),
            "`file` must be set",
        ),
        (lambda: Measure(runs={}, study="x", seeds=[1]), "`seeds` must be empty for a measure"),
        *[
            (lambda text=text: Measure(runs={}, series={"a": text}), f"got {text}$")
            for text in ("metric", "metric x y", "mean x", "sum x q")
        ],
    ],
)
def test_an_incomplete_row_is_refused(made, said) -> None:
    with pytest.raises(ValueError, match=said):
        made()


def ends_higher(*names: str) -> Callable[..., list[bool | None]]:
    """Return a function of two runs that returns whether each figure ends higher in the second run
    than in the first."""
    return lambda one, two: [getattr(one, n).last < getattr(two, n).last for n in names]


def above(variant) -> bool | None:
    """Return whether a variant of a study has a higher loss than its reference, or None if the
    interval contains 0."""
    low, high = variant.difference.low, variant.difference.high
    return None if low <= 0 <= high else low > 0


def below(variant) -> bool | None:
    """Return whether a variant of a study has a lower loss than its reference, or None if the
    interval contains 0."""
    return None if (higher := above(variant)) is None else not higher


def lower(variant, other) -> bool | None:
    """Return whether a variant of a study has a lower loss than another variant, compared seed by
    seed, or None if the interval contains 0."""
    ends = paired(variant.losses - other.losses)
    return None if ends["low"] <= 0 <= ends["high"] else ends["high"] < 0


def below_muon_after_46_runs(*rules: str) -> list[bool | None]:
    """Return, for each rule, whether its loss is lower than Muon's in the study without the last 22
    of 68 tuning runs."""
    rows = json.loads((ROOT / "studies/optimizers/results/qwen3/results.json").read_text())["rows"]
    found = {row["variant"]: SimpleNamespace(losses=pd.Series(row["losses"])) for row in rows}
    return [lower(found[rule], found["Muon"]) for rule in rules]


def within(variant, most: float) -> bool | None:
    """Return whether the loss of a variant differs by less than `most`, or None if the interval is
    too wide."""
    low, high = variant.difference.low, variant.difference.high
    return False if low > most or high < -most else (-most < low and high < most) or None


def fallen(series) -> float:
    """Return the smallest value of a series, divided by the first value."""
    return float(series.least / series.first)


def conditioned_better(none, pc) -> list[bool | None]:
    """Return, for each condition number, whether it ends lower with PC layers."""
    return ends_higher("covered", "qkv", "all")(pc, none)


quantiles_higher = ends_higher(
    "o_10", "o_50", "gate_10", "gate_50", "up_10", "up_50", "down_10", "down_50"
)
"""Returns, for each quantile of a role's singular values, whether it ends higher with PC layers."""


def above_one(*ratios: str) -> Callable[..., list[bool | None]]:
    """Return a function of a run that returns whether each ratio of the criterion stays above 1."""
    return lambda run: [getattr(run, ratio).least > 1 for ratio in ratios]


def recovery_decides(none, neither, gamma, recovery, both):
    """Return whether PC layers raise the loss without norm recovery, and whether they lower the
    loss with norm recovery."""
    return [*map(above, (neither, gamma)), *map(below, (recovery, both))]


# The papers' statements about statistics of the runs or variants of a row.
STATEMENTS: dict[tuple[str, str], Callable[..., list[bool | None]]] = {
    ("pc_layer", "figure_3"): lambda none, pc: [below(pc)],
    ("pc_layer", "figure_4"): lambda none, pc: [below(pc)],
    ("pc_layer", "figure_5"): conditioned_better,
    ("pc_layer", "figure_6"): quantiles_higher,
    ("pc_layer", "figure_7"): lambda none, one, two, three, four, muon, m1, m2, m3, m4: [
        above(one),
        below(four),
        below(m2),
    ],
    ("pc_layer", "figure_9"): recovery_decides,
    ("pc_layer", "figure_13"): lambda adamw_level, adamw_flat, muon_level, muon_flat: [
        above(adamw_flat),
        above(muon_flat),
        below(adamw_level),
        below(muon_level),
    ],
    ("pc_layer", "figure_14"): conditioned_better,
    ("pc_layer", "figure_15"): quantiles_higher,
    ("pc_layer", "table_4"): recovery_decides,
    ("sso", "figure_6"): lambda mup, align, kaiming: [above(align), above(kaiming)],
    ("sso", "figure_7"): lambda heads, fused: [above(fused)],
    ("sso", "figure_8"): lambda adamw, muon, muon_sphere, sso: [
        *map(below, (muon, muon_sphere, sso)),
        *[lower(each, muon) for each in (muon_sphere, sso)],
        *below_muon_after_46_runs("MuonSphere", "SSO"),
    ],
    ("sso", "figure_10"): lambda sso, adamw: [sso.loss.last < adamw.loss.last],
    ("sso", "footnote_6"): lambda sso, five, quintic: [within(five, 1e-3), within(quintic, 1e-3)],
    ("gram_penalty", "figure_1"): lambda adamw: [
        max(fallen(adamw.v), fallen(adamw.o), fallen(adamw.down))
        < min(fallen(adamw.q), fallen(adamw.k), fallen(adamw.up))
    ],
    ("gram_penalty", "figure_3"): lambda adamw, adamw_penalty, muon, muon_penalty: [
        *map(below, (adamw_penalty, muon, muon_penalty))
    ],
    ("spectral_updates", "figure_2"): lambda muon: [muon.largest.greatest < 0.05 * 512],
    ("spectral_updates", "figure_5"): above_one("up_ratio", "down_ratio"),
    ("spectral_updates", "figure_6"): lambda muon: [
        each.settled < 10 for each in (muon.attention_mean, muon.ffn_mean, muon.final)
    ],
    ("spectral_updates", "figure_7"): lambda muon: [
        each.settled < min(muon.up_ratio.settled, muon.down_ratio.settled)
        for each in (muon.embedding_ratio, muon.head_ratio)
    ],
    ("spectral_updates", "figure_8"): above_one("q_ratio", "k_ratio"),
    ("spectral_updates", "figure_9"): lambda muon: [
        muon.v.settled < muon.o.settled,
        *above_one("o_ratio", "v_ratio")(muon),
    ],
    ("spectral_updates", "figure_10"): lambda muon: [
        muon.tokens.greatest < 1.5 * muon.tokens.least,
        muon.embeddings.settled < muon.tokens.settled,
    ],
    ("spectral_updates", "figure_22"): lambda relu2, swiglu: [
        getattr(relu2, name).settled < getattr(swiglu, name).settled < 10
        for name in ("attention", "ffn", "final")
    ],
    ("spectral_updates", "figure_23"): lambda relu2, swiglu: [
        swiglu.largest.greatest < 0.05 * 320,
        relu2.median.settled < swiglu.median.settled,
    ],
    ("spectral_updates", "figure_24"): lambda swiglu: [
        swiglu.head.settled < swiglu.embedding.settled,
        swiglu.embedding.first < swiglu.embedding.last,
    ],
    ("spectral_updates", "figure_25"): lambda swiglu: [
        swiglu.up.settled < swiglu.down.settled,
        swiglu.gate.settled < swiglu.down.settled,
        *above_one("up_ratio", "down_ratio", "gate_ratio")(swiglu),
    ],
    ("spectral_updates", "figure_26"): above_one("q_ratio", "k_ratio"),
    ("spectral_updates", "figure_27"): lambda swiglu: [
        swiglu.v.settled < swiglu.o.settled,
        *above_one("o_ratio", "v_ratio")(swiglu),
    ],
    ("spectral_updates", "table_1"): lambda init: [
        init.embeddings.first < 1.67 * init.tokens.first,
        init.before.first < 1.67 * init.ffn.first,
        init.post.first < 1.67 * init.ffn.first,
        init.final.first < init.tokens.first,
    ],
}


class Figures:
    """The statistics of each series of a run, or a study's results for a variant, as attributes."""

    def __init__(self, run) -> None:
        for series, values in run.get("series", {}).items():
            setattr(self, series, SimpleNamespace(**statistics_of(values)))
        if "losses" in run:
            self.losses = pd.Series(run["losses"])
            self.loss = SimpleNamespace(mean=run["loss"], error=run["error"])
            ends = {"low": run["low"], "high": run["high"]}
            self.difference = SimpleNamespace(mean=run["difference"], **ends)


def verdict(statement: Callable[..., list[bool | None]], content) -> str:
    """Return the status of a statement. The statement is decided by at least three seeds, in all of
    which it holds or fails, or by intervals. If it returns None, it is undecided."""
    runs = [*content.values()]
    if "seeds" in runs[0]:
        named = [*runs[0]["seeds"]]
        seeds = len(named)
        held = [statement(*[Figures(run | run["seeds"][seed]) for run in runs]) for seed in named]
    else:
        seeds, held = len(runs[0].get("losses", [])), [statement(*map(Figures, runs))]
    if seeds < 3:
        return "cannot tell"
    if all(map(all, held)):
        return "reproduced"
    failed = (all(x is not None and not x for x in each) for each in zip(*held, strict=True))
    return "contradicts" if any(failed) else "cannot tell"


@pytest.mark.parametrize(
    ("low", "high", "seeds", "higher", "small"),
    [
        (0.002, 0.004, 3, "reproduced", "contradicts"),
        (-0.004, 0.002, 3, "cannot tell", "cannot tell"),
        (-0.004, -0.002, 3, "contradicts", "contradicts"),
        (-0.0005, 0.0004, 3, "cannot tell", "reproduced"),
        (0.002, 0.004, 2, "cannot tell", "cannot tell"),
    ],
)
def test_an_interval_decides_from_three_seeds_on(low, high, seeds, higher, small) -> None:
    base = {"losses": [4.0] * seeds, "loss": 4.0, "error": 0.1}
    ends = {"low": low, "high": high, "difference": (low + high) / 2}
    content = {"one": base | dict.fromkeys(ends), "other": base | ends}
    assert verdict(lambda one, other: [above(other)], content) == higher
    assert verdict(lambda one, other: [within(other, 1e-3)], content) == small


@pytest.mark.parametrize(("paper", "key"), STATEMENTS)
def test_a_verdict_rests_on_what_the_paper_states(paper: str, key: str) -> None:
    item = ITEMS[paper, key]
    content = json.loads((ROOT / str(item.file)).read_text())
    assert item.status == verdict(STATEMENTS[paper, key], content)


@pytest.mark.parametrize(("paper", "key"), OF_STUDIES)
def test_a_row_of_a_study_is_measured_again_from_its_committed_results(paper, key) -> None:
    item = ITEMS[paper, key]
    assert item.measure is not None
    again = measure(replace(item.measure, series={}), item.tiny)
    stored = json.loads((ROOT / str(item.file)).read_text())
    for name, run in stored.items():
        run.pop("seeds", None)
        assert again[name] == run


@pytest.mark.parametrize(("paper", "key"), MEASURED)
def test_the_figure_of_a_row_shows_each_result_beside_its_name(paper: str, key: str) -> None:
    item = ITEMS[paper, key]
    content = json.loads((ROOT / str(item.file)).read_text())
    committed = TEXTS.findall((ROOT / figure_file(paper, key)).read_text())
    assert item.shows in html.unescape(" ".join(committed))
    panels = draw(item).axes
    for i, series in enumerate(item.measure.series or [None]):
        panel = panels[i]
        ticks = [each.get_text() for each in panel.get_yticklabels()]
        drawn = [(each.get_color(), *map(list, each.get_data())) for each in panel.lines]
        if series is None:
            shown = [(ticks[round(ys[0])], list(xs)) for _, xs, ys in drawn]
            for row in content.values():
                assert (row["variant"], row["losses"]) in shown
                assert (row["variant"], [row["loss"]]) in shown
            continue
        names = [name.replace("_", " ") for name in content]
        assert panel.get_legend_handles_labels()[1] == names
        results = [
            (place, run["series"][series])
            for place, of_name in enumerate(content.values())
            for run in runs_of(of_name).values()
        ]
        points = all(len(values) == 1 for _, values in results)
        assert not points or ticks == names
        assert drawn == [
            (f"C{place}", list(values.values()), [place])
            if points
            else (f"C{place}", [int(step) for step in values], list(values.values()))
            for place, values in results
        ]


def test_a_verdict_on_training_runs_has_a_statement() -> None:
    decided = {name for name in MEASURED if ITEMS[name].status in ("reproduced", "contradicts")}
    assert decided <= STATEMENTS.keys()


def test_each_seed_is_a_run_of_its_own() -> None:
    item = ITEMS["spectral_updates", "figure_9"]
    runs = [command for command in commands(item, full=False) if "pretrain.py" in command]
    ends = [f"run.dir=runs/papers/tiny_gpt_muon/seed_{n} seed={n}" for n in (1, 2, 3)]
    assert [" ".join(command[-2:]) for command in runs] == ends


def test_what_is_reproduced_rests_on_a_committed_result() -> None:
    """A reproduced item is based on statements about a measured row, on passed checks of an
    experiment, or on a test."""
    results = json.loads((ROOT / "benchmarks/results/reproduce.json").read_text())
    passed = {entry["name"]: entry["passed"] for entry in results}
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


def test_latencies_of_table_2_are_those_of_one_gpu() -> None:
    folder = ROOT / "benchmarks/results/h200"
    model = json.loads((folder / "optimizer_llama1b.json").read_text())["models"]["llama1b_sso"]
    ms = {line["optimizer"]: line["ms"] for line in model if line["ranks"] == 8}
    train = json.loads((folder / "train_llama1b_muon.json").read_text())
    passes = train["seconds_per_step"] - train["phase_seconds"]["optimizer"]
    step = 1000 * passes * 2_621_440 / 8 / train["tokens_per_step"] + ms["muon"]
    said = str(ITEMS["sso", "table_2"].result)
    assert f"step of {step / 1000:.2f} s for 2.62M tokens" in said
    names = {"adamw": "AdamW", "muon_sphere": "MuonSphere", "spectral_sphere": "SSO"}
    for rule, name in names.items():
        assert f"{name} {100 * (ms[rule] - ms['muon']) / step:+.1f}%" in said


def test_statistics_are_those_of_the_series() -> None:
    assert statistics_of({str(10 * n + 10): float(n) for n in range(10)}) == {
        "first": 0, "last": 9, "least": 0, "greatest": 9,
        "mean": 4.5, "median": 4.5, "early": 0.5, "settled": 7,
    }  # fmt: skip


REDUCED = {"least": min, "median": np.median, "mean": np.mean, "largest": max}


def test_series_are_the_figures_that_the_run_logged(world, folder: str) -> None:
    """The run has PC layers."""
    keys = {"pc__level": 4, "train__steps": 3, "checkpoint__interval": 3}
    keys |= {"monitors__interval": 1, "log__interval": 1, "train__micro_batch": 8}
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
        **{f"{over} of medians": f"{over} quantile_50 down" for over in REDUCED},
        "layer": "mean quantile_50 down 1",
    }
    found = measure(Measure(runs={"a": f"{folder}/run"}, series=texts), [command])["a"]
    assert found["command"] == command and found["steps"] == 3
    runs, seeds = {"a": f"{folder}/all"}, [7, 8]
    for seed in seeds:
        shutil.copytree(Path(folder) / "run", Path(folder) / "all" / f"seed_{seed}")
        saved = Path(folder) / "all" / f"seed_{seed}" / "config.yaml"
        said = saved.read_text().replace("/run\n", f"/all/seed_{seed}\n")
        saved.write_text(re.sub(r"(?m)^seed: .*", f"seed: {seed}", said))
    of_seeds = Measure(runs=runs, series=texts, seeds=seeds)
    many = measure(of_seeds, [f"{command} run.dir={folder}/all"])
    assert [*many["a"]["seeds"]] == ["7", "8"]
    series = found["series"]
    assert many["a"]["seeds"]["8"]["series"] == series
    settings = [f"{folder}/config.yaml", *overrides.split()]
    figures = summary(Path(folder) / "run")
    record = Record("key", "run", settings, False, 1.0, figures, {})
    assert trained_series(record, Path(folder), texts) == series
    for change in ({"figures": figures | {"loss": 1.0}}, {"settings": [*settings, "seed=5"]}):
        with pytest.raises(InputError, match="recorded loss 1.0|trained with a different config"):
            trained_series(replace(record, **change), Path(folder), texts)
    for change, said in (
        ({"series": {"a": "metric train/los"}}, "contains no values of `metric train/los`"),
        ({"runs": {"a": f"{folder}/none"}}, "must contain a finished run; run python pretrain.py"),
    ):
        what = replace(Measure(runs={"a": f"{folder}/run"}), **change)
        with pytest.raises(InputError, match=said):
            measure(what, [f"{command} run.dir={what.runs['a']}"])
    assert [*series["loss"]] == [1, 2, 3] and series["mean"] == series["mean of all"]
    assert series["largest"] == series["largest of all"]
    assert set(series["top"].values()) == {1.0}
    for line in json_lines(Path(folder) / "run" / "monitors.jsonl"):
        spectra = [line["units"][f"layers.{i}.down"]["effective_quantiles"] for i in (0, 1)]
        medians = [values[5] / values[10] for values in spectra]  # of PC(W)
        for over, reduced in REDUCED.items():
            value = series[f"{over} of medians"][line["step"]]
            assert value == pytest.approx(reduced(medians), rel=1e-4), over
        assert series["layer"][line["step"]] == pytest.approx(medians[1], rel=1e-4)
