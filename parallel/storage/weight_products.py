"""Gradients of linears' weights, added to their sums by the products that compute them.

Else every micro-batch writes a gradient in 16 bits, and another pass adds it to the float32 sum: 10
bytes per parameter, and one rounding more. Megatron has the seam, for an extension of Apex.
"""

from collections.abc import Iterable

import torch
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.nn.utils import parametrize


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total`, in its type, from operands of a type of their own."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class WeightProducts:
    """What Megatron calls in place of Apex's extension, by the name that it has there."""

    @staticmethod
    def wgrad_gemm_accum_fp32(inputs: Tensor, gradient: Tensor, total: Tensor) -> None:
        """Add the gradient of a weight to `total` `[rows, cols]`, from those of the outputs
        `[tokens, rows]` and from the `inputs` `[tokens, cols]`."""
        add_product_(total, gradient.t(), inputs)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def sum_in_products_(chunks: Iterable[torch.nn.Module], active: bool) -> None:
    """Let linears of `chunks` add their weights' gradients to `main_grad` themselves, or not.

    Weights that are computed in the forward pass have none. The gradient that autograd sees then is
    None.
    """
    layers.fused_weight_gradient_mlp_cuda = WeightProducts
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, layers.ColumnParallelLinear | layers.RowParallelLinear):
                module.gradient_accumulation_fusion = active and not parametrize.is_parametrized(
                    module
                )
