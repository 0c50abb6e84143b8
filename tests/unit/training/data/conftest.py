"""Fixtures of the tests of data."""

from pathlib import Path

import numpy as np
import pytest

from tests.token_files import write_stream

SIZES = {"a": 1000, "b": 401, "c": 57}  # tokens


@pytest.fixture
def prefixes(tmp_path: Path) -> dict[str, Path]:
    """Three token sets by name."""
    rng = np.random.default_rng(0)
    return {
        name: write_stream(tmp_path / name, rng.integers(0, 500, size, dtype=np.uint16))
        for name, size in SIZES.items()
    }
