"""Keys and values of the run config that have another name now.

A config with an old name is refused with the new one. Configs inside checkpoints are translated, so
that older runs can be continued, exported and evaluated.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, Final

from spectral.power_iteration import steps_with_nearby
from spectral.rules.msign_rule import DTYPES
from spectral.tangent import FINEST_TOLERANCES

RENAMED_KEYS: Final[Mapping[str, str]] = {
    "optimizer.clip.whole_matrix_roles": "optimizer.clip.matrix_roles",
    # YAML reads an unquoted `on` or `off` as true or false.
    "gram_penalty.adaptive.on": "gram_penalty.adaptive.on_above",
    "gram_penalty.adaptive.off": "gram_penalty.adaptive.off_below",
    **{
        f"optimizer.rules.{rule}.power_iteration_steps": f"optimizer.rules.{rule}.krylov_steps"
        for rule in ("muon_sphere", "spectral_sphere", "muon_plus_plus")
    },
}
"""The present name of each key that had another one."""

CONVERTED: Final[Mapping[str, Callable[[int], int]]] = {
    # Block Krylov steps were taken with two vectors, and are with eight: 4 in place of 10.
    f"optimizer.rules.{rule}.krylov_steps": steps_with_nearby
    for rule in ("muon_sphere", "spectral_sphere")
}
"""By key, under its present name: the present value for a positive one under the other name."""

RENAMED_VALUES: Final[Mapping[str, Mapping[str, str]]] = {
    "optimizer.distributed.tensor_mode": {"home": "owner"},
}
"""By key, under its present name: the present name of each value that had another one."""


def translate(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return `config`, nested plain mappings, in present names, and a sentence per old name.

    Where a key is set under both names, the present one counts.
    """
    present = deepcopy(dict(config))
    sentences = []
    for old, new in RENAMED_KEYS.items():
        section, name = _place(present, old)
        if name in section:
            value = section.pop(name)
            target, new_name = _place(present, new)
            sentence = f"{old} is now {new}"
            if new in CONVERTED and type(value) is int and value > 0 and new_name not in target:
                sentence += f", {CONVERTED[new](value)} in place of {value}"
                value = CONVERTED[new](value)
            target.setdefault(new_name, value)
            sentences.append(sentence)
    for key, values in RENAMED_VALUES.items():
        section, name = _place(present, key)
        value = section.get(name)
        if isinstance(value, str) and value in values:
            section[name] = values[value]
            sentences.append(f"{key}: {value} is now {values[value]}")
    return present, sentences


def with_legible_tolerances(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with tolerances of solves that the msign of their rule can tell.

    Earlier versions took any beside an msign in bfloat16, whose solves then missed them.
    """
    present = deepcopy(dict(config))
    for rule in ("spectral_sphere", "muon_plus_plus"):
        section, name = _place(present, f"optimizer.rules.{rule}.tolerance")
        kind, value = section.get("msign_dtype"), section.get(name)
        finest = FINEST_TOLERANCES.get(DTYPES[kind], 0.0) if kind in DTYPES else 0.0
        if isinstance(value, float) and 0 < value < finest:
            section[name] = finest
    return present


def _place(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """Return the innermost section of the dotted `key`, empty if the config has none, and the
    key's last part."""
    *sections, name = key.split(".")
    for each in sections:
        inner = config.get(each)
        config = inner if isinstance(inner, dict) else {}
    return config, name
