"""Figures of runs and the page about a run show what the run logged, without a network."""

import json
import re
import shutil
import socket
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from parallel.comm import groups as process_groups
from parallel.comm.collectives import CollectiveError
from scripts.plot import main
from scripts.plots import blocks, curves, spectra
from scripts.plots.compare import comparison, find_runs
from scripts.plots.figures import FIGURES
from scripts.plots.report import happenings, report
from scripts.plots.run_data import read_run
from scripts.plots.run_status import run_status
from tests.browser import BROWSER, show
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.run import train
from training.run_log import write_failure

ROLES = ["q", "k", "v", "o", "gate", "up", "down"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run with PC layers, monitors and a penalty, stopped and continued, one without, and one
    that fails."""
    folder = tmp_path_factory.mktemp("runs")
    write_token_set(folder / "tokens", tokens=8_000, vocab=120, seed=0)
    world = process_groups.initialize()
    common = {"train__steps": 6, "log__interval": 1}
    own = {
        "run__dir": f"{folder}/pc",
        "run__name": "a <b>",
        "pc__level": 4,
        "gram_penalty__horizon": 1.0,
        "monitors__interval": 2,
        "monitors__groups": "[weights,gradients,updates,noise,activations,attention]",
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


def lines(path: Path) -> list[dict]:
    """The objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_curves_are_what_was_logged(folder):
    run = read_run(folder / "pc")
    logged = lines(folder / "pc" / "metrics.jsonl")
    tokens, time = curves.loss([run]).axes
    losses = [line["train/loss"] for line in logged]
    assert list(tokens.lines[0].get_ydata()) == losses
    assert list(tokens.lines[0].get_xdata()) == [256 * (i + 1) for i in range(6)]
    seconds = sum(line["perf/step_time_s"] for line in logged)
    assert time.lines[0].get_xdata()[-1] == pytest.approx(seconds)
    assert time.get_xlabel() == "seconds of training steps"
    drawn = {line.get_label(): line for line in curves.condition_numbers([run]).axes[0].lines}
    means = [m["monitor/effective_condition_number/o"] for m in logged if m["step"] % 2 == 0]
    assert list(drawn["o, PC(W)"].get_ydata()) == means


def test_a_failure_is_on_the_page_with_its_rank_and_host(folder, tmp_path):
    run = tmp_path / "failed"
    shutil.copytree(folder / "pc", run)
    (run / "DONE").unlink()
    absent = {2: "n2"}
    write_failure(str(run), 6, 1, CollectiveError("all-reduce failed; no answer", absent))
    page = report(read_run(run))
    assert '<span class="state failed">failed, step 6 of 6</span>' in page
    host = socket.gethostname()
    row = f"<td>CollectiveError on rank 1 (host {host}): all-reduce failed; no answer</td>"
    assert f'<tr class="alarm"><td>6</td><td>failed</td>{row}' in page
    assert "state failed" not in report(read_run(folder / "pc"))


def test_spectra_are_those_of_the_monitors(folder):
    run = read_run(folder / "pc")
    last = lines(folder / "pc" / "monitors.jsonl")[-1]["units"].values()
    rows = [u["effective_quantiles"] for u in last if u["role"] == "up"]
    wanted = [sum(row[i] for row in rows) / len(rows) for i in range(11)]
    axis = spectra.quantiles([run]).axes[ROLES.index("up")]
    assert axis.get_title() == "up"
    assert list(axis.lines[0].get_ydata()) == pytest.approx(wanted)
    # Every singular value is counted once.
    bars = spectra.histograms([run]).axes[ROLES.index("up")].patches[0].get_data()
    assert sum(bars.values) == pytest.approx(1.0)
    table = spectra.unit_map(run, "spectral_norm", "norm").axes[0].images[0].get_array()
    gate = [u["spectral_norm"] for u in last if u["role"] == "gate"]
    assert list(table[:, ROLES.index("gate")]) == pytest.approx(gate)


def test_the_criterion_map_has_layers_and_roles(folder, tmp_path):
    copy = tmp_path / "criterion"
    shutil.copytree(folder / "pc", copy)
    kept = lines(copy / "monitors.jsonl")
    for i, unit in enumerate(kept[-1]["units"].values()):
        unit["criterion_ratio"] = 0.5 + i
    (copy / "monitors.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    axis = spectra.criterion_map(read_run(copy)).axes[0]
    assert [tick.get_text() for tick in axis.get_xticklabels()] == ROLES
    assert axis.images[0].get_array().shape == (2, len(ROLES))
    assert "Spectral or elementwise?" in report(read_run(copy))


def test_blocks_and_signals_are_those_of_the_monitors(folder):
    run = read_run(folder / "pc")
    seen = lines(folder / "pc" / "monitors.jsonl")
    assert run.roles() == ROLES
    depth, time = blocks.residual(run).axes[:2]
    last = seen[-1]["blocks"]
    streams = [last[place]["residual_rms"] for place in ("embedding", "0", "1")]
    assert list(depth.lines[-1].get_ydata()) == streams
    assert [line.get_ydata()[-1] for line in time.lines] == streams
    assert list(time.lines[0].get_xdata()) == [512, 1024, 1536]
    logits = [
        max(block.get("max_attention_logit", 0.0) for block in line["blocks"].values())
        for line in seen
    ]
    *_, largest = blocks.attention_logits([run]).axes[0].lines
    assert list(largest.get_ydata()) == logits
    panels = {axis.get_title(): axis for axis in curves.signal(run).axes}
    shares = [u["gradient_top_share"] for u in seen[-1]["units"].values() if u["role"] == "gate"]
    axis = panels["TopShare, of gradients"]
    drawn = {line.get_label(): line for line in axis.lines}
    assert drawn["gate"].get_ydata()[-1] == pytest.approx(sum(shares) / 2)
    assert list(axis.lines[-1].get_ydata()) == [0.5, 0.5]  # the least of three samples
    assert len(panels) == 6


def test_what_happened_is_told_in_order(folder):
    told = [(each.step, each.kind) for each in happenings(read_run(folder / "pc"))]
    assert told == [
        ("0", "started"), ("0", "device"), ("0", "loss"), ("0", "compile"), ("1", "penalty"),
        ("3", "done"), ("3", "continued"), ("3", "device"), ("3", "loss"), ("3", "compile"),
        ("6", "done"),
    ]  # fmt: skip


class Page(HTMLParser):
    """The ids of a page, and what it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.fetched: list[str] = []
        self.svgs = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = {key: value or "" for key, value in attributes}
        self.svgs += tag == "svg"
        if "id" in found:
            self.ids.append(found["id"])
        for key in ("src", "href", "xlink:href", "srcset", "data"):
            if key in found and not found[key].startswith(("#", "data:")):
                self.fetched.append(found[key])
        if tag in ("script", "iframe", "object", "embed"):
            self.fetched.append(tag)


def test_the_page_holds_everything_it_shows(folder):
    assert main([str(folder / "pc"), "--html"]) == 0
    text = (folder / "pc" / "report.html").read_text()
    page = Page(text)
    assert page.fetched == [] and "@import" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert len(page.ids) == len(set(page.ids))
    keys = {figure.name for figure in FIGURES}
    assert keys - set(page.ids) == {"maxvio"}  # the model has no experts
    assert page.svgs == 2 * (len(keys) - 1)  # for wide pages and for phones
    assert {"events", "config"} <= set(page.ids)
    assert "a &lt;b&gt;" in text and "a <b>" not in text
    last = lines(folder / "pc" / "metrics.jsonl")[-1]
    assert f"<b>{last['train/loss']:.4f}</b>" in text and f"<b>{last['val/loss']:.4f}</b>" in text


def test_a_run_without_monitors_has_a_page_as_well(folder):
    page = Page(report(read_run(folder / "plain")))
    assert page.svgs == 2 * 3 and "evolution" not in page.ids


def test_several_runs_are_overlaid(folder, tmp_path):
    arguments = [str(folder / "pc"), str(folder / "plain"), "--output", str(tmp_path / "out")]
    assert main([*arguments, "--format", "png"]) == 0
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"loss.png", "learning_rates.png", "spectra.png", "evolution_pc.png"} <= written
    runs = [read_run(folder / name) for name in ("pc", "plain")]
    labels = [text.get_text() for text in curves.loss(runs).axes[0].get_legend().get_texts()]
    assert labels == ["pc", "plain"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "runs must be folders with a metrics.jsonl, got nowhere"),
        (["{0}/pc", "{0}/pc"], "runs must have folders of different names, got pc, pc"),
    ],
)
def test_what_is_no_run_is_refused(folder, arguments, message, capsys):
    assert main([each.format(folder) for each in arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def pages(folder):
    """The pages of the runs, by name, and the page about all of them."""
    assert main(["compare", str(folder)]) == 0
    return {
        "run": report(read_run(folder / "pc")),
        "failed": report(read_run(folder / "deep" / "failed")),
        "runs": (folder / "compare.html").read_text(),
    }


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["run", "runs"])
def test_a_page_is_readable_in_a_browser(pages, name, width, tmp_path):
    picture = tmp_path / f"{name}_{width}.png"
    shown = show(pages[name], width, tmp_path, picture)
    assert shown.wide == [] and shown.width == width  # nothing is scrolled to sideways
    assert len(shown.texts) > 50
    assert min(shown.texts)[0] >= 11, min(shown.texts)
    with Image.open(picture) as image:
        assert image.width == width
        colors = image.convert("RGB").getcolors(2**26)
    assert colors is not None and len(colors) > 200  # text and curves, not an empty page


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
    # Without its last event it still runs, as this process, which its lock names, does.
    running = copied("deep/failed")
    cut = (running / "events.jsonl").read_text().splitlines(keepends=True)[:-1]
    (running / "events.jsonl").write_text("".join(cut))
    assert run_status(read_run(running)).text == "running, step 1 of 6"
    gone = subprocess.Popen(["true"])
    gone.wait()
    lock = json.loads((running / "lock").read_text())
    (running / "lock").write_text(json.dumps(lock | {"pid": gone.pid}))
    assert run_status(read_run(running)).reason == "The run ended without a word."
    # Of another host only the heartbeat is known.
    (running / "lock").write_text(json.dumps({"host": "elsewhere", "pid": 1}))
    for age, kind in ((10, "running"), (1000, "failed")):
        (running / "heartbeat.json").write_text(json.dumps({"time": time.time() - age}))
        assert run_status(read_run(running)).kind == kind


@pytest.mark.slow
def test_a_failure_is_on_the_page(pages):
    text = pages["failed"]
    assert "Why it failed" in text and "the disk is full" in text
    assert '<span class="state failed">failed, step 2 of 6</span>' in text
    assert "Why deep/failed failed" in pages["runs"]


@pytest.mark.slow
def test_runs_are_compared_by_validation_loss(folder, pages):
    rows = re.findall(r"<td data-label=\"run\"><div><b>(.*?)</b>(.*?)</div>", pages["runs"])
    ends = {
        name: lines(folder / name / "metrics.jsonl")[-1]["val/loss"] for name in ("pc", "plain")
    }
    assert [name for name, _ in rows] == [*sorted(ends, key=ends.get), "deep/failed"]
    said = dict(rows)
    assert "optimizer.matrix.rule muon" in said["plain"]
    assert "pc.level 4" in said["pc"] and "pc.steps" not in said["pc"]
    assert "run.dir" not in pages["runs"] and "seed" not in said["pc"]
    page = Page(pages["runs"])
    assert {"runs", "loss", "gradient_norm", "quantiles"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)) and page.fetched == []


@pytest.mark.slow
def test_runs_of_two_vocabularies_are_compared_by_bits_per_byte(folder, tmp_path):
    for name, vocabulary, loss, bits in (("a", 100, 4.0, 2.1), ("b", 200, 4.5, 1.9)):
        shutil.copytree(folder / "plain", tmp_path / name)
        kept = lines(tmp_path / name / "metrics.jsonl")
        kept[-1] |= {"val/loss": loss, "val/bpb": bits}
        text = "".join(json.dumps(line) + "\n" for line in kept)
        (tmp_path / name / "metrics.jsonl").write_text(text)
        config = (tmp_path / name / "config.yaml").read_text()
        config = re.sub(r"vocab_size: \d+", f"vocab_size: {vocabulary}", config)
        config = re.sub(r"path: \S+", f"path: {name}/tokens", config)
        config = config.replace("momentum: 0.95", f"momentum: 0.9{len(name) + vocabulary // 200}")
        (tmp_path / name / "config.yaml").write_text(config)
    text = comparison("two", find_runs(tmp_path))
    rows = re.findall(r"<td data-label=\"run\"><div><b>(.*?)</b>(.*?)</div>", text)
    assert [name for name, _ in rows] == ["b", "a"]
    assert "By bits per byte;" in text and "<div>1.9000</div>" in text
    assert "model.vocab_size 200" in rows[0][1] and ".path" not in rows[0][1]
    assert "optimizer.rules.muon.momentum" in rows[0][1]
    assert "spectral_sphere" not in rows[0][1]  # a rule that no matrix has


@pytest.mark.slow
def test_samples_are_on_the_page(folder, tmp_path):
    copy = tmp_path / "samples"
    shutil.copytree(folder / "pc", copy)
    kept = lines(copy / "metrics.jsonl")
    for i, line in enumerate(kept):
        line |= {"sample/a/prompt": "In the", "sample/a/text": f" <b>ginning {i}\n"}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    text = report(read_run(copy))
    assert "Samples of text" in text and "<i>In the</i> &lt;b&gt;ginning 5\n</td>" in text
    assert "Samples of text" not in report(read_run(folder / "pc"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "nowhere"], "there is no folder nowhere"),
        (["compare", "{0}/plain/empty"], "has no run: none of its folders has a metrics.jsonl"),
        (["compare", "{0}", "--output", "page.svg"], "output must end in .html, got page.svg"),
        (["{0}/pc", "{0}/plain/empty"], "runs must be folders with a metrics.jsonl, got"),
    ],
)
def test_what_cannot_be_compared_is_refused(folder, arguments, message, capsys):
    (folder / "plain" / "empty").mkdir(exist_ok=True)
    assert main([each.format(folder) for each in arguments]) == 2
    assert message in capsys.readouterr().err
