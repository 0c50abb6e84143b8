"""The model families: what each is made of, and which code builds it.

A record names what a family fixes of the model section of a config; None leaves it to the config.
The builders import the engine, so they are imported when a model is first asked for, not when a
config is read.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from models.config import ModelConfig
from models.huggingface.limits import deepseek_limits
from models.section import named


def _no_limits(model: ModelConfig) -> Iterator[str]:
    """Nothing beyond the record."""
    yield from ()


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family."""

    name: str
    """Its name in `model.family`."""
    builder: str
    """Module with the functions `units`, `transformer_config`, `build` and `parameter_names`; see
    models/dense.py."""
    activation: str | None
    """The feed-forward block that all its models have, None if `model.activation` decides."""
    qk_norm: bool | None
    """Whether its query and key heads are normalised, None if `model.qk_norm` decides."""
    mixture: bool = False
    """Whether its layers are mixtures of experts."""
    latent: bool = False
    """Whether its attention is multi-head latent attention."""
    limits: Callable[[ModelConfig], Iterator[str]] = _no_limits
    """Yields what else of a model the family cannot have."""

    def problems(self, model: ModelConfig) -> Iterator[str]:
        """Yield what of `model` does not belong to the family, each line beginning with a key of
        the model section."""
        if self.qk_norm not in (None, model.qk_norm):
            wanted, got = str(self.qk_norm).lower(), str(model.qk_norm).lower()
            yield f"qk_norm must be {wanted} for family {self.name}, got {got}"
        if self.activation not in (None, model.activation):
            yield (
                f"activation must be {self.activation} for family {self.name}, "
                f"got {model.activation}"
            )
        if self.mixture and model.attention_backend != "sdpa":
            yield (
                f"attention_backend must be sdpa for family {self.name}, "
                f"got {model.attention_backend}"
            )
        for key, wanted_section in (("latent", self.latent), ("moe", self.mixture)):
            there = getattr(model, key) is not None
            if wanted_section and not there:
                yield f"{key} must be a section for family {self.name}, got null"
            elif there and not wanted_section:
                yield f"{key} must be null for family {self.name}, got a section"
        yield from self.limits(model)

    def units(self, *arguments: Any, **options: Any) -> Any:
        """The units of some layers; see `models.dense.units`."""
        return self._code.units(*arguments, **options)

    def transformer_config(self, *arguments: Any, **options: Any) -> Any:
        """Megatron's config of a model; see `models.dense.transformer_config`."""
        return self._code.transformer_config(*arguments, **options)

    def build(self, *arguments: Any, **options: Any) -> Any:
        """The Megatron model of some layers; see `models.dense.build`."""
        return self._code.build(*arguments, **options)

    def parameter_names(self, *arguments: Any, **options: Any) -> Any:
        """Which tensor of a built model is which parameter; see `models.dense.parameter_names`."""
        return self._code.parameter_names(*arguments, **options)

    @property
    def _code(self) -> Any:
        return import_module(self.builder)


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        # Llama: a pre-norm decoder with SwiGLU, without query-key norms.
        Family(name="llama", builder="models.dense", activation="swiglu", qk_norm=False),
        # Qwen3: query-key norms, and a head size of its own.
        Family(name="qwen3", builder="models.dense", activation="swiglu", qk_norm=True),
        # DeepNet: Qwen3's layers, hundreds of them and narrow; the SSO paper's test of depth.
        Family(name="deepnet", builder="models.dense", activation="swiglu", qk_norm=True),
        # GPT: squared ReLU or SwiGLU, query-key norms as the config says.
        Family(name="gpt", builder="models.dense", activation=None, qk_norm=None),
        # The 8B-A1B mixture of the SSO paper: grouped-query attention, shared experts.
        Family(name="moe", builder="models.moe", activation="swiglu", qk_norm=None, mixture=True),
        # DeepSeek-V3 without multi-token prediction, as transformers has it.
        Family(
            name="deepseek",
            builder="models.moe",
            activation="swiglu",
            qk_norm=False,
            mixture=True,
            latent=True,
            limits=deepseek_limits,
        ),
    )
}


def family_problems(model: ModelConfig) -> Iterator[str]:
    """Yield what of `model` does not belong to its family, or that there is none of that name."""
    family = FAMILIES.get(model.family)
    if family is None:
        yield f"family must be {named(model.family, FAMILIES)}"
    else:
        yield from family.problems(model)
