"""A run with data phases equals a run that is restarted by hand at each change of the mixture."""

import json
import re
import shutil
from collections import Counter

import pytest

from scripts.plots.run_data import read_run
from scripts.plots.run_page import report
from tests.minimal_config import problems
from tests.mixtures import LENGTH, SIZES, Read, expected, windows_of
from tests.run_results import metrics_of, same_state, state_of
from training.checkpoint import checkpoints
from training.checkpoint.stored_checkpoint import ResumeError
from training.config import load_config
from training.dry_run import data_table, phase_uses

FIRST = {"big": 0.6, "middle": 0.4, "small": 0.0}
PHASES = [(8, {"big": 0.2, "middle": 0.3, "small": 0.5}), (15, {"small": 1.0})]
"""The number of steps before each phase, and the phase's weights. The last phase reads a single set
repeatedly."""
BY_HAND = {8: FIRST, 15: PHASES[0][1], 22: PHASES[1][1]}


def phases(*beginnings: str) -> str:
    """Return the value of `data.phases`, with other start keys if given."""
    given = beginnings or tuple(f"after_steps: {step}" for step, _ in PHASES)
    parts = [
        f"{{{beginning}, weights: {{{', '.join(f'{k}: {v}' for k, v in weights.items())}}}}}"
        for beginning, (_, weights) in zip(given, PHASES, strict=True)
    ]
    return f"[{', '.join(parts)}]"


COMMON = {
    "train__steps": 22,
    "train__global_batch": 32,
    "data__phases": phases(),
    "validation__interval": 1,  # as the last step of a start is always validated
    "validation__samples": 2,
}


def logged(folder) -> list[dict[str, float]]:
    """Return the metrics of a run, without the counts that only runs with phases log."""
    return [
        {key: value for key, value in line.items() if not key.startswith("data/")}
        for line in metrics_of(folder)
    ]


def test_the_plan_names_sets_whose_epochs_are_unknown(minimal) -> None:
    table = data_table(load_config(minimal))
    assert "text  100.0%, 25,600  25,600  unknown" in table
    assert table.endswith("\nepochs are unknown without the manifest.json of text")


