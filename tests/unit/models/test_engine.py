"""Releases of megatron-core that are accepted, accepted with a warning, or refused."""

import warnings
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from megatron.core import package_info

from models.engine import EngineError, at_first_call, check_engine, engine_version, import_engine


def test_installed_release_is_a_tested_one() -> None:
    assert engine_version() == version("megatron-core")
    assert check_engine() is None


def test_older_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_info, "__version__", "0.15.3")
    with pytest.raises(EngineError, match=r"must be 0\.16\.1 or newer, got 0\.15\.3"):
        check_engine()


def test_newer_release_is_used_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_info, "__version__", "99.0+local")
    assert check_engine() == "megatron-core 99.0 is newer than 0.19.2, the newest tested release"


def test_what_the_engine_compiles_is_compiled_at_its_first_call_alone() -> None:
    compiled: list[dict[str, bool]] = []
    compiler = at_first_call(lambda f, **options: compiled.append(options) or f)
    double = compiler(dynamic=True)(lambda x, *, times: x * times)
    assert compiled == []
    assert [double(3, times=2), double(2, times=5)] == [6, 10]
    assert compiled == [{"dynamic": True}]


def test_collectives_that_the_engine_calls_by_an_older_name_are_silent(world) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_engine()
        dist.all_gather_into_tensor(torch.zeros(1), torch.zeros(1))
        dist.reduce_scatter_tensor(torch.zeros(1), torch.zeros(1))
