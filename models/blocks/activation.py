"""Activation functions of feed-forward blocks without a gate."""

import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """`relu(x)^2` (So et al., 2021), elementwise; not compiled, unlike Megatron's."""
    return F.relu(x).square()
