"""The hook that checks commit messages accepts the format described in CONTRIBUTING and rejects
others."""

import re

import pytest
import yaml

from tests.paths import ROOT


def accepts(message: str) -> bool:
    """Return whether the hook accepts a message, like `pygrep --multiline --negate`."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = config["repos"][0]["hooks"]
    (hook,) = (hook for hook in hooks if "commit-msg" in hook.get("stages", ()))
    assert "commit-msg" in config["default_install_hook_types"]
    assert hook["language"] == "pygrep" and hook["args"] == ["--multiline", "--negate"]
    return re.search(hook["entry"], message, re.MULTILINE | re.DOTALL) is not None


@pytest.mark.parametrize(
    "message",
    [
        "data: refuse an empty compressed shard\n\nIt was read as no documents.\n",
        "optim: never read tensor learning rates on the host",
        f"docs: {'a' * 66}\n",
        "checkpoint, docs: name the files\n# Please enter the commit message\n",
        "fixup! data: refuse an empty shard\n",
    ],
)
def test_messages_of_the_form_are_accepted(message: str) -> None:
    assert accepts(message)


@pytest.mark.parametrize(
    "message",
    [
        "",
        "Refuse an empty compressed shard\n",
        "data:refuse an empty shard\n",
        "Data: refuse an empty shard\n",
        "data: refuse an empty shard.\n",
        f"docs: {'a' * 67}\n",
        "data: refuse an empty shard\nbecause it was read as no documents\n",
        "# a comment\ndata: refuse an empty shard\n",
    ],
)
def test_other_messages_are_refused(message: str) -> None:
    assert not accepts(message)
