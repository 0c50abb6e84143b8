"""Rehearsals load their library from a folder to which no other user can write."""

import os
import tempfile
from pathlib import Path

import pytest

from training.rehearsal.fake_driver import cache


def link(folder: Path) -> None:
    """Make `folder` a link to another folder, which might belong to another user."""
    target = folder.with_name("target")
    target.mkdir(mode=0o700)
    folder.symlink_to(target)


def open_to_all(folder: Path) -> None:
    """Make `folder` writable for everybody."""
    folder.mkdir()
    folder.chmod(0o777)


def of_another(folder: Path) -> None:
    """Make `folder` belong to another user."""
    folder.mkdir(mode=0o700)
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, 12345)


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files, with a user cache that is not writable."""
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.mark.parametrize("prepare", [link, open_to_all, of_another])
def test_a_folder_that_another_could_have_filled_is_not_used(prepare, temporary) -> None:
    foreign = temporary / f"spectrain-{os.getuid()}"
    prepare(foreign)
    found = cache()
    assert found != foreign and found.parent == temporary
    assert found.stat().st_mode & 0o777 == 0o700 and found.stat().st_uid == os.getuid()


def test_a_private_folder_is_used_again(temporary):
    assert cache() == cache() == temporary / f"spectrain-{os.getuid()}"
