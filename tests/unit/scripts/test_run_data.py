"""Figures computed from the logged lines of runs: the time of steps, and the order of runs."""

import itertools
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scripts import plot
from scripts.plots import curves
from scripts.plots.compare import (
    BITS,
    LOSS,
    UNLIKE,
    changed_midway,
    column_values,
    differences,
    find_runs,
    measure,
    rank,
    warn_of_unlike,
)
from scripts.plots.run_data import RunData, alive
from scripts.plots.run_page import SAMPLES, data_use, key_figures, samples
from tests.run_configs import tiny_config
from training.config.data import MEAN
from training.errors import InputError


def run_of(*lines, vocabulary: int = 100) -> RunData:
    """Return a run with these lines in metrics.jsonl."""
    train = {"global_batch": 1, "sequence_length": 8}
    config = {"model": {"vocab_size": vocabulary}, "train": train}
    return RunData(Path("run"), list(lines), [], config, [])


def test_time_is_that_of_steps_not_of_lines() -> None:
    """The intervals between lines with step times vary, and some lines have no time."""
    times = {1: 2.0, 10: 0.5, 12: None, 20: 1.0, 100: 0.25}
    lines = [{"step": i} | ({"perf/step_time_s": s} if s else {}) for i, s in times.items()]
    passed = run_of(*lines).seconds()
    assert [passed(line) for line in lines] == [2, 6.5, 6.5, 16.5, 36.5]
    hours = run_of(*lines).seconds(3600)
    assert hours(lines[-1]) == pytest.approx(36.5 / 3600)


@pytest.mark.parametrize(
    ("seconds", "unit", "shown"),
    [(119, "seconds", 119), (120, "minutes", 2), (7200, "hours", 2), (172_800, "days", 2)],
)
def test_losses_are_drawn_over_the_largest_unit_that_passed_twice(seconds, unit, shown) -> None:
    run = run_of({"step": 1, "train/loss": 3.0, "perf/step_time_s": seconds})
    figure = curves.loss([run_of({"step": 1, "train/loss": 3.0}), run])
    assert figure is not None and figure.axes[1].get_xlabel() == f"training time ({unit})"
    assert figure.axes[1].lines[1].get_xdata() == [shown]


def test_a_row_has_the_settings_that_differ_and_affect_training() -> None:
    """The most informative settings come first. A section that only one run has counts as one
    key."""
    matrix, pc = {"matrix": {"rule": "muon"}}, {"level": 2, "steps": 3}
    configs = [
        {
            "log": {"interval": i},
            "train": {f"t{n}": i for n in range(7)} | {"seed": 0},
            "data": {"mock": i},
            "model": {"layers": i},
            "optimizer": matrix | {"rules": {"muon": {"momentum": i}, "adamw": {"beta1": i}}},
            "pc": pc if i else None,
        }
        for i in (0, 1)
    ]
    plain, other = differences(configs)
    first = ["model.layers 0", "optimizer.rules.muon.momentum 0"]
    assert plain == [*first, *(f"train.t{n} 0" for n in range(6)), "and 2 more"]
    first = ["model.layers 1", "optimizer.rules.muon.momentum 1", "pc.level 2"]
    assert other == [*first, *(f"train.t{n} 1" for n in range(5)), "and 3 more"]


def test_a_run_on_another_host_is_late_after_three_of_its_longest_steps(tmp_path: Path) -> None:
    steps = ({"step": step, "perf/step_time_s": 400.0 / step} for step in (1, 2))
    run = replace(run_of(*steps), folder=tmp_path)
    for age, expected in ((1100, True), (1300, False)):
        (tmp_path / "heartbeat.json").write_text(json.dumps({"time": time.time() - age}))
        assert alive(run) is expected


