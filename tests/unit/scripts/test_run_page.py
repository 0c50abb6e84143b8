"""Figures of runs and the report page of a run show the logged data and need no network."""

import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from matplotlib.figure import Figure

from parallel.comm import groups as process_groups
from scripts.plot import main
from scripts.plots import compare, curves, run_figures, run_page, spectra
from scripts.plots.run_data import RunData, read_run, run_status
from scripts.plots.run_figures import FIGURES, RunFigure
from scripts.plots.run_page import happenings, report
from scripts.plots.style import mark_single_points
from tests.paths import ROOT
from tests.run_configs import tiny_config
from tests.run_results import json_lines
from training.run import train


@pytest.fixture(scope="module")
def folder(shared_folder):
    """A folder with a stopped and resumed run with PC layers, monitors and a penalty, a run without
    these, and a failed run."""
    folder = shared_folder
    world = process_groups.initialize()
    common = {"train__steps": 6, "train__micro_batch": 4, "log__interval": 1}
    own = {
        "run__dir": f"{folder}/pc",
        "run__name": "a <b>",
        "pc__level": 4,
        "train__z_loss": 1e-3,
        "gram_penalty__horizon": 1.0,
        "monitors__interval": 2,
        "monitors__groups": "[weights,gradients,updates,noise,activations,attention,spectra]",
        "monitors__noise_samples": 3,
        "checkpoint__interval": 3,
        "validation__interval": 3,
    }
    train(tiny_config(str(folder), "adamw", **common, **own, train__exit_step=3), world)
    train(tiny_config(str(folder), "adamw", **common, **own), world)
    plain = {"run__dir": f"{folder}/plain", "monitors__interval": 0}
    train(tiny_config(str(folder), "muon", **common, **plain, train__exit_step=4), world)

    def fail(step, result):
        if step == 2:
            raise RuntimeError("the disk is full")

    failing = tiny_config(str(folder), "muon", **common, run__dir=f"{folder}/deep/failed")
    with pytest.raises(RuntimeError, match="full"):
        train(failing, world, on_step=fail)
    process_groups.shutdown()
    return folder


@pytest.fixture
def only_loss(monkeypatch) -> None:
    """Draw only the loss on pages and in folders, because drawing is slow."""
    for module in (compare, run_figures, run_page):
        monkeypatch.setattr(module, "FIGURES", [each for each in FIGURES if each.name == "loss"])


Curve = tuple[str, list[float]]
"""A text that the label of a curve or the title of its panel contains, and the values of the curve.
"""


def logged(*names: str) -> Callable[[RunData], Iterator[Curve]]:
    """Return a function that yields a run's values of the given metrics."""
    return lambda run: (
        ("", [line[name] for line in run.metrics if name in line]) for name in names
    )


def by_role(run: RunData, figure: str, of: Callable[[list], float] = fmean) -> Iterator[Curve]:
    """For each role, yield a curve of `of` applied to the values of a monitored metric over
    matrices, in each monitored step."""
    for role in {unit["role"] for unit in run.monitors[0]["units"].values() if unit["layer"] == 0}:
        steps = [
            [u[figure] for u in line["units"].values() if u["role"] == role and figure in u]
            for line in run.monitors
        ]
        if all(steps):
            yield role, [of(values) for values in steps]


def weights(run: RunData, of: Callable[[list], float]) -> Iterator[Curve]:
    """For each role, yield a curve of `of` applied to the deciles of the weights. For PC layers,
    PC(W) is used."""
    effective = dict(by_role(run, "effective_quantiles", of))
    assert {*effective} == {"o", "gate", "up", "down"}
    yield from (dict(by_role(run, "quantiles", of)) | effective).items()


def decile(i: int) -> Callable[[list], float]:
    """Return a function that computes the mean of decile `i` over matrices."""
    return lambda rows: fmean(row[i] for row in rows)


def ranks(run: RunData) -> Iterator[Curve]:
    """Yield the deciles in the first and the last monitored step."""
    curves = [dict(weights(run, decile(i))) for i in range(11)]
    for role in curves[0]:
        for step in (0, -1):
            yield role, [each[role][step] for each in curves]


