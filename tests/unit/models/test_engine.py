"""Releases of megatron-core that are accepted, accepted with a warning, or rejected."""

import warnings
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from megatron.core import package_info

from models.engine import (
    TESTED,
    EngineError,
    at_first_call,
    check_engine,
    compiler_problem,
    engine_version,
    import_engine,
)


def test_installed_release_is_a_tested_one() -> None:
    assert engine_version() == version("megatron-core")
    assert check_engine() is None


@pytest.mark.parametrize("release", [*TESTED, "0.16.2", "0.19.2+local"])
def test_tested_releases_and_those_between_are_used(release, monkeypatch) -> None:
    monkeypatch.setattr(package_info, "__version__", release)
    assert check_engine() is None


@pytest.mark.parametrize("release", ["0.15.3", "0.16.0"])
def test_older_release_is_refused(release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_info, "__version__", release)
    with pytest.raises(EngineError, match=rf"must be 0\.16\.1 or newer, got {release}"):
        check_engine()


@pytest.mark.parametrize("release", ["0.19.3", "99.0"])
def test_newer_release_is_used_with_a_warning(release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_info, "__version__", f"{release}+local")
    warned = f"megatron-core {release} is newer than 0.19.2, the newest tested release"
    assert check_engine() == warned


COMPILERS = {
    "exit 0": None,
    "exit 3": "a working C compiler: {} printed []",
    "echo 'no space left' >&2; exit 1": "a working C compiler: {} printed ['no space left']",
    "echo 'fatal error: Python.h: No such file' >&2; exit 1": "Python.h, which is not in /",
    None: "a C compiler: {} does not start (No such file or directory)",
}
"""Maps the script of a fake compiler to the missing requirement, or to None if nothing is missing.
"""


@pytest.mark.parametrize("script", COMPILERS)
def test_what_triton_needs_to_compile_is_named(script, tmp_path, monkeypatch) -> None:
    compiler, missing = tmp_path / "cc", COMPILERS[script]
    if script is not None:
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = compiler_problem()
    assert found is None if missing is None else (found or "").startswith(missing.format(compiler))
    if script == "exit 0":  # without CC, a compiler in PATH
        monkeypatch.delenv("CC")
        monkeypatch.setenv("PATH", str(tmp_path))
        assert (compiler_problem() or "").startswith("a C compiler (packages: gcc and python3-dev")
        compiler.rename(tmp_path / "clang")
        assert compiler_problem() is None


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