def test_monitored_steps_have_their_own_tokens() -> None:
    """The tokens of monitored steps are right between logged steps and after the last logged step,
    where a batch ramp has another batch size."""
    monitors = [{"step": step, "tokens": tokens} for step, tokens in ((4, 8), (8, 40), (12, 72))]
    run = replace(run_of({"step": 10, "progress/tokens": 56}), monitors=monitors)
    assert [run.tokens(line) for line in monitors] == [8, 40, 72]
    assert run.tokens({"step": 9}) == 48
    assert run.tokens({"step": 14}) == 72 + 2 * 8  # nothing counts them: full batches


@pytest.mark.parametrize(
    ("bits", "vocabularies", "expected"),
    [
        ((1.0, 1.1), (100, 200), BITS),
        ((1.0, None), (100, 200), LOSS),  # not ranked by a metric that one of them lacks
        ((None, None), (100, 200), LOSS),
        ((1.0, 1.1), (100, 100), LOSS),
    ],
)
def test_runs_are_ordered_by_what_all_have(bits, vocabularies, expected) -> None:
    runs = []
    for value, vocabulary in zip(bits, vocabularies, strict=True):
        line = {"step": 1, "val/loss": 3.0} | ({} if value is None else {"val/bpb": value})
        runs.append(run_of(line, vocabulary=vocabulary))
    assert measure(runs) == expected


def test_a_run_that_has_not_validated_does_not_decide_what_orders_the_others() -> None:
    validated = run_of({"step": 1, "val/loss": 3.0, "val/bpb": 1.0})
    assert measure([validated, run_of({"step": 1}, vocabulary=200)]) == BITS


def test_losses_are_incomparable_because_of_runs_that_have_validated() -> None:
    both = {"val/loss": 2.0, "val/bpb": 1.0}
    for last, expected in ({}, []), (both, ["train.sequence_length", MEAN, "tokenizer"]):
        runs = [run_of({"step": 1} | both), run_of({"step": 1} | last, vocabulary=200)]
        configs = [
            {
                **run.config,
                "optimizer": {},
                "train": {"sequence_length": length},
                "data": {
                    "train": {"a": {"weight": length}, "b": {"weight": 8}},
                    "validation": {"a": {}, "b": {}},
                },
            }
            for run, length in zip(runs, (8, 16), strict=True)
        ]
        texts = [UNLIKE.format(", ".join(expected))] if expected else []
        assert warn_of_unlike(runs, configs, "val/loss")[:1] == texts
        # Bits per byte do not depend on the tokenizer.
        texts = [UNLIKE.format(", ".join(expected[:2]))] if expected else []
        assert warn_of_unlike(runs, configs, "val/bpb") == texts


def test_validated_runs_without_a_recorded_tokenizer_are_named(tmp_path: Path, capsys) -> None:
    both = {"step": 1, "val/loss": 2.0, "val/bpb": 1.0}
    lines = {"new": both, "old": both, "older": both, "not validated": {"step": 1}}
    runs = [replace(run_of(lines[name]), folder=tmp_path / name) for name in lines]
    (tmp_path / "new").mkdir()
    (tmp_path / "new/data.json").write_text(json.dumps({"contents": {"tokenizer": "1" * 64}}))
    configs = [run.config | {"optimizer": {}} for run in runs]
    (text,) = warn_of_unlike(runs, configs, "val/loss")
    assert text.endswith("may not be comparable: old, older.")
    assert capsys.readouterr().err == f"warning: {text}\n"
    # Bits per byte do not depend on the tokenizer, and a single run is compared with no other run.
    assert warn_of_unlike(runs, configs, "val/bpb") == []
    assert warn_of_unlike([runs[1], runs[3]], [configs[1], configs[3]], "val/loss") == []


