"""What the ranks of the tests of agreement run."""

import os
from contextlib import redirect_stderr
from io import StringIO

import pretrain


def started(config: str, overrides: list[list[str]]) -> tuple[int, str]:
    """Return the exit code of pretrain.py, with this rank's overrides, and what it printed as
    errors."""
    said = StringIO()
    mine = overrides[int(os.environ["RANK"])]
    with redirect_stderr(said):
        code = pretrain.main(["--config", config, *mine])
    return code, said.getvalue()


def on_own_data(config: str, folder: str) -> tuple[int, str]:
    """Return what `started` does, with the token set under a path that is another on each rank."""
    os.chdir(f"{folder}/{os.environ['RANK']}")
    paths = [f"data.{kind}.walk.path=tokens" for kind in ("train", "validation")]
    return started(config, [paths, paths])


def ended(config: str, overrides: list[list[str]]) -> None:
    """End as pretrain.py does."""
    mine = overrides[int(os.environ["RANK"])]
    raise SystemExit(pretrain.main(["--config", config, *mine]))
