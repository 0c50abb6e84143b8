"""The fused norm on a simulated GPU, compared with PyTorch's norm on a CPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rehearsal.programs import called

ROWS, SIZE = 6, 16
X = ROWS * SIZE * 2  # bytes of the input in 16 bits
SCALES = ROWS * 4


def normalised(device: str, gain: torch.dtype | None) -> list[Tensor]:
    """Return the result of a norm, and the gradients of its input and of its gain, if any."""
    x = torch.ones(2, ROWS // 2, SIZE, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = None
    if gain is not None:
        weight = torch.ones(SIZE, dtype=gain, device=device, requires_grad=True)
    with torch.profiler.record_function("forward_backward"):
        out = F.rms_norm(x, (SIZE,), weight, 1e-6)
    with torch.profiler.record_function("optimizer"):
        given = torch.empty_like(out)
        wanted = [x] if weight is None else [x, weight]
        return [out, *torch.autograd.grad(out, wanted, given)]


def on_both(gain: torch.dtype | None) -> None:
    """Fail unless shapes, dtypes and requires_grad are the same as on a CPU."""
    real, faked = normalised("cpu", gain), normalised("cuda", gain)
    assert [x.shape for x in faked] == [x.shape for x in real]
    assert [x.dtype for x in faked] == [x.dtype for x in real]
    assert [x.requires_grad for x in faked] == [x.requires_grad for x in real]
    assert all(x.is_cuda for x in faked)


def counted(perform, gain):
    """Return the counts of the forward and the backward pass."""
    report = called(perform, on_both, gain)
    # The first call was on the CPU.
    return report.counts[2, "forward_backward"], report.counts[2, "optimizer"]


@pytest.mark.parametrize("gain", [None, torch.bfloat16])
def test_a_norm_is_one_launch_each_way(gain, perform):
    forward, backward = counted(perform, gain)
    assert forward.kernels == {"_fused_rms_norm": 1}
    assert backward.kernels == {"_fused_rms_norm_backward": 1}
    gains = 0 if gain is None else SIZE * 2
    # Backward reads the gradient, the input and a number per row, and writes the input's gradient.
    assert backward.elementwise_bytes == 3 * X + SCALES + 2 * gains


def test_a_gain_of_another_type_is_several_launches(perform):
    """PyTorch fuses a norm only if all dtypes are equal."""
    forward, _ = counted(perform, torch.float32)
    assert "_fused_rms_norm" not in forward.kernels and forward.launches > 3