def test_each_set_goes_on_at_its_count_and_stops_change_nothing(start, tmp_path, capsys) -> None:
    whole = start(22, FIRST, **COMMON)
    printed = capsys.readouterr().out
    said = r"data from step 9 on: big 20.0% \(1,2\d\d tokens read before\), middle 30.0%"
    assert re.search(said, printed) and "data from step 16 on: small 100.0%" in printed
    for name in SIZES:
        windows = windows_of(whole, name)
        assert windows == expected(name, len(windows))
    counts = {name: count * LENGTH for name, count in Counter(n for n, _ in whole).items()}
    epochs = counts["small"] / LENGTH / ((SIZES["small"] - 1) // LENGTH)
    assert epochs > 2 and f"data read more than once: small {epochs:.2f} times" in printed
    folder = shutil.move(tmp_path / "run", tmp_path / "whole")
    stated = json.loads((folder / "data.json").read_text())
    assert {each["name"]: each["tokens"] for each in stated["sets"]} == counts
    last = metrics_of(folder)[-1]
    assert {name: last[f"data/{name}/tokens"] for name in SIZES} == counts
    row = f"<td>small</td><td>0.0%</td><td>50.0%</td><td>100.0%</td><td>{counts['small']:,}"
    assert row in report(read_run(folder))

    stopped: Read = []
    for until in (5, 11, 15, 22):  # in phases of several sets, and where a phase begins
        stopped += start(until, FIRST, **COMMON)
        read = checkpoints.read_checkpoint(tmp_path / "run").meta["progress"]["read"]
        counted = {k: v["samples"] for k, v in read.items() if v["samples"]}
        assert counted == Counter(name for name, _ in stopped)
    assert stopped == whole and metrics_of(tmp_path / "run") == metrics_of(folder)
    assert same_state(state_of(tmp_path / "run", 22), state_of(folder, 22)) == []


@pytest.mark.slow
def test_phases_are_runs_cut_by_hand(start, tmp_path) -> None:
    whole = start(22, FIRST, **COMMON)
    folder = shutil.move(tmp_path / "run", tmp_path / "whole")
    by_hand: Read = []
    keys = {**COMMON, "data__phases": "[]", "checkpoint__allow_change": "[data]"}
    for until, weights in BY_HAND.items():
        by_hand += start(until, {k: v for k, v in weights.items() if v}, **keys)
    assert by_hand == whole and logged(tmp_path / "run") == logged(folder)
    assert same_state(state_of(tmp_path / "run", 22), state_of(folder, 22)) == []


def test_with_a_ramp_and_a_phase_that_begins_with_the_decay(start, tmp_path, capsys) -> None:
    keys = {
        "train__steps": 20,
        "train__batch_ramp": "[{batch: 8, until_steps: 4}, "
        f"{{batch: 16, until_tokens: {112 * LENGTH}}}]",
        "schedule__kind": "wsd",
        "schedule__cooldown_fraction": 0.25,
        "schedule__unit": "tokens",
        "data__phases": phases("after_share: 0.3", "with_decay: true"),
    }
    # The second batch ends after step 9, in the second phase.
    # 4 * 8 + 5 * 16 + 11 * 32 = 464 samples are 14.5 full steps, of which 4 decay: from 336 on.
    beginnings = {6: 4 * 8 + 2 * 16, 16: 4 * 8 + 5 * 16 + 7 * 32}
    whole = start(7, FIRST, **keys) + start(20, FIRST, **keys)
    assert len(whole) == 464
    stated = json.loads((tmp_path / "run" / "data.json").read_text())
    read = Counter(name for name, _ in whole)
    assert {each["name"]: each["samples"] for each in stated["sets"]} == read
    assert stated["tokens"] == 464 * LENGTH
    assert "data from step 17 on: small 100.0%" in capsys.readouterr().out
    assert {name for name, _ in whole[: beginnings[6]]} == {"big", "middle"}
    assert {name for name, _ in whole[beginnings[16] :]} == {"small"}
    rates = {line["step"]: line["lr/matrix"] for line in metrics_of(tmp_path / "run")}
    assert rates[16] == max(rates.values()) > rates[18]
    config = load_config(tmp_path / "run" / "config.yaml")
    uses = phase_uses(config, config.train.steps)
    assert [use.after_steps for use in uses] == [0, *beginnings]
    borders = [0, *beginnings.values(), 464]
    for use, first, end in zip(uses, borders[:-1], borders[1:], strict=True):
        read = Counter(name for name, _ in whole[first:end])
        assert {name: n // LENGTH for name, n in use.tokens(LENGTH).items() if n} == read


@pytest.mark.slow
def test_a_rewind_over_a_beginning_keeps_the_steps_of_the_phases(start, tmp_path, poisoned) -> None:
    """Steps 9 and 10 are not finite. The run rewinds to step 6, phases again start after steps 8
    and 15, and two batches of the second phase are left out."""
    poisoned(8)
    keys = {"train__max_skipped_steps": 1, "spikes__rewinds": 1, "checkpoint__interval": 6}
    read = start(22, FIRST, **{**COMMON, **keys})
    batches = [read[i : i + 32] for i in range(0, len(read), 32)]
    assert len(batches) == 10 + 16
    once = batches[:6] + batches[10:]
    assert once[6:8] == batches[6:8]  # steps 7 and 8, repeated
    names = [{name for name, _ in batch} for batch in once]
    assert names[:8] == [{"big", "middle"}] * 8 and names[15:] == [{"small"}] * 7
    # Samples of the skipped steps count as read, and are not read again.
    whole = sum([*batches[:10], *batches[12:]], [])
    for name in SIZES:
        seen = windows_of(whole, name)
        assert seen == expected(name, len(seen))
    progress = checkpoints.read_checkpoint(tmp_path / "run").meta["progress"]
    assert progress["left_out"] == [[8 * 32, 10 * 32]]
    counts = {name: len(windows_of(whole, name)) for name in SIZES}
    assert {name: each["samples"] for name, each in progress["read"].items()} == counts


@pytest.mark.slow
def test_a_later_phase_may_change_without_an_effect_on_this_one(start, tmp_path) -> None:
    """If the phase is added late in the run, the run equals a run that has the phase from the
    start."""
    whole = start(12, FIRST, **COMMON)
    shutil.rmtree(tmp_path / "run")
    one = {name: weight for name, weight in FIRST.items() if weight}
    read = start(5, one, **COMMON | {"data__phases": "[]"})
    with pytest.raises(ResumeError, match=r"phases\[0\].after_steps was absent and is now 8"):
        start(12, FIRST, **COMMON)
    read += start(12, FIRST, **COMMON, checkpoint__allow_change="[data]")
    assert read == whole


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("[{after_steps: 9, weights: {txt: 1}}]", "must name one of text, got 'txt'; did you mean"),
        ("[{after_steps: 9, weights: {}}]", "phases[0].weights must be"),
        ("[{after_steps: 9, weights: {text: 0}}]", "phases[0].weights.text must be above 0"),
        ("[{weights: {text: 1}}]", "[0].after_steps or after_share or with_decay must be set"),
        (
            "[{after_steps: 9, after_share: 0.5, weights: {text: 1}}]",
            "but only one of these keys, got 2",
        ),
        ("[{with_decay: true, weights: {text: 1}}]", "requires schedule.kind wsd, got cosine"),
        ("[{after_steps: 100, weights: {text: 1}}]", "and before train.steps = 100, got"),
        (
            "[{after_share: 0.001, weights: {text: 1}}]",
            "[0].after_share must start the phase after the previous phase's start (step 0)",
        ),
        ("[{after_share: 1.5, weights: {text: 1}}]", "[0].after_share must be below 1, got 1.5"),
        (
            "[{after_steps: 60, weights: {text: 1}}, {after_share: 0.5, weights: {text: 1}}]",
            "[1].after_share must start the phase after the previous phase's start (step 60)",
        ),
        ("[{after_step: 9, weights: {text: 1}}]", "did you mean data.phases[0].after_steps?"),
    ],
)
def test_phases_that_make_no_sense_are_refused(value: str, text: str, minimal) -> None:
    found = problems(minimal, f"data.phases={value}")
    assert text in found[0] and len(found) == 1


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        (
            {"text": 0, "more": 1},
            "data.train.text.weight must be above 0 here or in a phase, got 0",
        ),
        ({"text": 0, "more": 0}, "data.train must contain a set with a weight above 0"),
    ],
)
def test_a_set_that_no_part_reads_is_refused(weights, text: str, minimal) -> None:
    more = "data.phases=[{after_steps: 9, weights: {more: 1}}]"
    sets = [f"data.train.{name}={{path: data/{name}, weight: {w}}}" for name, w in weights.items()]
    assert any(text in line for line in problems(minimal, *sets, more))
