"""What a run wants of its environment, and what it is made with."""

import resource
from types import SimpleNamespace

import pytest
import torch

from tests.paths import ROOT
from tests.run_configs import tiny_config
from training.errors import ConfigError
from training.machine import facts
from training.machine.environment import (
    allow_open_files,
    missing,
    prepare,
    settings,
    wanted,
)
from training.machine.facts import described, device_facts, driver, slow_precision, versions


def test_a_run_asks_for_what_its_layout_needs(tmp_path):
    def of(**keys):
        return wanted(tiny_config(str(tmp_path), **keys))

    plain = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert of() == plain
    assert of(parallel__pipeline=2) == plain
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert of(parallel__tensor=2) == of(parallel__context=2) == plain | one
    graph = {
        "optimizer__distributed__cuda_graph": True,
        "optimizer__distributed__overlap_gather": False,
    }
    assert of(**graph) == plain | {"NCCL_GRAPH_REGISTER": "0"}
    assert of(run__deterministic=True) == plain | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def test_what_the_user_has_set_stays(tmp_path):
    config = tiny_config(str(tmp_path), parallel__tensor=2)
    assert missing(config, {}) == wanted(config)
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert missing(config, own) == {}


def test_tf32_for_everything_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(ConfigError, match="NVIDIA_TF32_OVERRIDE must not be 1"):
        prepare(tiny_config(str(tmp_path)))


def test_what_changes_products_is_recorded(monkeypatch):
    for name in ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.setenv(name, "1")
        assert settings()[name] == "1"


def test_the_facts_of_a_run_are_known():
    found = versions()
    assert found["torch"] == torch.__version__ and found["megatron-core"] is not None
    if (ROOT / ".git").exists():
        assert found["commit"] is not None and len(found["commit"]) == 40
    assert device_facts(torch.device("cpu"))["device"].startswith("cpu")
    assert f"torch {torch.__version__}" in described(torch.device("cpu"))


def test_a_library_that_cannot_be_asked_is_left_out(monkeypatch):
    """A CUDA build of PyTorch whose device is pretended knows no cuDNN."""

    def unknown():
        raise RuntimeError("Cannot query cuDNN version without ATen_cuda library.")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H100")
    properties = SimpleNamespace(total_memory=2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda.nccl, "version", unknown)
    monkeypatch.setattr(facts.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(facts.cudnn, "version", unknown)
    found = device_facts(torch.device("cuda"))
    assert found["device"] == "H100" and found["cudnn"] is None and found["nccl"] is None


def test_a_cpu_without_instructions_for_bfloat16_says_what_it_costs(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(facts, "SLOW_ON_CPU", {torch.float16, torch.bfloat16})
    assert "10 to 50 times as long" in slow_precision("bf16", cpu)
    assert slow_precision("fp32", cpu) is None
    assert slow_precision("bf16", torch.device("cuda")) is None
    monkeypatch.setattr(facts, "SLOW_ON_CPU", {torch.float16})
    assert slow_precision("bf16", cpu) is None


def test_the_driver_says_its_version(tmp_path):
    text = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    )
    (tmp_path / "version").write_text(text)
    assert driver(tmp_path / "version") == "550.54.15"
    assert driver(tmp_path / "none") is None


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
    with pytest.raises(ConfigError, match=r"must be allowed to open 256 files .*, got 64"):
        allow_open_files()
