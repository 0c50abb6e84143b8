"""Loading a checkpoint from another person uses no files outside its folder and reads no
environment variables."""

import dataclasses
import hashlib
import io
import pickle
import shutil
from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItemType

import pretrain
from parallel.checkpoint.safe_index import UnsafeIndexError, read_index
from scripts.plots.effective_weights import plot_spectrum
from tests.fuzzed import FLIP, damage
from tests.run_configs import tiny_config
from tests.unit.training.checkpoint.test_checkpoint import forge, reseal
from training.checkpoint import resume
from training.checkpoint.checkpoints import (
    BrokenCheckpointError,
    problems,
    read_checkpoint,
    step_folder,
)
from training.checkpoint.stored_checkpoint import StoredTensors


@pytest.fixture(scope="module")
def saved(shared_folder):
    """A folder with a token set, a config, and a run with a checkpoint at step 1."""
    tiny_config(str(shared_folder), "adamw")
    keys = ["checkpoint.interval=1", "train.exit_step=1", "validation.samples=2"]
    assert pretrain.main(["--config", f"{shared_folder}/config.yaml", *keys]) == 0
    return shared_folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the checkpoint, in a run folder."""
    return step_folder(shutil.copytree(saved / "run", tmp_path / "run"), 1)


SECRET_FACTS = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "state/../../outside", "link"])
def test_a_file_outside_is_refused(name: str, checkpoint) -> None:
    (checkpoint.parent / "outside").write_text("secret")
    (checkpoint / "link").symlink_to(checkpoint.parent / "outside")
    reseal(checkpoint, lambda meta: meta["files"].update({name: SECRET_FACTS}))
    with pytest.raises(BrokenCheckpointError, match="outside the folder"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "name", ["config.yaml", "rng.pt", "state/.metadata", "state/common.pt", ""]
)
def test_what_is_not_listed_is_refused(name: str, checkpoint) -> None:
    """Files that are not listed would not be verified."""
    reseal(checkpoint, lambda meta: meta["files"].pop(name) if name else meta.update(files={}))
    with pytest.raises(BrokenCheckpointError, match=f"does not list {name or 'config.yaml'}"):
        read_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "", "nowhere.distcp", "other.distcp"]
)
def test_an_index_that_names_other_files_is_refused(name: str, checkpoint) -> None:
    (checkpoint.parent / "outside").write_text("secret")
    (checkpoint / "state" / "other.distcp").write_text("not listed")
    index = read_index(checkpoint / "state")
    assert isinstance(index.storage_data, dict)
    entries = index.storage_data.items()
    index.storage_data = {k: dataclasses.replace(e, relative_path=name) for k, e in entries}
    forge(checkpoint, "state/.metadata", pickle.dumps(index))
    info = read_checkpoint(checkpoint)
    found = sorted(problems(info))
    assert [text for text in found if "refers to other.distcp" in text or "not a file in" in text]
    for ranks in (1, 3):
        shares = [slice(rank, None, ranks) for rank in range(ranks)]
        assert sorted(text for share in shares for text in problems(info, share)) == found
    if name != "other.distcp":
        with pytest.raises(UnsafeIndexError, match="is not a file in the same folder"):
            read_index(info.state)
        with pytest.raises(BrokenCheckpointError):
            StoredTensors(info.state)


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_check_each_file_and_tensor_once(ranks: int, monkeypatch) -> None:
    checked: list[int] = []

    def nothing(info: object, share: slice) -> list[str]:
        checked.extend(range(10)[share])
        return []

    monkeypatch.setattr(resume.checkpoints, "problems", nothing)
    monkeypatch.setattr(resume.checkpoints, "not_finite", nothing)
    monkeypatch.setattr(resume, "found_by_any", list)
    for rank in range(ranks):
        place = {"get_rank": lambda r=rank: r, "get_world_size": lambda: ranks}
        monkeypatch.setattr(resume, "dist", SimpleNamespace(**place))
        resume.check_content(None)
    assert sorted(checked) == sorted(2 * [*range(10)])


class ByName(pickle.Pickler):
    """A pickler that pickles enum members as Python 3.11.2 does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


class Call(tuple):
    """An object that is pickled as a call of a function."""

    def __reduce__(self) -> Any:
        return self[0], self[1:]