@pytest.mark.parametrize(
    ("mixtures", "comparable"),
    [
        (({"web": 0.9, "books": 0.1}, {"web": 9.0, "books": 1.0}), True),
        (({"web": 0.9, "books": 0.1}, {"web": 0.1, "books": 0.9}), False),
        (({"web": 0.5, "books": 0.5}, {"web": 1.0, "books": 0.0}), True),  # equal weights in both
        (({"web": 0.9, "books": 0.1}, {"web": 1.0}), False),
    ],
)
def test_means_over_sets_with_different_weights_are_not_comparable(
    mixtures, comparable, tmp_path, capsys
) -> None:
    """The warning is printed for overlaid figures, too."""
    line = {"step": 1, "train/loss": 3.0, "val/loss": 3.0, "val/bpb": 1.0}
    folders = []
    for name, mixture in zip("ab", mixtures, strict=True):
        run = tiny_config(str(tmp_path), run__dir=str(tmp_path / name))
        paths = {"path": f"{tmp_path}/tokens"}
        sets = {"train": {k: paths | {"weight": v} for k, v in mixture.items()}}
        content = asdict(run) | {"data": sets | {"validation": {"web": paths, "books": paths}}}
        folders.append(str(tmp_path / name))
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps(content))
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    for command in ([*folders, "--output", str(tmp_path / "figures")], ["compare", str(tmp_path)]):
        assert plot.main(command) == 0
        said = "differ in weights of the validation sets in the mean" in capsys.readouterr().err
        assert said is not comparable


def test_settings_that_changed_midway_are_listed_unless_the_change_was_undone() -> None:
    def resumed(step: int, *keys: str) -> list[dict[str, object]]:
        texts = [f"changed since step {step}: {key} was 1 and is now 2" for key in keys]
        changed = [{"step": step, "kind": "changed", "text": text} for text in texts]
        return [{"step": step, "kind": "continued", "text": ""}, *changed]

    starts = [resumed(4, "matrix.lr", "commit"), resumed(8, "steps"), resumed(8), resumed(9)]
    run = replace(run_of(), events=[*itertools.chain.from_iterable(starts)])
    assert changed_midway(run) == ["changed midway: matrix.lr"]
    assert changed_midway(run_of()) == []


def test_a_loss_that_was_not_finite_is_a_gap_in_its_line() -> None:
    losses = [3.0, None, 2.0]
    run = run_of(*({"step": i, "train/loss": loss} for i, loss in enumerate(losses, 1)))
    figure = curves.loss([run])
    assert figure is not None
    drawn = figure.axes[0].lines[0].get_ydata()
    assert [*drawn] == pytest.approx([3.0, math.nan, 2.0], nan_ok=True)


def test_every_card_of_a_run_is_its_figure() -> None:
    """The last validation is not the best, and medians, sums and last values differ."""
    lines = [
        {"step": 10, "train/loss": 5.0, "val/loss": 4.0, "perf/tokens_per_sec": 1e3},
        {"step": 20, "train/loss": 3.0, "val/loss": 2.0, "perf/tokens_per_sec": 4e3},
        {"step": 40, "train/loss": 3.5, "val/loss": 2.5, "perf/tokens_per_sec": 5e3},
    ]
    for line, seconds in zip(lines, (1.0, 2.0, 4.0), strict=True):
        line |= {"progress/tokens": 100 * line["step"], "perf/step_time_s": seconds}
        line |= {"perf/mfu": 40 + seconds, "moe/max_vio": seconds / 8}
        line["optim/skipped_steps"] = seconds
    assert dict(key_figures(run_of(*lines))) == {
        "training loss": "3.5000",
        "validation loss": "2.5000",
        "best validation": "2.0000",
        "tokens": "4k",
        "tokens / second": "4k",
        "training time": "0:01:50",
        "MFU": "44.0",
        "MaxVio": "0.50",
        "skipped steps": "4",
    }


@pytest.mark.parametrize("order", [LOSS, BITS], ids=["nats", "bits"])
def test_the_columns_of_a_run_are_of_what_orders_the_runs(order) -> None:
    values = {"val/loss": (3.0, 2.0, 2.5), "val/bpb": (1.5, 0.5, 1.0)}
    lines = ({"step": i + 1} | {name: each[i] for name, each in values.items()} for i in range(3))
    figures = column_values(run_of(*lines), *order)
    last, best = (f"{values[order[0]][i]:.4f}" for i in (2, 1))
    assert (figures[order[1]], figures["best validation"]) == (last, best)
    assert figures["training loss"] == "-"