def shares(run: RunData) -> Iterator[Curve]:
    """Yield the share of values in each of 30 equal parts of their range in the last monitored
    step."""
    curves = [dict(weights(run, decile(i))) for i in range(11)]
    for role in curves[0]:
        values = [each[role][-1] for each in curves]
        edges = np.linspace(0, values[-1], 31)
        below = np.interp(edges, values, np.linspace(0, 1, 11), left=0, right=1)
        yield role, np.diff(below).tolist()


def conditions(run: RunData) -> Iterator[Curve]:
    for role, kind in {"q": "", "o": "effective_", "down": "effective_"}.items():
        yield from ((role, x) for _, x in logged(f"monitor/{kind}condition_number/{role}")(run))
    yield from logged("monitor/condition_number/geometric_mean")(run)


def blocks(run: RunData, figure: str) -> Iterator[Curve]:
    """Yield a metric of each block over the monitored steps."""
    yield from (("", [line["blocks"][at][figure] for line in run.monitors]) for at in "01")


def residuals(run: RunData) -> Iterator[Curve]:
    yield from blocks(run, "residual_rms")
    for line in run.monitors:
        yield "", [line["blocks"][place]["residual_rms"] for place in ("embedding", "0", "1")]


def logits(run: RunData) -> Iterator[Curve]:
    each = [values for _, values in blocks(run, "max_attention_logit")]
    yield from (("", values) for values in each)
    yield run.name, [max(values) for values in zip(*each, strict=True)]


def signals(run: RunData) -> Iterator[Curve]:
    for what in ("gradient", "update"):
        for name, title in (("snr", "SNR"), ("top_share", "TopShare"), ("alignment", "alignment")):
            metric = f"monitor/{what}_{name}/q"
            values = [line[metric] for line in run.metrics if metric in line]
            yield f"{title} of {what}s q", values
    # The least share of one direction: of two micro-batches' gradients, and of three updates.
    yield "TopShare of gradients", [1.0, 1.0]
    yield "TopShare of updates", [1 / 2, 1 / 2]


def norms(run: RunData) -> Iterator[Curve]:
    yield from by_role(run, "pc_norm_error", median)
    yield from (("", values) for _, values in by_role(run, "pc_norm_error", max))


def cells(figure: str) -> Callable[[RunData], Iterator[Curve]]:
    """Return a function that yields the rows of a run's map of layers by roles."""

    def of(run: RunData) -> Iterator[Curve]:
        units = run.monitors[-1]["units"].values()
        for layer in (0, 1):
            rows = [
                [u[figure] for u in units if (u["role"], u["layer"]) == (role, layer)]
                for role in ("q", "k", "v", "o", "gate", "up", "down")
            ]
            yield f"layer {layer}: q k v o gate up down", [fmean(row) for row in rows]

    return of


SHOWN: dict[str, Callable[[RunData], Iterator[Curve]]] = {
    "loss": logged("train/loss", "val/loss"),
    "tasks": logged("task/words/acc", "task/words/acc_norm"),
    "learning_rates": logged(*(f"lr/{group}" for group in ("matrix", "embedding", "scalar"))),
    "gradient_norm": logged("optim/grad_norm"),
    "evolution": lambda run: weights(run, decile(5)),
    "spectra": shares,
    "quantiles": ranks,
    "momentum": lambda run: by_role(run, "momentum_quantiles", decile(5)),
    "update": lambda run: by_role(run, "update_quantiles", decile(5)),
    "condition_numbers": conditions,
    "tracked_norms": norms,
    "residual": residuals,
    "attention_logits": logits,
    "signal": signals,
    "rule_reports": logged("monitor/rule_gap/q"),
    "stable_rank": cells("stable_rank"),
    "nuclear_rank": cells("gradient_nuclear_rank"),
    "criterion": cells("criterion_ratio"),
    "maxvio": logged("moe/max_vio"),
    "penalty": logged("penalty/loss_ratio"),
    "z_loss": logged("train/z_loss"),
}
"""Expected curves of each figure, computed from the lines of the run."""