def test_an_index_of_an_older_python_is_read(checkpoint) -> None:
    index, file = read_index(checkpoint / "state"), io.BytesIO()
    ByName(file, protocol=4).dump(index)
    assert b"getattr" in file.getvalue()
    forge(checkpoint, "state/.metadata", file.getvalue())
    assert read_index(checkpoint / "state") == index
    assert not [*problems(read_checkpoint(checkpoint))]


@pytest.mark.parametrize(
    "call",
    [(getattr, Metadata, "__init__"), (getattr, WriteItemType, "__class__"), (getattr, "", "join")],
    ids=str,
)
def test_an_index_may_ask_for_no_other_attribute(call: Any, checkpoint) -> None:
    (checkpoint / "state" / ".metadata").write_bytes(pickle.dumps(Call(call)))
    with pytest.raises(
        UnsafeIndexError, match="is not trusted: the file refers to the attribute '"
    ):
        read_index(checkpoint / "state")


WRONG_META: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no step": lambda meta: meta.pop("step"),
    "a negative step": lambda meta: meta.update(step=-1),
    "facts with another key": lambda meta: meta["files"]["config.yaml"].update({"inode": 3}),
    "facts that are text": lambda meta: meta["files"].update({"config.yaml": "text"}),
    "progress of another step": lambda meta: meta["progress"].update(step=0),
    "more samples than there are": lambda meta: meta["progress"].update(sample=10**30),
    "windows that are numbers": lambda meta: meta["progress"].update(left_out=[1]),
    "a guard that is text": lambda meta: meta["trainer"].update(guard="text"),
    "no tokenizer": lambda meta: meta["identity"].pop("tokenizer"),
    "a run id that is a number": lambda meta: meta.update(run_id=7),
}


@pytest.mark.parametrize("case", WRONG_META)
def test_wrong_fields_with_right_hashes_are_a_line(case, saved, checkpoint, tmp_path, refusal):
    reseal(checkpoint, WRONG_META[case])
    assert "step_00000001" in refused(saved, tmp_path, refusal)


def refused(saved, tmp_path, refusal) -> str:
    """Return the error message of a run that cannot resume from the checkpoint."""
    keys = [f"run.dir={tmp_path}/run", "checkpoint.interval=1", "train.exit_step=2"]
    said = refusal(pretrain.main(["--config", f"{saved}/config.yaml", *keys]))
    assert said.startswith("error: ")
    return said


GENERATORS = {"python": 1, "numpy": [], "torch": 2, "cuda": 3}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("rng.pt", content) for content in (b"", b"text", [{}], [7], [GENERATORS])),
        *(("state/common.pt", content) for content in (b"", [1], {}, {"schema": 1, "extra": [1]})),
        ("state/common.pt", {"schema": 1, "extra": {}}),
    ],
)
def test_values_of_another_form_are_a_line(name, content, saved, checkpoint, tmp_path, refusal):
    if not isinstance(content, bytes):
        torch.save(content, file := io.BytesIO())
        content = file.getvalue()
    forge(checkpoint, name, content)
    assert "step_00000001" in refused(saved, tmp_path, refusal)


@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_a_tensor_of_an_impossible_size_is_a_line(size, checkpoint):
    index = read_index(checkpoint / "state")
    index.state_dict_metadata["weight/head"].size = torch.Size([size])
    (checkpoint / "state" / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(BrokenCheckpointError, match="state cannot be read"):
        StoredTensors(checkpoint / "state").read(["weight/head"])


def test_a_damaged_checkpoint_is_not_drawn(checkpoint) -> None:
    plot_spectrum(checkpoint)
    path = checkpoint / "state" / "__0_0.distcp"
    damage(path, FLIP)
    with pytest.raises(BrokenCheckpointError, match="__0_0.distcp has changed since"):
        plot_spectrum(checkpoint)


def test_a_file_that_grew_is_refused_before_it_is_read(checkpoint) -> None:
    with (checkpoint / "config.yaml").open("a") as file:
        file.write("\n")
    with pytest.raises(BrokenCheckpointError, match="config.yaml must have .* bytes, got"):
        read_checkpoint(checkpoint)
