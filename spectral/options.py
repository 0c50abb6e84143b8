"""Options of the optimizer classes: the fields of a rule, with the library's defaults.

`DEFAULTS` targets a single GPU and 32- or 16-bit weights. Its msign settings are faster than the
rules' own defaults: fewer steps, a narrower dtype, or both (reasons: docs/library.md). Float64
weights and the trainer's configs use the rules' own defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch

from .rules import RULES
from .rules.base import nearest

DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "adamw": {"lr": 1e-3},
    "muon": {"lr": 2e-2, "steps": 5, "msign_dtype": "bfloat16"},
    "normuon": {"lr": 2e-2, "steps": 5, "msign_dtype": "bfloat16"},
    "adamuon": {"lr": 1e-3, "steps": 5, "msign_dtype": "bfloat16"},
    "muon_sphere": {"lr": 5e-3, "msign_dtype": "float16"},
    "spectral_sphere": {"lr": 5e-3, "msign_dtype": "float16"},
    "muon_plus_plus": {"lr": 5e-3, "msign_dtype": "float16"},
    "spectral_descent": {"lr": 1e-3, "msign_dtype": "float16"},
}
ALIASES: Final = {
    "betas": ("beta1", "beta2"),
    "momentum": ("beta1",),  # schedulers that cycle the momentum set this key in all groups
    "eps": ("epsilon",),
    "ns_steps": ("steps",),
    "cautious_wd": ("cautious_decay",),
}
"""Maps option names used by torch's and dion's optimizers to rule fields."""
COMMON: Final = ("params", "param_names", "rule", "lr", "weight_decay", "units")
"""Group keys besides the fields of the rule."""
WHOLE: Final = ("nonfinite", "master_weights", "replicas", "exchange_dtype")
"""Optimizer options that cannot be set per group."""
HOSTS: Final = frozenset(
    ["betas", "eps", "initial_lr", "swa_lr", "base_momentum", "max_momentum", "optimizer", "step"]
)
"""Keys that schedulers and other programs add to the groups of any optimizer."""
ANY: Final = (True, False, None)
FIXED: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "fused": (ANY, "all parameters are always updated together"),
    "foreach": (ANY, "all parameters are always updated together"),
    "decoupled_weight_decay": ((True,), "weight decay is always decoupled"),
    "capturable": ((False, None), "nonfinite='skip' and a tensor lr are enough for capture"),
    "differentiable": ((False, None), "no gradient flows through a step"),
    "maximize": ((False, None), "minimise the negative loss"),
    "amsgrad": ((False, None), "use torch.optim.AdamW to keep the largest second moment"),
}
"""Options of torch's optimizers that are fixed here, mapped to allowed values and a reason."""
OF_ADAMW: Final = "for AdamW, set it in the groups whose rule is 'adamw'"
HINTS: Final[Mapping[str, str]] = {
    "adjust_lr_fn": "scale='spectral_kaiming' replaces torch's 'original', "
    "scale='align_adam_rms' replaces 'match_rms_adamw'",
    "ns_coefficients": "schedule='simple' uses torch's coefficients; other schedules are better",
    "betas": OF_ADAMW,
    "beta1": f"pass momentum; {OF_ADAMW}",
    "eps": f"no epsilon is needed, because the update of a zero matrix is zero; {OF_ADAMW}",
    "learning_rate": "pass lr",
    "wd": "pass weight_decay",
    "wdecay": "pass weight_decay",
    "mu": "pass momentum",
    "adjust_lr": "scale='spectral_mup' replaces dion's 'spectral_norm', scale='align_adam_rms' "
    "replaces 'rms_norm'",
}
"""Replacements for options of other optimizers, such as torch.optim.Muon."""
CHOICES: Final = frozenset({"use_muon", "algorithm"})
"""Keys that other libraries (KellerJordan/Muon, dion) use to select a group's rule."""


def rate_of(rule: str) -> float:
    """Return a rule's default learning rate; rules from other packages use AdamW's default."""
    return float(DEFAULTS.get(rule, DEFAULTS["adamw"])["lr"])


def fields_of(rule: str, *, exact: bool = False) -> dict[str, Any]:
    """Return a rule's fields with the library's defaults or, if `exact`, the rule's own defaults.

    Raises ValueError for an unknown rule.
    """
    defaults = {field.name: field.default for field in fields(RULES[rule])}
    library = {} if exact else DEFAULTS.get(rule, {})
    return defaults | {name: value for name, value in library.items() if name in defaults}


def rename_(rule: str, named: dict[str, Any]) -> None:
    """Rename options to the rule's fields, in place.

    Option names of torch's optimizers are translated via `ALIASES` if the translations are fields
    of the rule. If several names refer to the same field, the last one wins. Dtypes are replaced
    with their names. Raises TypeError unless betas are two numbers, and ValueError for an unknown
    rule.
    """
    rule_fields = RULES[rule].__dataclass_fields__
    for alias in [name for name in named if name in ALIASES and name not in rule_fields]:
        names = ALIASES[alias]
        if not rule_fields.keys() >= {*names}:
            continue
        value = named[alias]
        values = value if len(names) > 1 else (value,)
        if not isinstance(values, Sequence) or len(values) != len(names):
            raise TypeError(f"{alias} must be two numbers, got {value!r}")
        del named[alias]
        named.update(zip(names, values, strict=True))
    if isinstance(named.get("msign_dtype"), torch.dtype):
        named["msign_dtype"] = str(named["msign_dtype"]).removeprefix("torch.")


def _extends(name: str, field: str) -> bool:
    """Return whether a name adds a word to a field's name, as `weight_decay_mult` does."""
    before, found, after = f"_{name}_".partition(f"_{field}_")
    return bool(found) and len(before + after) > 2  # an initial, as in `n_steps`, is not a word


def check_options(rule: str, options: Mapping[str, Any], *, foreign: bool = False) -> None:
    """Raise TypeError for a name that is not a field of the rule, suggesting the closest field.

    Names in `FIXED` are accepted only with the values listed there. With `foreign`, names in
    `HOSTS` and names that do not resemble any field are also accepted, because other programs store
    keys in groups. Options that apply to the whole optimizer raise an error.
    """
    known = [*fields_of(rule), *COMMON, *WHOLE]
    similarity = 0.8 if foreign else 0.6  # "lrs" resembles "lr" by 0.8, "lr_scale" "scale" by 0.77
    unknown = options.keys() - set(known)
    for name in sorted({*WHOLE} & options.keys()):
        raise TypeError(f"{name!r} is not a group option; pass it to the optimizer")
    for name in sorted(CHOICES & unknown):
        raise TypeError(
            f"{name!r} is not supported; to select a rule, set rule='adamw' or another rule"
        )
    for name in sorted(FIXED.keys() & unknown):
        values, reason = FIXED[name]
        if not any(options[name] is value for value in values):
            allowed = " or ".join(map(str, values))
            raise TypeError(f"{name} must be {allowed}, got {options[name]!r}: {reason}")
    for name in sorted(unknown - FIXED.keys() - (HOSTS if foreign else set())):
        fields = [field for field in known if not (foreign and _extends(name, field))]
        hint = f"; {HINTS[name]}" if name in HINTS else nearest(name, fields, similarity=similarity)
        if hint or not foreign:
            raise TypeError(f"rule {rule!r} has no field {name!r}{hint}")
