"""Feed-forward activations, keyed by their names in `model.activation`.

The table `ACTIVATIONS` contains one entry per activation. Megatron's config, compilation, grouped
experts and export use this table. models/blocks/compiled.py fuses activations.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """Return `relu(x)^2` elementwise (So et al., 2021). Megatron's version of this function is
    compiled; this version is not."""
    return F.relu(x).square()


def tanh_gelu(x: Tensor) -> Tensor:
    """Return the tanh approximation of GELU elementwise (Hendrycks and Gimpel, 2016)."""
    return F.gelu(x, approximate="tanh")


def swiglu(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up` `[..., d]` (Shazeer, 2020) for `gate_up` `[..., 2 d]`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def geglu(gate_up: Tensor) -> Tensor:
    """Return `tanh_gelu(gate) * up` `[..., d]` (Shazeer, 2020) for `gate_up` `[..., 2 d]`."""
    gate, up = gate_up.chunk(2, -1)
    return tanh_gelu(gate) * up


@dataclass(frozen=True, kw_only=True)
class Activation:
    """A feed-forward activation.

    function      elementwise function applied to the gate projection or, in a block without a gate,
                  to the up projection
    block         function applied to the first linear layer's output: the concatenated gate and up
                  projections, or only the up projection
    gated         whether the block has a gate
    hugging_face  name in config.json, or None if no transformers class supports the activation
    """

    function: Callable[[Tensor], Tensor]
    block: Callable[[Tensor], Tensor]
    gated: bool
    hugging_face: str | None

    def scaled(self, wide: Tensor, scale: Tensor) -> Tensor:
        """Return `block(wide)` for `wide` `[tokens, ...]`, with row i multiplied by `scale[i]`, in
        the dtype of `wide`."""
        return (self.block(wide) * scale.unsqueeze(-1)).to(wide.dtype)


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(function=F.silu, block=swiglu, gated=True, hugging_face="silu"),
    "geglu": Activation(
        function=tanh_gelu, block=geglu, gated=True, hugging_face="gelu_pytorch_tanh"
    ),
    "relu2": Activation(function=squared_relu, block=squared_relu, gated=False, hugging_face=None),
}


def activation_of(function: Callable[[Tensor], Tensor], *, gated: bool) -> Activation:
    """Return the activation whose elementwise function is `function`.

    Raises ValueError if `ACTIVATIONS` contains no such activation.
    """
    for activation in ACTIVATIONS.values():
        if activation.function is function and activation.gated == gated:
            return activation
    gate = "with a gate" if gated else "without a gate"
    raise ValueError(
        f"compiled blocks and experts must use one of the activations {', '.join(ACTIVATIONS)}, "
        f"got {function.__name__} {gate}"
    )


IS_TANH = {F.silu: False, tanh_gelu: True}
"""Maps each gate function that the kernel supports to whether the function uses tanh."""


def with_one_gradient(
    activation: Activation, forward: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function that computes `forward` and uses the Triton kernel as its backward pass.

    `forward` is the activation's `block` or `scaled`, compiled or not. If the kernel does not
    support the activation, `forward` itself is returned.
    """
    if not activation.gated or activation.function not in IS_TANH:
        return forward
    from spectral.kernels import gated

    backward = partial(gated.gradients, tanh=IS_TANH[activation.function])

    def function(wide: Tensor, *scale: Tensor) -> Tensor:
        result: Tensor = _Gated.apply(forward, backward, wide, *scale)  # type: ignore[no-untyped-call]
        return result

    return function


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Tensor],
        backward: Callable[..., tuple[Tensor, Tensor | None]],
        *inputs: Tensor,
    ) -> Tensor:
        ctx.gradients = backward
        ctx.save_for_backward(*inputs)
        return forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        return None, None, *ctx.gradients(*gradients, *inputs)[: len(inputs)]
