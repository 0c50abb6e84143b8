"""Checkpoints in one process: a resumed run equals a run that never stopped, and damage is
detected."""

import io
import json
import os
import pickle
import random
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from parallel.checkpoint.safe_index import read_index
from parallel.checkpoint.state_writer import file_facts
from parallel.comm import groups as process_groups
from tests.disk_calls import DiskCalls
from tests.fuzzed import FLIP, damage
from tests.run_configs import ROUTED, RULES, tiny_config
from tests.run_results import json_lines, metrics_of, same_state, state_of, tensors_of
from tests.saved_state import reseal
from tests.slow_cases import slow_but
from training.checkpoint import checkpoints
from training.checkpoint.checkpoints import BrokenCheckpointError, read_checkpoint
from training.checkpoint.identity import saved_identity
from training.checkpoint.resume import find_start
from training.checkpoint.saving import rng_state, set_rng_state
from training.checkpoint.stored_checkpoint import ResumeError
from training.errors import InputError
from training.lifecycle.run_folder import locked
from training.loop import Outcome
from training.run import train

SAVED = {"checkpoint__interval": 2, "log__interval": 1, "train__steps": 4, "train__micro_batch": 8}


@pytest.fixture(scope="module", autouse=True)
def tokens(shared_folder) -> str:
    """A folder with a token set."""
    return str(shared_folder)


@pytest.fixture
def run(tokens, world, tmp_path):
    """A function that trains in tmp_path/NAME, by default "run". Keywords are config keys with `__`
    in place of dots. Every step draws a random number, as dropout would."""

    def start(
        rule: str = "adamw", *, name: str = "run", resume: str = "latest", **keys: Any
    ) -> Outcome:
        keys = {"validation__samples": 4, **SAVED, **keys, "run__dir": str(tmp_path / name)}
        config = tiny_config(tokens, rule, **keys)
        torch.manual_seed(0)  # the generators of a new process
        return train(config, world, resume=resume, on_step=lambda step, result: torch.rand(1))

    return start


@pytest.fixture(scope="module")
def whole(tokens) -> Path:
    """A run that takes four steps without stopping."""
    world = process_groups.initialize()
    keys = {"validation__samples": 4, **SAVED, "run__dir": f"{tokens}/whole"}
    train(tiny_config(tokens, "adamw", **keys), world)
    process_groups.shutdown()
    return Path(tokens) / "whole"


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    """The checkpoints of a copy of the run `whole`, which `run` resumes."""
    return Path(shutil.copytree(whole, tmp_path / "run")) / "checkpoints"


@pytest.fixture
def halfway(saved) -> None:
    """Makes the copy `saved` end after step 2."""
    shutil.rmtree(saved / "step_00000004")


FAST = [("spectral_sphere", "experts")]
"""Cases that are not slow. tests/distributed/test_runs.py resumes a run with PC layers on two
ranks."""
CASES = {*FAST, ("adamw", "in_graph"), *product(RULES, (None, "materialized"))}


@pytest.mark.parametrize(("rule", "layers"), slow_but(FAST, sorted(CASES, key=str)))
def test_twice_resumed_is_never_stopped(rule, layers, run, tmp_path):
    """Test plain layers, experts with biases, and PC layers with each evaluator."""
    keys: dict[str, Any] = {"validation__interval": 1}
    if layers == "experts":
        keys |= ROUTED | {"model__moe__global_aux_loss": 0.01, "train__micro_batch": 4}
    elif layers is not None:
        keys["pc"] = {"evaluator": layers, "level": 4 if rule == "adamw" else 2}
    run(rule, name="whole", **keys)
    drawn = torch.rand(3)
    for stop in (1, 3, 4):
        outcome = run(rule, train__exit_step=stop, **keys)
        assert outcome.step == stop
    assert torch.equal(torch.rand(3), drawn)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    for step in (2, 4):
        whole, resumed = (state_of(tmp_path / name, step) for name in ("whole", "run"))
        assert same_state(whole, resumed) == []
        assert any(name.startswith("buffer/") for name in whole) == (layers == "experts")
    assert same_state(state_of(tmp_path / "run", 2), state_of(tmp_path / "run", 4))


def check_kept(run_dir: Path, *kept: int) -> None:
    """Check that the run's folder of checkpoints contains exactly the steps `kept`, and
    `latest`."""
    assert checkpoints.steps(run_dir) == [*kept]
    folder = run_dir / "checkpoints"
    assert (folder / "latest").read_text() == f"step_{kept[-1]:08d}\n"
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["latest", *(f"step_{step:08d}" for step in kept)]


def test_multiples_of_a_number_of_steps_are_kept(run, tmp_path):
    run(checkpoint__interval=1, checkpoint__keep_last=1, checkpoint__keep_every=2)
    check_kept(tmp_path / "run", 2, 4)


