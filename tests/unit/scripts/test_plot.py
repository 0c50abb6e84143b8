"""Figures show what runs and checkpoints hold."""

import json

import pytest
import torch

from scripts.plot import main
from scripts.plots.curves import loss
from scripts.plots.maps import plot_maps
from scripts.plots.run_data import read_run
from scripts.plots.spectrum import plot_spectrum
from scripts.plots.study import plot_losses, plot_study
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.build import build_data, build_trainer, config_units
from training.checkpoint.files import read_checkpoint
from training.checkpoint.weights import CheckpointWeights
from training.errors import InputError
from training.run import train


@pytest.fixture
def run(world, tmp_path):
    """The folder and config of a saved run with PC layers."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    config = tiny_config(
        str(tmp_path), "muon", pc__level=4, train__steps=3, checkpoint__interval=3, log__interval=1
    )
    train(config, world)
    return tmp_path / "run", config


def test_effective_weights_are_those_the_model_multiplies_by(run, world):
    folder, config = run
    trainer = build_trainer(config, world, *build_data(config))
    for step in range(3):
        trainer.step(step)
    weights = CheckpointWeights(read_checkpoint(folder))
    covered = [u for u in config_units(config) if config.pc.covers(u)]
    assert len(covered) == 8
    for unit in covered:
        model = unit.view(trainer.model.parameters[unit.parameter]).reshape(unit.shape)
        # The model's is computed in float32.
        torch.testing.assert_close(weights.effective(unit), model, rtol=1e-5, atol=1e-6)


def test_a_spectrum_counts_every_singular_value(run):
    figure = plot_spectrum(run[0], ["o", "q"])
    o, q = figure.axes
    assert [text.get_text() for text in o.get_legend().get_texts()] == ["W", "PC(W)"]
    assert [text.get_text() for text in q.get_legend().get_texts()] == ["W"]
    before, after = (patch.get_path().vertices[:, 1].max() for patch in o.patches)
    assert after > 1.5 * before  # level 4 gathers values at the largest


def test_loss_curves_are_those_logged(run):
    folder = run[0]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    training, validation = loss([read_run(folder)]).axes[0].lines
    assert list(training.get_ydata()) == [line["train/loss"] for line in lines]
    assert list(training.get_xdata()) == [8 * 32, 16 * 32, 24 * 32]
    assert list(validation.get_ydata()) == [lines[-1]["val/walk/loss"]]
    assert list(validation.get_xdata()) == [24 * 32]


def test_maps_go_through_published_values():
    lines = {line.get_label(): line for line in plot_maps().axes[0].lines}
    # g_4 and g_2 at 0.3, of the paper's coefficients.
    for level, value in ((4, 0.8695), (2, 0.5819)):
        x, y = lines[f"level {level}"].get_data()
        nearest = abs(x - 0.3).argmin()
        assert float(y[nearest]) == pytest.approx(value, abs=2e-3)


@pytest.mark.parametrize("suffix", [".svg", ".png", ".pdf"])
def test_the_same_figure_is_the_same_file(tmp_path, suffix):
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        assert main(["maps", "--output", str(path)]) == 0
    assert first.read_bytes() == second.read_bytes()


@pytest.fixture
def results(tmp_path):
    """The results.json of a study of three variants, one of which has failed."""
    stage = {"grid": {"lr": [1.0, 2.0]}, "factors": {}, "choices": []}
    variants = {n: {"against": "a" if n != "a" else None, "search": {"s": stage}} for n in "abc"}
    losses = {"a": [2.0, 3.0], "b": [1.5, 2.0], "c": [1.5, None]}
    trials = [
        {"variant": n, "stage": "s", "share": 1.0, "candidate": [f"lr={lr}"], "loss": lr + 1}
        for n in "abc"
        for lr in (1.0, 2.0)
    ]
    rows = [{"variant": n, "losses": mine} for n, mine in losses.items()]
    content = {"title": "t", "seeds": [1, 2], "rows": rows, "variants": variants, "trials": trials}
    path = tmp_path / "results.json"
    path.write_text(json.dumps(content))
    return path


def test_a_study_has_a_line_per_comparison(results):
    axes = plot_study(results).axes[0]
    assert list(axes.lines[0].get_xdata()) == [-0.5, -1.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["b  -  a"]


def test_a_study_has_a_curve_per_variant(results):
    axes = plot_losses(results, "lr").axes[0]
    assert [line.get_label() for line in axes.lines] == ["a", "b", "c"]
    assert list(axes.lines[0].get_xdata()) == [1.0, 2.0]
    assert list(axes.lines[0].get_ydata()) == [2.0, 3.0]
    with pytest.raises(InputError, match="by must be among the searched lr, got momentum"):
        plot_losses(results, "momentum")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maps", "--output", "x.txt"], "output must end in one of .svg, .png, .pdf, got x.txt"),
        (["maps", "--output", "nowhere/x.svg"], "output must be in a folder that exists"),
        (["nowhere"], "runs must be folders with a metrics.jsonl"),
        (["study", "nowhere", "--output", "x.svg"], "study must be a results.json"),
        (["spectrum", "nowhere", "--output", "x.svg"], "nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, monkeypatch, arguments, message, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_page_has_no_format(run, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(run[0]), "--html", "--format", "png"])
    assert "not allowed with argument --html" in capsys.readouterr().err


def test_a_role_the_model_lacks_is_refused(run, capsys):
    arguments = ["spectrum", str(run[0]), "--roles", "router", "--output", str(run[0] / "x.svg")]
    assert main(arguments) == 2
    assert "roles must be among" in capsys.readouterr().err
