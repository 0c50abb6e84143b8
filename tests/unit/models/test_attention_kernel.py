"""Which kernel computes attention: known at the start, and on a GPU never the one that keeps all
scores."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.blocks import attention
from models.blocks.attention import FUSED, attention_kernel, causal_attention
from parallel.comm.groups import Groups
from tests.run_configs import tiny_config
from training.build import kernel_of

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
