"""A word embedding times the square root of the width, as Gemma's."""

from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from torch import Tensor


class ScaledEmbedding(LanguageModelEmbedding):
    """Megatron's embedding, scaled; the factor is rounded to the type of the weights, as
    transformers rounds it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        scale = torch.tensor(self.config.hidden_size**0.5, dtype=self.config.params_dtype)
        self.scale = scale.item()

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        """Return `[s, b, hidden]` of token ids `[b, s]`, a part of the sequence under sequence
        parallelism."""
        embedded: Tensor = super().forward(*arguments, **options)
        return embedded * self.scale