def drawn(figure) -> Iterator[Curve]:
    """Yield the curves, histograms and rows of maps in a figure."""
    for axis in figure.axes:
        for line in axis.lines:
            if axis.get_xlabel() == "tokens" and len(line.get_xdata()) > 2:
                assert {*line.get_xdata()} <= {256 * step for step in range(1, 7)}
            assert axis.get_xlabel() != "after layer" or [*line.get_xdata()] == [-1, 0, 1]
            yield f"{axis.get_title()} {line.get_label()}", list(line.get_ydata())
        for patch in axis.patches:
            yield axis.get_title(), patch.get_data().values.tolist()
        for image in axis.images:
            powers = any("log2" in each.get_ylabel() for each in figure.axes)
            cells = 2.0 ** image.get_array() if powers else image.get_array()
            written = [each.get_text() for each in axis.texts]
            assert written == [f"{value:.2g}" for value in cells.compressed()]
            layers, roles = (
                [each.get_text() for each in ticks]
                for ticks in (axis.get_yticklabels(), axis.get_xticklabels())
            )
            for layer, row in zip(layers, cells, strict=True):
                yield f"layer {layer}: {' '.join(roles)}", list(row)


@pytest.fixture(scope="module")
def run(folder) -> RunData:
    """The run with PC layers, with added metrics of tasks, experts and a user's rule."""
    run = read_run(folder / "pc")
    more = {"task/words/acc": 0.5, "task/words/acc_norm": 0.25, "moe/max_vio": 3.0}
    more["monitor/rule_gap/q"] = 2.0
    lines = [line | {k: v / line["step"] for k, v in more.items()} for line in run.metrics]
    return replace(run, metrics=lines)


@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.name)
def test_every_figure_shows_what_was_logged(kind, run):
    there = list(drawn(kind.draw(run)))
    expected = list(SHOWN[kind.name](run))
    assert expected and {*SHOWN} == {each.name for each in FIGURES}
    for name, values in expected:
        assert values, name
        assert any(
            name in label and len(ys) == len(values) and ys == pytest.approx(values)
            for label, ys in there
        ), (name, values)


@pytest.mark.parametrize("kind", [each for each in FIGURES if each.overlay], ids=lambda k: k.name)
def test_each_run_is_named_and_looks_different(kind, run):
    """The name of a run is in the title of its panel, or in a legend in which each label has its
    own line style."""
    runs = [replace(run, label=name) for name in ("first", "second", "third")]
    axes = kind.overlay(runs).axes
    texts = [axis.get_title() for axis in axes]
    for legend in filter(None, (axis.get_legend() for axis in axes)):
        texts += [each.get_text() for each in legend.texts]
        properties = [handle.properties() for handle in legend.legend_handles]
        looks = [[str(p.get(k)) for k in ("color", "facecolor", "linestyle")] for p in properties]
        assert len({*map(tuple, looks)}) == len(legend.texts)
    assert all(any(run.name in text for text in texts) for run in runs)


EMPTY: dict[str, Callable[[RunData], RunData]] = {
    "validated only": lambda run: replace(
        run, metrics=[{"step": 1, "val/loss": 2.0}], monitors=[]
    ),
    "figures are not finite": lambda run: replace(run, monitors=[
        line | {"units": {n: blank(u) for n, u in line["units"].items()},
                "blocks": {n: blank(b) for n, b in line["blocks"].items()}}
        for line in run.monitors
    ]),
    "monitors.jsonl is lost": lambda run: replace(run, monitors=[]),
    "no figures": lambda run: replace(
        run, metrics=[{k: v for k, v in line.items() if "/" not in k} for line in run.metrics],
        monitors=[{"step": 2, "units": {"a": {"role": "q", "layer": 0}}, "blocks": {}}],
    ),
}  # fmt: skip
"""Functions that remove metrics from a run."""


