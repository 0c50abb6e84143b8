"""When the mixture changes during a run, each set continues from its own count."""

import json
import shutil
from collections import Counter
from itertools import islice

import pytest

from tests.mixtures import LENGTH, SIZES, expected, windows_of
from tests.token_files import write_token_set
from tests.unit.training.checkpoint.test_checkpoint import reseal
from tests.unit.training.data.conftest import sampler
from tests.unit.training.data.test_data import training_data
from training.checkpoint import checkpoints
from training.checkpoint.stored_checkpoint import ResumeError
from training.data.batches import training_loader
from training.data.order import Phase
from training.report.log_lines import read_metrics

FIRST = {"big": 0.6, "middle": 0.3, "small": 0.1}
THEN = {"big": 0.1, "middle": 0.9, "small": 0.1}


def test_each_set_goes_on_at_its_own_count(start, tmp_path, capsys) -> None:
    """Test two changes, the second of which removes a set, and a stop within each phase."""
    change = {"checkpoint__allow_change": "[data]"}
    read = start(5, FIRST) + start(8, FIRST)
    read += start(12, THEN, **change)
    assert "new mixture from sample 256 on; tokens read so far: " in capsys.readouterr().out
    read += start(16, THEN, **change)
    without = {"big": 1.0, "small": 3.0}
    read += start(20, without, **change) + start(22, without)
    assert len(read) == 22 * 32
    for name in SIZES:
        windows = windows_of(read, name)
        assert windows == expected(name, len(windows))
    stated = json.loads((tmp_path / "run" / "data.json").read_text())
    read += start(30, without)
    counts = Counter(name for name, _ in read)
    told = {each["name"]: each for each in stated["sets"]}
    assert told.keys() == without.keys()
    for name, each in told.items():
        assert each["samples"] == counts[name]
        windows = (SIZES[name] - 1) // LENGTH
        assert each["tokens"] == counts[name] * LENGTH
        assert each["epochs"] == pytest.approx(counts[name] / windows)
    assert stated["earlier"] == {"middle": counts["middle"] * LENGTH}
    assert stated["tokens"] == 30 * 32 * LENGTH


def test_the_log_states_that_a_renamed_set_is_read_again(start, tmp_path, capsys) -> None:
    start(1, FIRST)
    change = {"checkpoint__allow_change": "[data]"}
    renamed = {"big": 0.6, "moved": 0.3, "small": 0.1}
    start(2, renamed, data__train__moved__path=tmp_path / "middle", **change)
    notes = [line for line in capsys.readouterr().out.splitlines() if "same content" in line]
    assert notes == ["data: moved has the same content as middle, so its windows are read again"]


def test_a_stop_after_a_change_is_as_if_the_run_had_not_stopped(start, tmp_path) -> None:
    change = {"checkpoint__allow_change": "[data]"}
    start(6, FIRST)
    other = shutil.copytree(tmp_path / "run", tmp_path / "whole")
    whole = start(14, THEN, **change, run__dir=other)
    cut = start(9, THEN, **change) + start(14, THEN)
    assert cut == whole and losses(tmp_path / "run") == losses(other)


def losses(folder) -> dict[int, float]:
    """Return the logged losses, keyed by step."""
    return {line["step"]: line["train/loss"] for line in read_metrics(folder)}


def test_other_content_begins_at_its_start_and_another_length_keeps_tokens(start, tmp_path) -> None:
    change = {"checkpoint__allow_change": "[data]"}
    start(8, FIRST)
    write_token_set(tmp_path / "small", tokens=1_000, vocab=120, seed=17)
    read = start(12, FIRST, **change)
    for name, before in (("small", 0), ("big", 153)):
        windows = windows_of(read, name)
        assert windows == expected(name, before + len(windows))[before:]
    state = checkpoints.read_checkpoint(tmp_path / "run").meta["progress"]
    tokens = {name: each["tokens"] for name, each in state["read"].items()}
    start(14, FIRST, **change, train__sequence_length=2 * LENGTH)
    phase = checkpoints.read_checkpoint(tmp_path / "run").meta["progress"]["phase"]
    assert phase["sample"] == 12 * 32
    assert {name: each["tokens"] for name, each in phase["read"].items()} == tokens


def test_windows_of_another_length_begin_after_as_many_tokens(prefixes) -> None:
    """The windows of each set follow the order of windows of the new length, also across epochs."""
    read = training_data(prefixes, length=8).read(100)
    longer = training_data(prefixes, length=16)
    alone = [longer.source(sample) for sample in range(400)]
    after = longer.since(Phase(sample=100, read=read))
    following = [after.source(sample) for sample in range(100, 200)]
    for i, token_set in enumerate(longer.sets):
        order, found = ([w for chosen, w in each if chosen == i] for each in (alone, following))
        begun = read[token_set.name].tokens // 16
        assert found == order[begun:][: len(found)], token_set.name
    for use in after.describe(after.read(200)):
        assert use.epochs == pytest.approx(use.tokens / 16 / use.windows)


def test_a_checkpoint_without_counts_goes_on_alone_with_its_own_mixture(start, tmp_path) -> None:
    read = start(4, FIRST)
    path = checkpoints.read_checkpoint(tmp_path / "run").path
    for key in ("read", "phase"):  # as in a checkpoint of a version without counts
        reseal(path, lambda meta, key=key: meta["progress"].pop(key))
    with pytest.raises(ResumeError, match="does not record how much of each token set was read"):
        start(6, THEN, checkpoint__allow_change="[data]")
    read += start(6, FIRST)
    read += start(8, THEN, checkpoint__allow_change="[data]")
    for name in SIZES:
        windows = windows_of(read, name)
        assert windows == expected(name, len(windows))


@pytest.mark.parametrize("data_size", [1, 2])
def test_ranks_and_workers_read_on_together(prefixes, data_size: int) -> None:
    before = training_data(prefixes)
    phase = Phase(sample=40, read=before.read(40))
    data = training_data(prefixes).since(phase)
    batches = []
    for rank in range(data_size):
        order = sampler(consumed=40, data_rank=rank, data_size=data_size)
        loader = training_loader(data, order, workers=1)
        batches.append(list(islice(loader, 3 * 4 // data_size)))
    per_step = 4 // data_size
    steps = [slice(step * per_step, (step + 1) * per_step) for step in range(3)]
    rows = [row for step in steps for rank in batches for batch in rank[step] for row in batch]
    rows = [row.tolist() for row in rows]
    assert rows == [data[k].tolist() for k in range(40, 64)]
    counts = {name: each.samples for name, each in data.read(64).items()}
    assert sum(counts.values()) == 64
