"""Figures show the data from runs and checkpoints."""

import json
import math
import re
import shlex
from statistics import mean, stdev

import numpy as np
import pytest

from scripts.command import write_whole
from scripts.experiments.experiment import Draws
from scripts.experiments.pc_layers import LEVELS, PAPER, deep_linear
from scripts.plot import main
from scripts.plots.effective_weights import plot_maps, plot_spectrum
from scripts.plots.study_figures import plot_curves, plot_losses, plot_study
from scripts.studies.tables import read_results
from tests.run_configs import tiny_config
from training.errors import InputError
from training.run import train


def test_a_spectrum_counts_every_singular_value(world, folder, tmp_path):
    train(tiny_config(folder, "muon", pc__level=4, train__steps=3, checkpoint__interval=3), world)
    figure = plot_spectrum(tmp_path / "run", ["o", "q"])
    o, q = figure.axes
    assert [text.get_text() for text in o.get_legend().get_texts()] == ["W", "PC(W)"]
    assert [text.get_text() for text in q.get_legend().get_texts()] == ["W"]
    before, after = (patch.get_path().vertices[:, 1].max() for patch in o.patches)
    assert after > 1.5 * before  # level 4 gathers values at the largest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": "12"}, "seeds must be a list"),
        ({"rows": [{"variant": "SSO", "losses": ["a"], "runs": []}]}, "losses[0] must be of type"),
        (
            {
                "variants": {n: {"against": None, "search": {}} for n in "ab"},
                "rows": [{"variant": n, "losses": [1] * i, "runs": []} for i, n in enumerate("ab")],
            },
            "all rows must have the same number of losses",
        ),
        ({"rows": [{"variant": "b", "losses": [1], "runs": []}]}, "rows must be the variants"),
        (
            {
                "variants": {"a": {"against": None, "search": {}}},
                "rows": [{"variant": "a", "losses": [1], "runs": [], "datasets": {"x": []}}],
            },
            "each dataset of a must have the same number of losses as the row",
        ),
        ({"variants": {"a": {"against": "b", "search": {}}}, "rows": []}, "among a, got b"),
        ({"variants": {"a": {"against": None, "search": {}}}, "rows": []}, "got x"),
    ],
)
def test_other_results_are_a_line(root, tmp_path, capsys, change, said):
    results = root / "studies/optimizers/results/llama_0.1m/results.json"
    trial = {"variant": "x", "stage": "s", "share": 1, "candidate": [], "loss": None}
    content = json.loads(results.read_text()) | {"trials": [trial]} | change
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert main(["study", str(tmp_path / "results.json"), "--output", f"{tmp_path}/a.svg"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and str(tmp_path) in line


def test_the_curves_of_readme_are_those_of_committed_results(root, tmp_path, monkeypatch):
    monkeypatch.chdir(root)
    page = (root / "docs/results.md").read_text().replace("\\\n", " ")
    (command,) = re.findall("scripts/plot.py (.*--curves.*docs/images.*)", page)
    *arguments, committed = shlex.split(command)
    drawn = tmp_path / "curves.svg"
    assert main([*arguments, str(drawn)]) == 0
    assert drawn.read_bytes() == (root / committed).read_bytes()
    results = root / arguments[1]
    (losses,) = (r["losses"] for r in read_results(results)["rows"] if r["variant"] == "SSO")
    (container,) = plot_curves(results, ["SSO"]).axes[0].containers
    line, _, (bars,) = container.lines
    assert line.get_ydata()[-1] == pytest.approx(mean(losses))
    low, high = bars.get_segments()[-1][:, 1]
    with pytest.raises(InputError, match=r"validation\.interval"):
        plot_curves(root / "studies/results/widths/results.json", ["SSO, 64"])
    assert high - low == pytest.approx(2 * stdev(losses) / len(losses) ** 0.5)
    # A curve is no mean of fewer seeds than its title names.
    copy, (row, *_) = tmp_path / results.name, read_results(results)["rows"]
    records = [
        json.loads(line) for line in (results.parent / "runs.jsonl").read_text().splitlines()
    ]
    next(r for r in records if r["key"] == row["runs"][0])["figures"]["course"][-1][1] = None
    copy.write_bytes(results.read_bytes())
    (tmp_path / "runs.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (container,) = plot_curves(copy, [row["variant"]]).axes[0].containers
    assert math.isnan(container.lines[0].get_ydata()[-1])


def test_the_figures_of_a_study_show_its_losses(root, tmp_path):
    """If a variant has not tried a value, its line continues to the next value."""
    content = json.loads((root / "studies/optimizers/results/llama_0.1m/results.json").read_text())
    del content["trials"][2]
    (tmp_path / "results.json").write_text(json.dumps(content))
    (axes,) = plot_losses(tmp_path / "results.json", "optimizer.matrix.lr").axes
    assert [line.get_label() for line in axes.lines] == list(content["variants"])
    for line in axes.lines:
        points = [
            (float(trial["candidate"][0].partition("=")[2]), trial["loss"])
            for trial in content["trials"]
            if (trial["variant"], trial["stage"]) == (line.get_label(), "rate")
            and trial["share"] == 0.25  # later rungs train only the best
        ]
        assert [*zip(*line.get_data(), strict=True)] == sorted(points)
    (axes,) = plot_study(tmp_path / "results.json").axes
    losses = {row["variant"]: row["losses"] for row in content["rows"]}
    drawn = [line.get_xdata() for line in axes.lines if line.get_alpha() is not None]
    names = [label.get_text().split("  -  ") for label in axes.get_yticklabels()]
    assert len(names) == sum(each["against"] is not None for each in content["variants"].values())
    for (name, other), seeds, container in zip(names, drawn, axes.containers, strict=True):
        line, _, (bars,) = container.lines
        assert seeds == pytest.approx(np.subtract(losses[name], losses[other]))
        assert line.get_xdata() == pytest.approx([mean(seeds)])
        width = 2 * stdev(seeds) / len(seeds) ** 0.5
        assert np.diff(bars.get_segments()[0][:, 0]) == pytest.approx(width)


def test_the_titles_of_a_study_name_what_is_not_drawn_or_not_valid(root, tmp_path):
    content = json.loads((root / "studies/optimizers/results/llama_0.1m/results.json").read_text())
    for trial in content["trials"]:
        if trial["variant"] == "Muon" and trial["candidate"][0].endswith("=0.04"):
            trial["loss"] = None
    rows = {row["variant"]: row["losses"] for row in content["rows"]}
    rows["SSO"][0] = None
    content["not_comparable"] = {"Muon": ["train.sequence_length"]}
    (tmp_path / "results.json").write_text(json.dumps(content))
    figure = plot_losses(tmp_path / "results.json", "optimizer.matrix.lr")
    assert figure.get_suptitle().endswith("\nnot drawn, because runs failed: Muon at 0.04")
    title = plot_study(tmp_path / "results.json").get_suptitle()
    assert "\nnot drawn, because a run failed: SSO, SSO + PC\n" in title
    assert title.endswith("\nnot comparable: Muon")


def test_the_picture_of_the_maps_is_what_the_command_writes(root, tmp_path):
    assert main(["maps", "--output", f"{tmp_path}/drawn.svg"]) == 0
    drawn, committed = (
        re.findall("<text.*>(.*)</text>", path.read_text())
        for path in (tmp_path / "drawn.svg", root / "docs/images/pc_maps.svg")
    )
    assert drawn == committed and drawn


def test_every_polynomial_is_drawn_with_its_target():
    """The polynomial of each level is closer to its own target, drawn in the same colour, than to
    any other."""
    left, right = plot_maps().axes
    dotted, curves = (
        {line.get_color(): line for line in left.lines if line.get_linestyle() == style}
        for style in (":", "-")
    )
    assert len(dotted) == 4 and len(curves) == len(right.lines) == 5
    for i, (color, line) in enumerate(curves.items()):
        inside = np.array(line.get_xdata()) <= 1
        values = np.array(line.get_ydata())[inside]
        away = {c: np.abs(values - each.get_ydata()[inside]).max() for c, each in dotted.items()}
        assert line.get_label().startswith(f"level {i}")
        assert i == 0 or min(away, key=away.get) == color
        x, factor = (np.array(part) for part in right.lines[i].get_data())
        expected = pytest.approx((x * factor)[x > 0.1], abs=1e-3)
        assert np.interp(x[x > 0.1], line.get_xdata(), line.get_ydata()) == expected


def test_an_experiment_states_the_condition_number_of_each_level():
    """The expected values come from singular values from 1 to 0.2, mapped by the polynomials
    printed in the paper."""
    outcome = deep_linear(Draws(0), widths=(6, 8, 4), samples=4, steps=2)
    expected = []
    for coefficients in ((1.0,), *PAPER.values()):
        values = [
            sum(a * x ** (2 * i + 1) for i, a in enumerate(coefficients))
            for x in (np.geomspace(1, 0.2, 6), np.geomspace(1, 0.2, 4))
        ]
        expected.append(max(max(each) / min(each) for each in values))
    assert outcome.data["condition_number"] == pytest.approx(expected, rel=1e-3)
    names = [f"{n} ({k:.1f})" for n, k in zip(LEVELS, expected, strict=True)]
    assert [list(panel.lines) for panel in outcome.panels] == [names] * 2


def test_an_output_that_is_a_folder_is_refused(tmp_path, refusal):
    said = f"output must be a file, got the folder {tmp_path / 'a.png'}"
    (tmp_path / "a.png").mkdir()
    assert said in refusal(main(["maps", "--output", str(tmp_path / "a.png")]))
    with pytest.raises(InputError, match=said):
        write_whole(tmp_path / "a.png", "a page, a report or tasks")