def test_only_whole_checkpoints_count_as_kept(saved):
    damage_size(saved / "step_00000004")
    assert checkpoints.retire(saved.parent, keep_last=1, keep_every=None) == []
    assert checkpoints.steps(saved.parent) == [2, 4]


def test_a_resumed_run_counts_on_and_warns_of_new_events_alone(run, saved, halfway):
    earlier = {"unconverged": 5.0, "refused": 3.0}
    reseal(saved / "step_00000002", lambda meta: meta["trainer"]["spectral"].update(earlier))
    run()
    last = metrics_of(saved.parent)[-1]
    assert (last["spectral/unconverged"], last["optim/refused"]) == (5, 3)
    events = json_lines(saved.parent / "events.jsonl")
    assert not any("since the last report" in event["text"] for event in events)


def test_a_broken_newest_checkpoint_is_not_passed_over_in_silence(saved, capsys):
    (saved / "step_00000004" / "meta.json").write_bytes(b"")
    assert read_checkpoint(saved.parent).step == 2
    assert capsys.readouterr().err == (
        f"warning: {saved / 'step_00000004'}: meta.json has changed since it was written; "
        "using step_00000002 instead\n"
    )


def test_resume_from_a_step_puts_later_ones_aside(run, saved, whole, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        calls = DiskCalls(tmp_path, patch)
        assert run(resume="2", train__exit_step=3).step == 3
    assert checkpoints.steps(tmp_path / "run") == [2, 3]
    assert "moved checkpoints of later steps to" in capsys.readouterr().out
    aside = tmp_path / "run" / "checkpoints-left-at-00000002"
    assert sorted(path.name for path in aside.iterdir()) == ["step_00000004"]
    lines = [line.replace("wait ", "sync ") for line in calls.lines()]
    place = lines.index(f"name {saved / 'step_00000004'} {aside / 'step_00000004'}")
    # A crash loses no entry of the changed folders.
    assert {f"sync {folder}" for folder in (aside, aside.parent, saved)} == {
        *lines[place + 1 : place + 4]
    }
    run()
    assert same_state(state_of(tmp_path / "run", 4), state_of(whole, 4)) == []


def test_resume_none_starts_over_and_keeps_what_was(run, saved, tmp_path):
    run(resume="none", train__exit_step=1)
    assert checkpoints.steps(tmp_path / "run") == [1]
    assert len(list((tmp_path / "run" / "checkpoints-aside").glob("step_*"))) == 2
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "data": ({"seed": 8}, "its data: seed was 7 and is now 8"),
    "model": ({"model__rope_base": 5e4}, "its model: rope_base was 10000.0 and is now 50000.0"),
    "optimizer": (
        {"optimizer__matrix__lr": 0.5},
        "its optimizer: matrix.lr was 0.003 and is now 0.5",
    ),
    "schedule": ({"train__steps": 8}, "its schedule: steps was 4 and is now 8"),
    "train": ({"train__z_loss": 1e-4}, "its train: z_loss was 0.0 and is now 0.0001"),
}


# Data also changes in tests/unit/training/test_document_mask.py, every key in test_resume.py.
@pytest.mark.parametrize("kind", slow_but(["optimizer", "train"], CHANGES))
def test_a_changed_run_is_refused_unless_the_change_is_allowed(kind, run, halfway):
    change, said = CHANGES[kind]
    with pytest.raises(ResumeError) as refused:
        run(**change)
    assert said in str(refused.value)
    assert f"checkpoint.allow_change=[{kind}]" in str(refused.value)
    others = [other for other in CHANGES if other != kind]
    with pytest.raises(ResumeError):
        run(**change, checkpoint__allow_change=others)
    assert run(**change, checkpoint__allow_change=[kind], train__exit_step=3).step == 3


def test_another_tokenizer_or_blend_is_refused(run, halfway, tokens, tmp_path):
    with pytest.raises(ResumeError, match="its data: .*walk.share was 1.0 and is now 0.5"):
        run(data__train__more__path=f"{tokens}/tokens")
    now = saved_identity(read_checkpoint(tmp_path / "run"))
    other = {**now, "tokenizer": {"sha256": "another"}}
    with pytest.raises(ResumeError, match="its tokenizer: sha256 was None and is now another"):
        find_start(tmp_path / "run", "latest", other, ())


def test_what_changes_no_result_may_change(run, halfway, whole, tmp_path):
    run(log__interval=2, validation__interval=1)
    assert same_state(state_of(tmp_path / "run", 4), state_of(whole, 4)) == []
    assert run(resume="2", train__micro_batch=2, train__exit_step=3).step == 3


