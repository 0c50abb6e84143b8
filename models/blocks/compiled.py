"""Fuses the elementwise parts of a layer into kernels, with torch.compile or Triton.

Without fusion, norms, rotary embeddings and activations read and write whole tensors several times,
because every operation is a separate kernel. `fuse_blocks_` compiles each of these functions
separately, because the code around them (matmuls, collectives, recomputation, the attention kernel)
would cause graph breaks. Each function is compiled once per shape and gradient mode and shared by
all layers. Expert token counts change every step, so experts share one graph with a symbolic token
count.

The backward pass concatenates the gradients of gate and up, and the gradients of queries, keys and
values. Compiled code reaches only half the bandwidth of a copy in these concatenations
(docs/performance.md), so spectral/kernels provides a kernel for each concatenation.
"""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from models.blocks.activation import Activation, activation_of, with_one_gradient
from models.blocks.experts import GroupedExperts
from models.blocks.latent_attention import LatentAttention
from models.blocks.norm import RMSNorm, SumFunctions, left_to
from models.blocks.self_attention import HeadFunctions, RotatedSelfAttention
from models.engine import compiler_problem

GRAPHS: Final = 64
"""Maximum number of graphs per function, one for each shape and gradient mode. Exceeding the limit
is an error, because torch would otherwise silently run the function uncompiled."""


def fuse_blocks_(
    chunks: Iterable[torch.nn.Module], backend: str | None, *, backward: bool = False
) -> int:
    """Compile functions in the modules of `chunks` with torch.compile's `backend` (None: compile
    nothing). If `backward` is true, use Triton kernels for backward passes.

    Only this project's modules and Megatron's feed-forward block are modified. Returns the number
    of modified modules. Raises ValueError for an activation that is not in `ACTIVATIONS`.
    """
    fused = Fused(backend, backward=backward)
    return sum(fused.install_(module) for chunk in chunks for module in chunk.modules())


class Fused:
    """The fused functions of a model; see `fuse_blocks_`."""

    def __init__(self, backend: str | None, *, backward: bool = False) -> None:
        self.backend = backend
        self.backward = backward
        if backend is not None:
            import torch._dynamo.config as dynamo  # imported lazily: the import takes a second

            # Before torch 2.13, torch.compile does not accept this limit as a keyword argument.
            dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
        self._made: dict[tuple[Callable[..., Any], bool], Callable[..., Any]] = {}

    def compiled(
        self, function: Callable[..., Any], *, dynamic: bool = False
    ) -> Callable[..., Any]:
        """Return `function` compiled once for all modules, or `function` itself if the backend is
        None.

        With `dynamic`, a single graph handles any number of tokens.
        """
        if self.backend is None:
            return function
        if (function, dynamic) not in self._made:
            made = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=self.backend)
            self._made[function, dynamic] = some_tokens(made, function) if dynamic else made
        return self._made[function, dynamic]

    def install_(self, module: torch.nn.Module) -> bool:
        """Fuse the elementwise functions of `module`. Return whether any function was fused."""
        match module:
            case RMSNorm():
                module.function = self.compiled(module.function)
            case RotatedSelfAttention() if module.splits_heads:
                forward, backward = HeadFunctions()
                if self.backward:
                    from spectral.kernels import heads

                    backward = heads.gradients
                else:
                    backward = self.compiled(backward)
                module.heads = HeadFunctions(self.compiled(forward), backward)
            case RotatedSelfAttention() | LatentAttention():
                module.rotate = self.compiled(module.rotate)
            case GroupedExperts():
                activation = module.activation
                module.activate = self.activation(activation, activation.scaled, dynamic=True)
            case MLP():
                gated = module.config.gated_linear_unit
                activation = activation_of(module.config.activation_func, gated=gated)
                # With this option, Megatron passes the whole output of the first linear layer to
                # the activation.
                module.config.use_te_activation_func = True
                dynamic = module.linear_fc1.is_expert
                module.activation_func = self.activation(
                    activation, activation.block, dynamic=dynamic
                )
            case TransformerLayer():
                return self._leave_sum_(module, "self_attn_bda", module.pre_mlp_layernorm)
            case TransformerBlock() if module.config.recompute_granularity != "full":
                pairs = itertools.pairwise(module.layers)
                left = [self._leave_sum_(a, "mlp_bda", b.input_layernorm) for a, b in pairs]
                return any(left)
            case _:
                return False
        return True

    def _leave_sum_(self, layer: TransformerLayer, name: str, norm: torch.nn.Module) -> bool:
        """Fuse the residual sum `name` of `layer` into the next norm, `norm`, if the backend and
        the norm support it. Return whether the sum was fused."""
        centered = layer.config.layernorm_zero_centered_gamma
        if self.backend is None or centered or not isinstance(norm, RMSNorm):
            return False
        norm.sum = SumFunctions(*map(self.compiled, SumFunctions())).apply
        setattr(layer, name, left_to(norm))
        return True

    def activation(
        self, activation: Activation, function: Callable[..., Tensor], *, dynamic: bool
    ) -> Callable[..., Tensor]:
        """Return the fused version of `function`, which is `activation.block` or
        `activation.scaled`."""
        compiled = self.compiled(function, dynamic=dynamic)
        return with_one_gradient(activation, compiled) if self.backward else compiled


def some_tokens(
    compiled: Callable[..., Tensor], plain: Callable[..., Tensor]
) -> Callable[..., Tensor]:
    """Return a function that calls `compiled` for two or more tokens and `plain` for fewer.

    torch.compile specializes on sizes 0 and 1, so an expert with 0 or 1 tokens would trigger a
    recompilation.
    """

    def function(tokens: Tensor, *rest: Tensor) -> Tensor:
        return (compiled if len(tokens) > 1 else plain)(tokens, *rest)

    return function


def missing_compiler(device: torch.device) -> str | None:
    """Return the missing dependency of torch.compile on `device`, or None if torch.compile can be
    used."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton for this GPU"
        return compiler_problem()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++)"
    return None
