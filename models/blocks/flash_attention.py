"""Core attention by FlashAttention 3 or 4, whose packages are not PyTorch's."""

import importlib
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from models.blocks.attention import CoreAttention
from models.blocks.document_attention import Part

MODULES: Final = {
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_4": "flash_attn.cute",
}
"""Modules of the kernels, by the names that `model.attention_kernel` has for them."""
CAPABILITIES: Final = {"flash_attention_3": (8, 9), "flash_attention_4": (9, 10, 11, 12)}
"""Major compute capabilities of the devices that they support."""


def imported(kernel: str) -> Callable[..., Any]:
    """Return the kernel's attention. Raises ImportError if its package cannot be imported."""
    function: Callable[..., Any] = importlib.import_module(MODULES[kernel]).flash_attn_func
    return function


class FlashCoreAttention(CoreAttention):
    """Attention by the package of `kernel`, a key of `MODULES`; 16 bits, on GPUs."""

    def __init__(self, *arguments: Any, kernel: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.function = imported(kernel)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, documents: Part | None = None
    ) -> Tensor:
        """Return the attention output `[s, b, heads * d]`; see `CoreAttention.attend`.

        Raises ValueError for documents, which configs refuse.
        """
        if documents is not None:
            raise ValueError("the kernels of packages do not take documents")
        # The packages' causal mask ends with the last query and the last key, as ours does.
        output = self.function(
            *(x.transpose(0, 1) for x in (query, key, value)),
            softmax_scale=self.scale,
            causal=True,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Some releases return the log-sums too.
        heads: Tensor = output[0] if isinstance(output, tuple) else output
        return heads.transpose(0, 1).flatten(2)