def damage_marker(folder: Path) -> None:
    (folder / "COMPLETE").unlink()


def damage_size(folder: Path) -> None:
    path = folder / "state" / "__0_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def poison(key: str, value: float = torch.nan):
    """Return a function that sets an element of a stored tensor to `value` and updates the
    hashes."""

    def change(folder: Path) -> None:
        stored = read_index(folder / "state").storage_data
        [entry] = [entry for index, entry in stored.items() if index.fqn == key]
        name, end = f"state/{entry.relative_path}", entry.offset + entry.length
        content = (folder / name).read_bytes()
        tensor = torch.load(io.BytesIO(content[entry.offset : end]))
        tensor.view(-1)[-1] = value
        torch.save(tensor, part := io.BytesIO())
        assert len(part.getvalue()) == entry.length
        forge(folder, name, content[: entry.offset] + part.getvalue() + content[end:])

    return change


DAMAGE = {
    "no marker": damage_marker,
    "truncated": damage_size,
    **{
        f"one bit of {name}": lambda folder, name=name: damage(folder / name, FLIP)
        for name in (
            "meta.json",
            "COMPLETE",
            "config.yaml",
            "rng.pt",
            "state/__0_0.distcp",
            "state/.metadata",
            "state/common.pt",
        )
    },
    "a file is missing": lambda folder: (folder / "state" / "common.pt").unlink(),
    **{
        f"{name} is a FIFO": lambda folder, name=name: [
            (folder / name).unlink(),
            os.mkfifo(folder / name),
        ]
        for name in ("meta.json", "COMPLETE", "rng.pt")
    },
    "empty": lambda folder: [shutil.rmtree(folder), folder.mkdir()],
    "a weight is not finite": poison("weight/embedding"),
    "a state is not finite": poison("optimizer/layers.1.q.0/momentum"),
}


QUICK = (
    "no marker", "truncated", "one bit of meta.json", "one bit of state/__0_0.distcp",
    "a file is missing", "meta.json is a FIFO", "empty", "a weight is not finite",
    "a state is not finite",
)  # fmt: skip
"""One case for each kind of damage. The cases for other files are slow."""


@pytest.mark.parametrize("quick", slow_but([True], [True, False]))
def test_a_broken_checkpoint_is_passed_over_for_the_one_before(quick, run, whole, tmp_path, capsys):
    assert set(QUICK) <= DAMAGE.keys()
    now = saved_identity(read_checkpoint(whole))
    folder = tmp_path / "run" / "checkpoints"
    for name, change in DAMAGE.items():
        if (name in QUICK) is not quick:
            continue
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(whole, tmp_path / "run")
        change(folder / "step_00000004")
        capsys.readouterr()
        with locked(tmp_path / "run"):
            found = find_start(tmp_path / "run", "latest", now, ())
            assert (folder / "step_00000004").is_dir()
            found.settle(tmp_path / "run")
        printed = capsys.readouterr().out
        assert found.info is not None and found.info.step == 2, name
        assert printed.count("broken checkpoint: ") == 1, name
        assert f"continuing from {folder / 'step_00000002'}" in printed, name
        assert (folder / "broken-step_00000004").is_dir(), name
    run()
    assert same_state(state_of(tmp_path / "run", 4), state_of(whole, 4)) == []


def test_a_named_step_that_is_broken_and_only_broken_ones_are_refused(run, saved, tmp_path):
    damage_size(saved / "step_00000004")
    with pytest.raises(ResumeError, match="no checkpoint can be loaded"):
        run(resume="4")
    damage_marker(saved / "step_00000002")
    with pytest.raises(ResumeError, match="no checkpoint can be loaded; to start over"):
        run()
    assert checkpoints.steps(tmp_path / "run") == [2, 4]  # left to the user
    assert run(resume="none", train__exit_step=2).step == 2


def test_a_stale_latest_and_leftovers_do_not_matter(run, saved, capsys):
    for name in ("step_٠٠٠٠٠٠٠٦", "step_000000006", "step_6"):
        (saved / name).mkdir()
    for content in ("step_00000002\n", "step_00000099\n", "", "../..\n"):
        (saved / "latest").write_text(content)
        (saved / ".writing-5-abc" / "state").mkdir(parents=True)
        (saved / ".removing-step_00000001-abc").mkdir()
        with pytest.raises(ResumeError):
            run(seed=8)
        assert len(list(saved.glob(".*"))) == 2  # a refused command changes nothing
        assert run().step == 4
        assert not list(saved.glob(".*"))
        assert (saved / "latest").read_text() == "step_00000004\n"
    assert "removed 2 unfinished" in capsys.readouterr().out


