"""Activation functions of feed-forward blocks, plain; models/blocks/compiled.py fuses them."""

import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """`relu(x)^2` (So et al., 2021), elementwise; not compiled, unlike Megatron's."""
    return F.relu(x).square()


def swiglu(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` `[..., d]` (Shazeer, 2020) of gate and up side by side, `[..., 2 d]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def scaled_swiglu(gate_up: Tensor, scale: Tensor) -> Tensor:
    """`swiglu` `[tokens, d]` of `[tokens, 2 d]`, each token's row times its `scale` `[tokens]`, in
    the type of `gate_up`."""
    return (swiglu(gate_up) * scale.unsqueeze(-1)).to(gate_up.dtype)