@pytest.mark.parametrize("count", [1, SAMPLES, SAMPLES + 1, 5 * SAMPLES])
def test_texts_of_a_page_are_the_first_the_last_and_evenly_spaced_ones(count) -> None:
    lines = [
        {"step": 1000 * i}
        | {f"sample/{name}/{part}": f"{name} {part} {i}" for name in "ab" for part in kinds}
        for i, kinds in enumerate([("prompt", "text")] * count, start=1)
    ]
    rows = samples(run_of({"step": 1}, *lines, {"step": 10**6, "val/loss": 1.0}))
    for name in "ab":
        own = [row for row in rows if row[1] == name]
        steps = [int(step.replace(",", "")) // 1000 for step, *_ in own]
        assert len(steps) == min(count, SAMPLES) and (steps[0], steps[-1]) == (1, count)
        gaps = [after - before for before, after in itertools.pairwise(steps)]
        assert not gaps or 0 < max(gaps) <= min(gaps) + 1
        texts = [(f"{name} prompt {i}", f"{name} text {i}") for i in steps]
        assert [row[2:] for row in own] == texts


def test_runs_are_ordered_by_their_last_validation_then_by_their_training_loss() -> None:
    runs = {
        name: run_of(*({"step": i} | line for i, line in enumerate(lines, 1)))
        for name, lines in {
            "untouched": [],
            "not validated": [{"train/loss": 9.0}, {"train/loss": 0.5}],
            "rises": [{"val/loss": 1.0}, {"val/loss": 2.5, "train/loss": 1.0}],
            "falls": [{"val/loss": 3.0}, {"val/loss": 2.0, "train/loss": 2.0}],
            "diverges": [{"val/loss": 1.5}, {"val/loss": None}],
        }.items()
    }
    order = sorted(runs, key=lambda name: rank(runs[name], LOSS[0]))
    assert order == ["falls", "rises", "not validated", "diverges", "untouched"]
    cards = dict(key_figures(runs["diverges"]))
    assert (cards["validation loss"], cards["best validation"]) == ("not finite", "1.5000")
    earlier = run_of({"step": 1000, "val/loss": 2.0}, {"step": 1100, "train/loss": 1.0})
    assert dict(key_figures(earlier))["validation loss"] == "2.0000 at step 1,000"


def test_a_run_without_its_config_or_metrics_is_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").touch()
    with pytest.raises(InputError, match="contains no run folder"):
        find_runs(tmp_path, tmp_path)
    assert f"left out {tmp_path}/run, which has no config.yaml" in capsys.readouterr().err
    (tmp_path / "run/metrics.jsonl").rename(tmp_path / "run/config.yaml")
    (tmp_path / "run/checkpoints").mkdir()
    with pytest.raises(InputError, match="contains no run folder"):
        find_runs(tmp_path, tmp_path)
    assert f"left out {tmp_path}/run, which has no metrics.jsonl" in capsys.readouterr().err


def test_the_table_of_sets_is_the_use_of_each(tmp_path: Path) -> None:
    sets = [{"name": "web", "tokens": 9_000, "epochs": 0.25}]
    sets += [{"name": "books", "tokens": 4_000, "epochs": 2.5}]
    phases = [{"after_steps": 0, "shares": {"web": 1.0}}]
    phases += [{"after_steps": 30, "shares": {"web": 0.25, "books": 0.75}}]
    (tmp_path / "data.json").write_text(json.dumps({"sets": sets, "phases": phases}))
    counted = {"step": 40, "data/web/tokens": 5_000, "data/books/tokens": 1_000}
    earlier = {"step": 20, "data/web/tokens": 3_000}
    run = replace(run_of(earlier, counted, {"step": 41, "val/loss": 1.0}), folder=tmp_path)
    assert data_use(run) == {
        "header": ["set", "from step 1", "from step 31", "tokens read", "total tokens", "epochs"],
        "rows": [
            ["web", "100.0%", "25.0%", "5,000", "9,000", "0.25"],
            ["books", "0.0%", "75.0%", "1,000", "4,000", "2.50"],
        ],
    }