def blank(figures: dict) -> dict:
    """Return the metrics of a matrix or block, with spectra of zeros and no other values."""
    kept = ("role", "layer", "noise_samples")
    return {
        key: value if key in kept else [0.0] * 11 if isinstance(value, list) else None
        for key, value in figures.items()
    }


@pytest.mark.parametrize("kind", FIGURES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("change", EMPTY)
def test_a_run_without_figures_is_drawn(kind, change, run):
    """Missing values cause no error and no warning. pytest would raise warnings as errors."""
    kind.draw(EMPTY[change](run))


def test_one_monitored_step_is_drawn(folder, tmp_path):
    """The step is drawn as bars and points, because a curve or an area of one step would be empty.
    Lines that are not JSON are left out, and names are not typeset as mathematics."""
    copy = shutil.copytree(folder / "pc", tmp_path / "a $_$ b")
    for name, lines in (("metrics", 2), ("monitors", 1), ("events", None)):
        path = copy / f"{name}.jsonl"
        kept = path.read_text().splitlines(keepends=True)[:lines]
        path.write_text("".join([*kept, '{"step": 7, "train/loss": NaN}\n']))
    assert main([str(copy), "--html"]) == 0
    assert "a $_$ b</text>" in (copy / "report.html").read_text()
    run = read_run(copy)
    evolution = spectra.evolution(run)
    assert evolution is not None
    for axis in (axis for axis in evolution.axes if axis.get_visible()):
        low, high = axis.collections[0].get_segments()[0][:, 1]
        (median,) = axis.lines[0].get_ydata()
        assert low < median < high
    for kind in FIGURES:
        figure = kind.draw(run)
        if figure is not None:
            mark_single_points(figure)
            lines = [line for axis in figure.axes for line in axis.lines]
            assert all(line.get_marker() != "None" for line in lines if len(line.get_xdata()) == 1)


def ids(page: str) -> list[str]:
    """Return the ids of all elements on a page."""
    return re.findall(r'\bid="([^"]+)"', page)


def fetched(page: str) -> list[str]:
    """Return everything that a page would fetch."""
    links = re.findall(r'\b(?:src|href|srcset|data)="(?!#|data:)([^"]+)"', page)
    return links + re.findall(r"<(?:script|iframe|object|embed)\b|@import|url\((?!#)", page)


def test_the_page_holds_everything_it_shows(folder):
    assert main([str(folder / "pc"), "--html"]) == 0
    text = (folder / "pc" / "report.html").read_text()
    assert fetched(text) == [] and len(ids(text)) == len(set(ids(text)))
    keys = {figure.name for figure in FIGURES}
    missing = {"maxvio", "rule_reports", "tasks"}  # no experts, no figures of a rule, no tasks
    assert keys - set(ids(text)) == missing and text.count("<svg") == len(keys) - len(missing)
    assert {"events", "config"} <= set(ids(text)) and "Spectra are not available yet" not in text
    assert "a &lt;b&gt;" in text and "a <b>" not in text
    last = json_lines(folder / "pc" / "metrics.jsonl")[-1]
    assert f"<b>{last['train/loss']:.4f}</b>" in text and f"<b>{last['val/loss']:.4f}</b>" in text


@pytest.mark.usefixtures("only_loss")
def test_the_page_says_why_it_has_no_spectra(folder, tmp_path):
    copy = shutil.copytree(folder / "plain", tmp_path / "run")
    assert "Spectra are not computed, because monitors.interval is 0." in report(read_run(copy))
    (copy / "monitors.jsonl").unlink(missing_ok=True)
    events = json_lines(copy / "events.jsonl")
    for event in (event for event in events if "intervals" in event):
        event["intervals"]["monitors"] = 2300
    (copy / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    said = "Spectra are not available yet: monitoring starts at step 2,300."
    assert said in report(read_run(copy))


def test_what_a_rule_reports_is_drawn_by_role(folder, tmp_path):
    """The rule is from a user's package. A metric that is always 0 is left out."""
    copy = shutil.copytree(folder / "plain", tmp_path / "run")
    lines = json_lines(copy / "metrics.jsonl")
    for line in lines:
        own = {"monitor/rule_gap/q": 2.0 * line["step"], "monitor/rule_gap/o": 1.0}
        line.update(own | {"monitor/rule_refused/q": 0.0, "monitor/rule_a$b_/q": -1.0})
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figure = curves.rule_reports(read_run(copy))
    assert figure is not None
    shown = {a.get_title(): {x.get_label(): x for x in a.lines} for a in figure.axes}
    shown = {title: drawn for title, drawn in shown.items() if drawn}
    assert [title.replace("\\", "") for title in shown] == ["rule_gap", "rule_a$b_"]
    assert list(shown["rule_gap"]["q"].get_ydata()) == [2.0 * line["step"] for line in lines]
    assert 'id="rule_reports"' in report(read_run(copy))


@pytest.mark.usefixtures("only_loss")
def test_damaged_lines_are_warned_of_and_texts_of_models_are_harmless(folder, tmp_path, capsys):
    copy = shutil.copytree(folder / "plain", tmp_path / "run")
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[1]) | {"sample/a/text": "x\x1b[2J\ud83d y", "sample/a/prompt": "p\x9b"}
    lines[1] = json.dumps(line)
    lines[0] = lines[0][:-9]
    (copy / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main([str(copy), "--html"]) == 0
    assert "metrics.jsonl: skipped 1 damaged lines" in capsys.readouterr().err
    assert "x\ufffd[2J\ufffd y" in (copy / "report.html").read_text()


def test_skipped_steps_are_an_event_of_the_line_that_counts_more_of_them():
    counts = [None, 0, 2, None, 2, 3, None]  # lines of a validation have no count
    lines = [
        {"step": i} if count is None else {"step": i, "optim/skipped_steps": count}
        for i, count in enumerate(counts)
    ]
    run = RunData(Path(), lines, [], {}, [])
    rows = [(row["step"], row["text"][:7]) for row in happenings(run)]
    assert rows == [("2", "2 steps"), ("5", "1 steps")]


STUDY = f"{ROOT}/studies/optimizers/results/llama_0.1m/results.json"
REFUSED = {
    "compare {tmp}/none": "none must be an existing folder",
    "compare {tmp}/empty": "empty contains no run folder",
    "compare {runs} --output {tmp}/a.svg": "--output must end in .html, got",
    "{tmp}/empty": "a run must be a folder with metrics.jsonl, got",
    "{tmp}/broken": "a run must be a folder with a valid config.yaml, got",
    "{tmp}/new": "new has not logged any steps yet",
    "{runs}/pc {runs}/pc": "run folders must have different names, got pc, pc",
    "maps --output {tmp}/a.gif": "--output must end in one of .svg, .png, .pdf, got",
    "maps --output {tmp}/none/a.svg": "--output must be in an existing folder, got",
    "spectrum {runs}/pc --roles q x --output {tmp}/a.svg": "--roles must be among",
    "study {study} --by x --output {tmp}/a.svg": "--by must be a tuned config key (optimizer",
    "study {study} --curves x --output {tmp}/a.svg": "--curves must be among AdamW,",
    "study {tmp}/begun.json --output {tmp}/a.svg": "no finished comparison of two variants yet",
    "study {tmp}/begun.json --by optimizer.matrix.lr --output {tmp}/a.svg": "no losses by",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_drawn_is_refused(command, folder, tmp_path, refusal):
    (tmp_path / "empty").mkdir()
    for name, file, text in (("new", "metrics.jsonl", ""), ("broken", "config.yaml", "a: [")):
        shutil.copytree(folder / "plain", tmp_path / name)
        (tmp_path / name / file).write_text(text)
    begun = json.loads(Path(STUDY).read_text()) | {"rows": [], "trials": [], "chosen": {}}
    (tmp_path / "begun.json").write_text(json.dumps(begun))
    words = command.format(tmp=tmp_path, runs=folder, study=STUDY).split()
    assert REFUSED[command] in refusal(main(words))
    assert not [*tmp_path.glob("a.*")]


@pytest.mark.usefixtures("only_loss")
def test_figures_are_written_through_no_link(folder, tmp_path, refusal):
    copy, kept = tmp_path / "run", tmp_path / "kept"
    shutil.copytree(folder / "plain", copy)
    kept.write_text("precious")
    (copy / "figures").mkdir()
    (copy / "figures" / "loss.svg").symlink_to(kept)
    assert main([str(copy)]) == 0
    assert kept.read_text() == "precious"
    assert main([str(copy), "--output", str(tmp_path / "new" / "figures")]) == 0
    assert (tmp_path / "new" / "figures" / "loss.svg").exists()
    (copy / "figures").rename(tmp_path / "elsewhere")
    (copy / "figures").symlink_to(tmp_path / "elsewhere")
    assert "figures must not be a symlink; set --output to its target" in refusal(main([str(copy)]))


@pytest.mark.usefixtures("only_loss")
def test_the_status_of_a_run(folder, tmp_path):
    def copied(name: str) -> Path:
        copy = tmp_path / str(len(list(tmp_path.iterdir())))
        shutil.copytree(folder / name, copy)
        return copy

    assert run_status(read_run(folder / "pc")).kind == "done"
    stopped = run_status(read_run(folder / "plain"))
    assert (stopped.kind, stopped.text) == ("stopped", "stopped, step 4 of 6")
    failed = run_status(read_run(folder / "deep" / "failed"))
    assert (failed.kind, failed.reason) == ("failed", "the disk is full")
    assert failed.text == "failed, step 2 of 6"
    host = f"RuntimeError on rank 0 (host {socket.gethostname()}): the disk is full"
    assert host in report(read_run(folder / "deep" / "failed"))
    # Without its last event it counts as running, like this process, which its lock names.
    running = copied("deep/failed")
    cut = (running / "events.jsonl").read_text().splitlines(keepends=True)[:-1]
    (running / "events.jsonl").write_text("".join(cut))
    assert run_status(read_run(running)).text == "running, step 1 of 6"
    gone = subprocess.Popen(["true"])
    gone.wait()
    lock = json.loads((running / "lock").read_text())
    (running / "lock").write_text(json.dumps(lock | {"pid": gone.pid}))
    assert run_status(read_run(running)).reason == "The run was killed, or its node failed."
    # Another process may have the id by now: this one, or the first of the machine.
    for other in (os.getpid(), 1):
        (running / "lock").write_text(json.dumps(lock | {"pid": other, "began": "boot 1"}))
        assert run_status(read_run(running)).kind == "failed"
    # For another host only the heartbeat is known.
    (running / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    for age, kind in ((10, "running"), (1000, "failed"), (-1000, "failed"), (-10, "running")):
        (running / "heartbeat.json").write_text(json.dumps({"time": time.time() - age}))
        assert run_status(read_run(running)).kind == kind


HOSTILE = {
    "metrics.jsonl": [
        ({"step": 7, "train/loss": "low"}, "train/loss must be of type"),
        ({"step": 7, "perf/step_time_s": [1]}, "perf/step_time_s must be of type"),
        ({"step": 2, "train/loss": 1.0}, "step must be at least 6, got 2"),
    ],
    "monitors.jsonl": [({"step": 7, "units": [], "blocks": {}}, "units must be a mapping")],
    "events.jsonl": [({"step": 7, "kind": "failed"}, "must have the key text")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_line_of_other_values_is_named(folder, name, tmp_path, capsys):
    run = shutil.copytree(folder / "pc", tmp_path / "run")
    kept = (run / name).read_text()
    number = kept.count("\n") + 1
    for line, said in HOSTILE[name]:
        (run / name).write_text(f"{kept}{json.dumps(line)}\n")
        assert main([str(run), "--html"]) == 2
        (text,) = capsys.readouterr().err.splitlines()
        assert f"{name}, line {number}" in text and said in text


def last_loss(run: Path) -> float:
    """Return the last validation loss of a run."""
    return json_lines(run / "metrics.jsonl")[-1]["val/loss"]


def test_runs_are_compared_by_validation_loss(folder):
    assert main(["compare", str(folder)]) == 0
    page = (folder / "compare.html").read_text()
    row = r"<td data-label=\"run\"><b>(.*?)</b>.*?<tr class=\"about\">(.*?)</tr>"
    rows = re.findall(row, page, re.DOTALL)
    best = sorted(("pc", "plain"), key=lambda name: last_loss(folder / name))
    assert [name for name, _ in rows] == [*best, "deep/failed"]
    said = dict(rows)
    assert "optimizer.matrix.rule muon" in said["plain"]
    assert "pc.level 4" in said["pc"] and "pc.steps" not in said["pc"]
    assert {"runs", "loss", "gradient_norm", "quantiles"} <= set(ids(page))
    assert fetched(page) == []


def test_the_curves_of_many_runs_are_those_of_the_best(folder, monkeypatch):
    """Runs without steps have no curves. The names are ordered by the loss in the same metric."""
    drawn: list[list[str]] = []

    def draw(runs: list[RunData]) -> Figure:
        """A caption."""
        drawn.append([run.name for run in runs])
        return Figure()

    monkeypatch.setattr(compare, "FIGURES", [RunFigure("loss", "Loss", draw)])
    best = [*sorted(("pc", "plain"), key=lambda name: last_loss(folder / name)), "deep/failed"]
    for most in (1, 2, 3):
        monkeypatch.setattr(compare, "MOST", most)
        page = compare.comparison(folder, [folder])
        assert drawn.pop() == best[:most]
        assert (f"Only the best {most} of 3 runs are shown." in page) is (most < 3)


@pytest.mark.usefixtures("only_loss")
def test_a_page_is_about_some_of_the_runs_in_a_folder(folder, tmp_path):
    page = tmp_path / "two.html"
    chosen = [str(folder / "plain"), str(folder / "deep"), str(folder / "deep" / "failed")]
    assert main(["compare", *chosen, "--output", str(page)]) == 0
    names = re.findall(r"<td data-label=\"run\"><b>(.*?)</b>", page.read_text())
    assert names == ["plain", "deep/failed"]


@pytest.mark.usefixtures("only_loss")
def test_runs_that_are_validated_differently_are_named(folder, tmp_path, capsys):
    """Test different contents of the validation set under the same config, a different tokenizer,
    and a link to a run."""
    (tmp_path / "runs").mkdir()
    for name in ("pc", "plain"):
        shutil.copytree(folder / name, tmp_path / name)
        (tmp_path / "runs" / name).symlink_to(tmp_path / name)

    def change(run: str, **contents: str) -> None:
        path = tmp_path / run / "data.json"
        facts = json.loads(path.read_text())
        path.write_text(json.dumps(facts | {"contents": facts["contents"] | contents}))

    def said() -> list[str]:
        assert main(["compare", str(tmp_path / "runs")]) == 0
        page = (tmp_path / "runs" / "compare.html").read_text()
        assert "<b>pc</b>" in page and "<b>plain</b>" in page
        lines = capsys.readouterr().err.splitlines()
        assert all(line.removeprefix("warning: ") in page for line in lines)
        return [line.rpartition("differ in ")[2] for line in lines]

    assert said() == []
    change("pc", **{"validation.walk": "1" * 64})
    assert said() == ["data.validation.walk.content."]
    for run in ("pc", "plain"):
        change(run, tokenizer=run)
    assert said() == ["data.validation.walk.content, tokenizer."]
    path = tmp_path / "plain" / "data.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"contents": {}}))
    (text,) = said()  # an earlier version, with the same paths
    assert "tokenizers of these runs are not recorded" in text and text.endswith(": plain.")


def test_series_of_a_long_run_are_found_at_once():
    lines = [{"step": i, "progress/tokens": 8 * i, "train/loss": 1.0} for i in range(1, 20_001)]
    train = {"global_batch": 2, "sequence_length": 4}
    run, start = RunData(Path(), lines, [], {"train": train}, []), time.process_time()
    assert run.series("train/loss")[-1] == (160_000, 1.0) and time.process_time() - start < 5