def test_a_checkpoint_of_the_same_step_is_set_aside_and_not_removed(tmp_path):
    for text in ("first", "second"):
        folder = checkpoints.new_folder(tmp_path, 4)
        (folder / "config.yaml").write_text(text)
        (folder / "state" / "common.pt").touch()
        checkpoints.complete(folder, tmp_path, {"step": 4}, {})
    folders = tmp_path / "checkpoints"
    found = {path.parent.name: path.read_text() for path in folders.glob("*/config.yaml")}
    assert found == {"step_00000004": "second", "broken-step_00000004": "first"}


class Payload:
    """A pickle payload that would create a folder if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


def forge(folder: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint, and update the hashes."""
    (folder / name).write_bytes(content)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["format"]
    state = {
        path.removeprefix("state/"): file_facts(folder / path)
        for path in meta.pop("files")
        if path.startswith("state/")
    }
    for path in ("meta.json", "COMPLETE"):
        (folder / path).unlink()
    run_dir = folder.parent.parent
    aside = folder.rename(folder.with_name(".writing-forged"))
    checkpoints.complete(aside, run_dir, meta, state)


def test_a_checkpoint_of_a_later_version_is_refused_and_left_alone(run, saved, tmp_path):
    """Unlike a broken checkpoint, such a checkpoint is not skipped in favour of an earlier
    checkpoint."""
    folder = saved / "step_00000004"
    config = (folder / "config.yaml").read_text()
    forge(folder, "config.yaml", (config + "tomorrow: 1\n").encode())
    with pytest.raises(ResumeError, match="config.yaml was written by another .*: unknown key tom"):
        run()
    reseal(folder, lambda meta: meta.update(format=3))
    with pytest.raises(ResumeError, match="step_00000004: format must be 2, got 3"):
        run()
    assert folder.is_dir()
    assert checkpoints.retire(tmp_path / "run", keep_last=1, keep_every=None) == []


@pytest.mark.parametrize(
    "name", ["state/.metadata", "state/common.pt", "rng.pt", "state/__0_0.distcp"]
)
def test_a_pickle_payload_executes_nothing(name, run, saved, tmp_path):
    shutil.rmtree(saved / "step_00000004")
    folder = saved / "step_00000002"
    executed = tmp_path / "executed"
    if name == "state/__0_0.distcp":
        # The file's first entry, like all entries, is torch.save's output for one tensor.
        payload = pickle.dumps(Payload(executed))
        content = payload + (folder / name).read_bytes()[len(payload) :]
    elif name.endswith(".pt"):
        payload = tmp_path / "payload.pt"
        torch.save({"schema": 1, "extra": Payload(executed)}, payload)
        content = payload.read_bytes()
    else:
        content = pickle.dumps(Payload(executed))
    forge(folder, name, content)
    with pytest.raises(InputError, match="step_00000002"):
        run()
    assert not executed.exists()
    if not name.endswith(".pt"):
        with pytest.raises(BrokenCheckpointError):
            tensors_of(read_checkpoint(folder))
    assert not executed.exists()
    # The payload works: an unsafe read executes it.
    if name.endswith(".pt"):
        torch.load(folder / name, weights_only=False)
    else:
        pickle.loads((folder / name).read_bytes())
    assert executed.exists()


def test_every_generator_continues_where_it_was(monkeypatch):
    gpu = torch.Generator()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", gpu.get_state)
    monkeypatch.setattr(torch.cuda, "set_rng_state", gpu.set_state)
    state = rng_state()
    drawn = [random.random(), np.random.random(), torch.rand(3), torch.rand(3, generator=gpu)]
    set_rng_state(state)
    assert random.random() == drawn[0] and np.random.random() == drawn[1]
    assert torch.equal(torch.rand(3), drawn[2])
    assert torch.equal(torch.rand(3, generator=gpu), drawn[3])


def test_the_last_checkpoints_are_kept_and_a_link_is_retired_like_any_other(run, tmp_path):
    keys = {"checkpoint__interval": 1, "checkpoint__keep_last": 2}
    run(**keys, train__exit_step=2)
    second, elsewhere = checkpoints.step_folder(tmp_path / "run", 2), tmp_path / "elsewhere"
    second.rename(elsewhere)
    second.symlink_to(elsewhere)
    run(**keys)
    check_kept(tmp_path / "run", 3, 4)
    assert read_checkpoint(elsewhere).step == 2


def test_a_link_that_was_being_removed_is_swept(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    folder = tmp_path / "run" / checkpoints.FOLDER
    folder.mkdir(parents=True)
    (folder / ".removing-step_00000002-ab").symlink_to(kept)
    assert checkpoints.sweep(tmp_path / "run") == [".removing-step_00000002-ab"]
    assert kept.is_dir() and not list(folder.iterdir())
