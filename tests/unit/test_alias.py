"""The name `spectrain` in a checkout."""

import importlib
import sys

import pytest

import spectral
import spectral.rules.muon


def test_both_names_import_the_same_modules() -> None:
    import spectrain
    import spectrain.rules.muon
    from spectrain.sphere import radius

    assert spectrain is spectral and spectrain.rules.muon is spectral.rules.muon
    assert radius.__module__ == "spectral.sphere"
    for name in [name for name in sys.modules if name.startswith("spectrain.")]:
        original = f"spectral.{name.removeprefix('spectrain.')}"
        assert sys.modules[name] is sys.modules[original]
        assert sys.modules[name].__spec__.name == original  # type: ignore[union-attr]
    with pytest.raises(ModuleNotFoundError, match="nothing_like_it"):
        importlib.import_module("spectrain.nothing_like_it")
