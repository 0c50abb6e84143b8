"""Rotary positions in config.json: `rope_parameters` of transformers 5, `rope_scaling` of 4."""

from collections.abc import Iterator, Mapping
from math import log
from typing import Any, Final

from models.config import LLAMA3_KEYS, ModelConfig
from models.section import named

LENGTH: Final = "original_max_position_embeddings"
NEEDED: Final[dict[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", LENGTH, *LLAMA3_KEYS),
    "yarn": ("factor", LENGTH),
}
"""Types of rotary positions that are computed here, and the keys that each must have."""
OPTIONAL: Final = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "attention_factor": None,
}
"""Further keys of yarn, and their defaults."""

MSCALES: Final = ("mscale", "mscale_all_dim")
"""Keys of yarn that make up an attention factor, as DeepSeek has them."""


def rope_parameters(model: ModelConfig) -> dict[str, Any]:
    """Return the type of the model's rotary positions, their base, and the keys of the type."""
    base = {"rope_type": "default", "rope_theta": model.rope_base}
    scaling = model.rope_scaling
    if scaling is None:
        return base
    keys = NEEDED[scaling.kind] + (tuple(OPTIONAL) if scaling.kind == "yarn" else ())
    values = {key: getattr(scaling, key) for key in keys}
    own = {key: value for key, value in values.items() if value is not None}
    return {**base, "rope_type": scaling.kind, **own}


def rope_problem(rope: Mapping[str, Any]) -> str | None:
    """Return what keeps rotary positions from being computed here, None if nothing."""
    kind = rope.get("rope_type", "default")
    if kind not in NEEDED:
        return f"rope_type must be {named(str(kind), NEEDED)}"
    optional = ("beta_fast", "beta_slow", "attention_factor", *MSCALES) if kind == "yarn" else ()
    wanted = [*NEEDED[kind], *(key for key in optional if rope.get(key))]
    wrong = [key for key in wanted if not _is_positive(rope.get(key))]
    return f"rope_type {kind} needs numbers above 0 for {', '.join(wrong)}" if wrong else None


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def rope_scaling(rope: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the section `model.rope_scaling` of rotary positions without a problem, None for
    those that are not scaled."""
    kind = rope.get("rope_type", "default")
    if kind == "default":
        return None
    found = {key: rope[key] for key in NEEDED[kind]}
    if kind == "yarn":
        given = {key: rope.get(key) for key in OPTIONAL}
        # Without a value, or with 0, transformers takes its default.
        found |= {key: value for key, value in given.items() if value or value is False}
        if "attention_factor" not in found and all(rope.get(key) for key in MSCALES):
            scale, of_all = (0.1 * rope[key] * log(rope["factor"]) + 1 for key in MSCALES)
            found["attention_factor"] = scale / of_all
    return {"kind": kind, **found}


def rope_differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each value of `ours` (`rope_parameters`) that `theirs` do not have."""
    problem = rope_problem(theirs)
    if problem is not None:
        yield problem
        return
    part = theirs.get("partial_rotary_factor", 1.0)
    if part != 1:
        yield f"partial_rotary_factor is {part}, the config's model has 1.0"
    both = [_computed(ours), _computed(theirs)]
    for key in dict.fromkeys([*both[0], *both[1]]):
        own, other = (values.get(key) for values in both)
        if own != other:
            yield f"{key} is {other!r}, the config's model has {own!r}"


def _computed(rope: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the positions, the defaults filled in."""
    scaling = rope_scaling(rope) or {"kind": "default"}
    values = {"rope_type": scaling.pop("kind"), "rope_theta": rope.get("rope_theta")}
    if values["rope_type"] == "yarn":
        values |= OPTIONAL | {"attention_factor": 0.1 * log(scaling["factor"]) + 1}
    return values | scaling
