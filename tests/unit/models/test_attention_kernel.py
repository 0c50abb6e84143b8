"""Which kernel computes attention: known at the start, and on a GPU never the one that keeps all
scores."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.blocks import attention
from models.blocks.attention import FUSED, attention_kernel, causal_attention
from parallel.comm.groups import Groups
from tests.run_configs import tiny_config
from training.build import kernel_of
from training.machine.facts import slow_attention

CPU = torch.device("cpu")


def test_the_named_kernel_is_the_one_that_runs(world: Groups, tmp_path: object) -> None:
    config = tiny_config(str(tmp_path))
    name = kernel_of(config, world)
    assert name == attention_kernel(4, 2, 16, 16, dtype=torch.float32, device=CPU)
    query, key = torch.randn(8, 1, 4, 16), torch.randn(8, 1, 2, 16)
    with torch.profiler.profile() as profiler:
        causal_attention(query, key, key, 0.25)
    ran = " ".join(event.key for event in profiler.key_averages())
    assert ("flash_attention" in ran) == (name == "flash_attention")
    assert name in ("flash_attention", "math")
    with sdpa_kernel(SDPBackend.MATH):
        assert attention_kernel(4, 2, 16, 16, dtype=torch.float32, device=CPU) == "math"


def test_a_fused_kernel_or_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule for GPUs, tried on a CPU: values of another width have no fused kernel."""
    monkeypatch.setattr(attention, "allowed_kernels", lambda query: sdpa_kernel(FUSED))
    query, value = torch.randn(8, 1, 4, 16), torch.randn(8, 1, 4, 6)
    causal_attention(query, query, query, 0.25)
    with pytest.raises(RuntimeError, match="No available kernel"):
        causal_attention(query, query, value, 0.25)
    with pytest.raises(RuntimeError, match="No available kernel"):
        attention_kernel(4, 4, 16, 6, dtype=torch.float32, device=CPU)


def test_cudnn_is_asked_for_first_on_a_gpu_and_the_order_of_before_comes_back():
    with FakeTensorMode() as mode:
        query = FakeTensor(mode, torch.empty(1, 4, 8, 16, device="meta"), torch.device("cuda"))
    before = torch._C._get_sdp_priority_order()
    with attention.allowed_kernels(query):
        order = torch._C._get_sdp_priority_order()
        assert (
            order[0] == int(SDPBackend.CUDNN_ATTENTION)
            and not torch.backends.cuda.math_sdp_enabled()
        )
    assert torch._C._get_sdp_priority_order() == before
    assert torch.backends.cuda.math_sdp_enabled()


def test_a_slower_kernel_is_told_where_a_faster_one_exists(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert "two thirds" in str(slow_attention("flash_attention", gpu))
    assert slow_attention("cudnn_attention", gpu) is None
    assert slow_attention("flash_attention", CPU) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert slow_attention("flash_attention", gpu) is None
