"""Checkpoints that are symbolic links are read, and removed without what they point to."""

from pathlib import Path

from tests.run_configs import tiny_config
from training.checkpoint import files as checkpoint
from training.run import train


def test_a_checkpoint_that_is_a_link_is_retired_like_any_other(
    folder: str, tmp_path: Path, world
) -> None:
    keys = {"train__steps": 6, "checkpoint__interval": 1, "checkpoint__keep_last": 2}
    train(tiny_config(folder, "muon", **keys, train__exit_step=2), world)
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpoint.step_folder(run, 2).rename(elsewhere)
    checkpoint.step_folder(run, 2).symlink_to(elsewhere)
    train(tiny_config(folder, "muon", **keys), world)
    assert checkpoint.steps(run) == [5, 6]
    assert checkpoint.read_checkpoint(elsewhere).step == 2


def test_a_link_that_was_being_removed_is_swept(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    folder = tmp_path / "run" / checkpoint.FOLDER
    folder.mkdir(parents=True)
    (folder / ".removing-step_00000002-ab").symlink_to(kept)
    assert checkpoint.sweep(tmp_path / "run") == [".removing-step_00000002-ab"]
    assert kept.is_dir() and not list(folder.iterdir())
