"""The environment variables and the versions of a run."""

import os
import resource

import pytest
from torch._inductor import config as inductor

from tests.run_configs import tiny_config
from training.errors import ConfigError
from training.machine.device import (
    allow_open_files,
    device_type,
    missing_variables,
    prepare,
    required_variables,
)


def test_a_run_asks_for_what_its_layout_needs(tmp_path, monkeypatch):
    def of(**keys):
        return required_variables(tiny_config(str(tmp_path), **keys))

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    workers = "TORCHINDUCTOR_COMPILE_THREADS"
    plain = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", workers: "16"}
    assert of() == plain and of(parallel__pipeline=2) == plain
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert of(parallel__tensor=2) == of(parallel__context=2) == plain | one
    for ranks, share in ((4, "4"), (64, "1")):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        assert of() == plain | {workers: share}
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    graph = {
        "optimizer__distributed__cuda_graph": True,
        "optimizer__distributed__overlap_gather": False,
    }
    assert of(**graph) == plain | {"NCCL_GRAPH_REGISTER": "0"}
    assert of(run__deterministic=True) == plain | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_what_the_user_has_set_stays(tmp_path):
    config = tiny_config(str(tmp_path), parallel__tensor=2)
    assert missing_variables(config, {}) == required_variables(config)
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    own["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    assert missing_variables(config, own) == {}


def test_the_compiler_starts_as_many_workers_as_were_set(tmp_path, monkeypatch):
    """The compiler has already read its environment variables when the run sets them."""
    monkeypatch.setattr(inductor, "compile_threads", 32)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")  # so that the variable is restored
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    prepare(tiny_config(str(tmp_path)))
    assert inductor.compile_threads == 1
    monkeypatch.setattr(os, "environ", os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "7"})
    monkeypatch.setattr(inductor, "compile_threads", 7)
    prepare(tiny_config(str(tmp_path)))
    assert inductor.compile_threads == 7


def test_a_run_on_cpus_sees_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config = tiny_config(str(tmp_path), run__device="cpu")
    prepare(config)
    assert (os.environ["CUDA_VISIBLE_DEVICES"], device_type(config)) == ("", "cpu")


def test_tf32_for_everything_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ConfigError, match="NVIDIA_TF32_OVERRIDE must not be 1"):
        prepare(tiny_config(str(tmp_path)))


def test_a_rank_may_open_as_many_files_as_the_system_allows():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, before[1]))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= min(before[1], 65536) > 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_too_few_open_files_are_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with pytest.raises(ConfigError, match=r"open files .* must be at least 256, got 64"):
        allow_open_files()
