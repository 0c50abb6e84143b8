"""Every key in sections `model` and `pc` affects weights, losses, gradients or PC(W)."""

from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from models.blocks.experts import routers
from models.config import InitConfig, LatentConfig, ModelConfig, MoEConfig, RopeScalingConfig
from models.families import all_units
from models.pc_config import PCConfig, PCOverride, PolynomialConfig
from models.section import Section
from tests.models import drawn, losses_of
from tests.other_values import another
from tests.step_trace import without_eigensolvers
from tests.tiny_families import MIXTURE, SETTINGS, tiny_model

LENGTH = {"original_max_position_embeddings": 4096}
YARN = RopeScalingConfig(kind="yarn", factor=4.0, truncate=False, **LENGTH)
LLAMA3 = replace(YARN, kind="llama3", low_freq_factor=1.0, high_freq_factor=400.0)
PLAIN = InitConfig(spectral=False)
GROUPS = {"experts": 8, "expert_groups": 2, "routed_scale": 2.0}
SECTIONS: dict[str, tuple[type[Section], ModelConfig]] = {
    "": (ModelConfig, tiny_model("llama")),
    "init.": (InitConfig, tiny_model("llama")),
    "moe.": (MoEConfig, tiny_model("moe", layers=3, moe={**MIXTURE, **GROUPS})),
    "latent.": (LatentConfig, tiny_model("deepseek")),
    "rope_scaling.": (RopeScalingConfig, tiny_model("llama", rope_scaling=YARN)),
}
"""Maps each section to its class and to the model in which its options are changed."""
BESIDE: dict[str, ModelConfig] = {
    **{key: tiny_model("gpt") for key in ("activation", "qk_norm")},
    **{key: tiny_model("gemma2") for key in SETTINGS["gemma2"] if key != "activation"},
    "moe.score": tiny_model("moe", moe={**MIXTURE, "expert_bias": False}),
    **{
        f"rope_scaling.{end}_freq_factor": tiny_model("llama", rope_scaling=LLAMA3)
        for end in ("low", "high")
    },
    **{f"init.{key}": tiny_model("llama", init=PLAIN) for key in ("std", "depth_scaled")},
    "init.depth_scaling": tiny_model("llama", init=replace(PLAIN, depth_scaled=True)),
}
"""Models for options that have no effect on the model of their section."""
OTHER: dict[str, Any] = {
    "family": "gemma2",
    "heads": 2,
    "kv_heads": 4,
    "vocab_size": 200,  # more rows after padding
    "rope_scaling": YARN,
    "init": PLAIN,
    "moe.top_k": 1,
    "moe.expert_groups": 1,
    "rope_scaling.attention_factor": 1.5,
}
"""Values for options whose other values are not obvious."""
ELSEWHERE = {
    *("moe", "latent"),  # sections that a family needs
    *("attention_backend", "attention_kernel", "moe.backend"),  # the results are the same
    *("moe.expert_bias", "moe.expert_bias_rate"),  # which begins at 0: see test_router.py
}
WALK = [
    prefix + field.name
    for prefix, (kind, _) in SECTIONS.items()
    for field in fields(kind)
    if prefix + field.name not in ELSEWHERE
]


def changed(model: ModelConfig, key: str) -> ModelConfig:
    """Return the model with a different value of an option."""
    section, _, name = key.rpartition(".")
    owner = getattr(model, section) if section else model
    other = OTHER[key] if key in OTHER else another(type(owner), name, getattr(owner, name))
    owner = replace(owner, **{name: other})
    return replace(model, **{section: owner}) if section else owner


@cache
def results(model: ModelConfig) -> dict[str, Tensor]:
    """Return initial weights, losses and gradients."""
    chunk, parameters = drawn(model)
    for router in routers([chunk]):
        if router.earlier_load is not None:  # equal shares give no gradient
            router.earlier_load.copy_(torch.arange(len(router.earlier_load)))
    found = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    losses = losses_of(chunk)
    losses.sum().backward()
    gradients = {f"gradient of {name}": p.grad for name, p in parameters.items()}
    return {**found, **gradients, "losses": losses.detach()}


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Return whether both results have the same names and bitwise equal tensors."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("key", WALK)
def test_every_option_of_a_model_has_an_effect(key: str, world: object) -> None:
    section = key.rpartition(".")[0]
    model = BESIDE.get(key, SECTIONS[f"{section}." if section else ""][1])
    assert not are_equal(results(model), results(changed(model, key)))


FITTED = PolynomialConfig(kind="fitted")
OVERRIDE = PCOverride(roles=["o", "down"], layers=(1, 1), level=4)
IN_TRAINING = {"learnable_gamma", "gamma_lr", "gamma_weight_decay", "evaluator"}
"""Options that affect the steps of gamma, or where PC(W) is computed. tests/unit/parallel/optimizer
tests them."""
PC: dict[str, Any] = {
    "blocks": ["o"],
    "level": 3,
    "overrides": {"x": OVERRIDE},
    "polynomial": FITTED,
    "steps": 1,
    "spectral_norm": "none",
    "norm_recovery": False,
    "init_compensation": True,
}
POLYNOMIAL = {"kind": "over_flattening", "degree": 3, "cutoff": 0.5, "alpha": 1.0, "upper": 2.0}
OVERRIDDEN = {"roles": None, "layers": (0, 1), "level": 1}
BASE = PCConfig(level=2)
PAIRS: dict[str, tuple[PCConfig, PCConfig]] = {
    **{key: (BASE, replace(BASE, **{key: value})) for key, value in PC.items()},
    **{
        f"polynomial.{key}": tuple(
            replace(BASE, polynomial=each) for each in (FITTED, replace(FITTED, **{key: value}))
        )
        for key, value in POLYNOMIAL.items()
    },
    **{
        f"overrides.{key}": tuple(
            replace(BASE, overrides={"x": each})
            for each in (OVERRIDE, replace(OVERRIDE, **{key: value}))
        )
        for key, value in OVERRIDDEN.items()
    },
}


def effective(pc: PCConfig) -> dict[str, Tensor]:
    """Return PC(W) of the same random weight for every PC layer of a model, after one update."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1, 12, 20, generator=generator, dtype=torch.float64)
    found = {}
    for unit in all_units(tiny_model("llama")):
        layer = pc.preconditioner(unit)
        if layer is not None:
            u, v = weight.new_zeros(1, 12), weight.new_zeros(1, 20)
            layer.refresh_(weight, u, v)
            found[unit.name] = layer.effective(weight, u, v, layer.initial_gamma(weight, u, v))
    return found


@pytest.mark.parametrize("key", PAIRS)
def test_every_option_of_pc_layers_has_an_effect(key: str) -> None:
    with without_eigensolvers():  # these need no steps
        one, other = map(effective, PAIRS[key])
    assert not are_equal(one, other)


def test_of_several_overrides_that_match_the_last_wins() -> None:
    found = effective(replace(BASE, overrides={"x": OVERRIDE, "y": PCOverride(level=1)}))
    assert are_equal(found, effective(replace(BASE, level=1)))


def test_the_walk_covers_every_option_of_pc_layers() -> None:
    sections = {"": PCConfig, "polynomial.": PolynomialConfig, "overrides.": PCOverride}
    every = {prefix + f.name for prefix, kind in sections.items() for f in fields(kind)}
    assert every == PAIRS.keys() | IN_TRAINING
