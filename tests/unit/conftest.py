"""Fixtures of the unit tests."""

from pathlib import Path

import pytest

from tests.minimal_config import MINIMAL


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    """The shortest run config, in a file."""
    path = tmp_path / "minimal.yaml"
    path.write_text(MINIMAL)
    return path
