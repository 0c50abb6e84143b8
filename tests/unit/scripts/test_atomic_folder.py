"""Folders appear whole or not at all, even if processes run concurrently or are killed."""

from pathlib import Path

import pytest

from scripts.data.folder import AtomicFolder
from tests.disk_calls import DiskCalls
from training.errors import InputError


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output folder that already contains prepared data."""
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "file").write_text("old")
    return folder


def new(output: Path) -> AtomicFolder:
    return AtomicFolder(output, lambda: None)


def fill(output: Path, content: str) -> None:
    with new(output) as folder:
        (folder.path / "file").write_text(content)
        folder.commit()


def beside(output: Path) -> list[str]:
    return sorted(path.name for path in output.parent.iterdir())


@pytest.mark.parametrize("place", ["s3://bucket/x", "hf://a/b", "gs:/bucket", "~/x", "$HOME/x"])
def test_a_place_that_is_none_is_refused(place: str) -> None:
    """Neither prepared data nor an export is written to a local folder named `s3:`."""
    with pytest.raises(InputError, match="the output must (be a local path|not start with ~)"):
        new(Path(place))


def test_a_crash_loses_no_file_and_no_name(output, tmp_path, monkeypatch) -> None:
    calls = DiskCalls(tmp_path, monkeypatch)
    with AtomicFolder(output, lambda: None, "key") as folder:
        (folder.path / "file").write_text("new")
        folder.save({"count": 1})
        assert [*calls.lost(folder.state / "progress.json")] == []
        folder.commit()
    assert [*calls.lost(output)] == []


def test_a_second_run_cannot_begin_before_the_first_has_cleaned_up(output) -> None:
    with new(output) as first:
        (first.path / "file").write_text("first")
        first.commit()
        with pytest.raises(InputError, match="another process is writing"):
            new(output).__enter__()
    fill(output, "second")
    assert (output / "file").read_text() == "second" and beside(output) == ["data"]


def test_what_a_killed_run_left_is_removed_and_what_it_replaced_comes_back(output) -> None:
    """The run was killed after it had renamed the old folder, but before it renamed the new
    folder."""
    output.rename(output.with_name("data.replaced"))
    (output.parent / "data.preparing.lock").touch()
    (output.parent / "data.preparing").mkdir()
    (output.parent / "data.preparing" / "file").write_text("half")
    with pytest.raises(KeyError), new(output) as folder:
        assert list(folder.path.iterdir()) == []
        raise KeyError
    assert (output / "file").read_text() == "old" and beside(output) == ["data"]


def test_leftovers_that_are_links_are_removed_alone(output, tmp_path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "data.preparing.lock").touch()
    (tmp_path / "data.preparing").mkdir()
    (tmp_path / "data.preparing" / "link").symlink_to(kept)
    (tmp_path / "data.replaced").symlink_to(kept)
    fill(output, "new")
    assert (output / "file").read_text() == "new" and beside(output) == ["data", "kept"]


def test_a_folder_that_another_run_has_made_meanwhile_is_not_replaced(output) -> None:
    def free() -> None:
        if output.exists():
            raise InputError("exists")

    with pytest.raises(InputError, match="exists"):
        AtomicFolder(output, free).__enter__()
    kept = output.rename(output.with_name("kept"))
    with pytest.raises(InputError, match="exists"), AtomicFolder(output, free) as folder:
        kept.rename(output)
        folder.commit()
    assert (output / "file").read_text() == "old" and beside(output) == ["data"]


@pytest.mark.parametrize("name", ["data.preparing", "data.replaced"])
def test_a_folder_of_somebody_else_is_left_alone(output, name) -> None:
    (output.parent / name).mkdir()
    with pytest.raises(
        InputError, match=f"{name} already exists but was not written by prepare_data.py"
    ):
        new(output).__enter__()
    assert beside(output) == ["data", name]
