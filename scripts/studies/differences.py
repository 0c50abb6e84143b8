"""Find keys that differ between compared variants although the study does not set them."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from typing import Any, Final

from scripts.studies.description import Study, Variant, settings
from scripts.studies.trainer import ROOT, digests
from training.config import Config
from training.config.data import MEAN, MEASURED
from training.config.yaml_files import flat
from training.errors import InputError

Differences = dict[str, tuple[Any, Any]]
"""Maps a key to its values in a variant and in the variant's reference."""

NOT_TRAINED: Final = ("run.", "seed", "optimizer.matrix.rule")
"""Prefixes of keys that are never reported. These keys either do not affect results or select the
rules to compare."""


def pairs(study: Study) -> Iterator[tuple[str, str]]:
    """Yield (variant, reference) pairs.

    The reference of a variant is the variant named in `against`. If no variant of the study sets
    `against`, all other variants are compared with the first variant.
    """
    first = next(iter(study.variants))
    if any(variant.against for variant in study.variants.values()):
        yield from ((n, v.against) for n, v in study.variants.items() if v.against is not None)
    else:
        yield from ((name, first) for name in study.variants if name != first)


def differences(
    study: Study, start: Mapping[str, list[str]], configs: Mapping[str, Config]
) -> dict[str, Differences]:
    """Return the keys in which each variant unexpectedly differs from its reference.

    `start` holds settings tuned in another study, and `configs` the config of each variant.
    Differences are expected in keys that the study tunes, keys in the `overrides` of either
    variant, keys in `differs`, and hyper-parameters that exist in only one of the matrix rules.

    Raises InputError if a key in `differs` has the same value in both variants.
    """
    left_by_variant = {}
    for name, other in pairs(study):
        unlike = unlike_keys(configs[name], configs[other])
        for key in study.variants[name].differs:
            if not any(covered(each, [key]) for each in unlike):
                raise InputError(
                    f"{name}.differs must not contain {key}, because the value of {key} is the "
                    f"same in {name} and {other}"
                )
        declared = {*study.variants[name].differs}
        for each in (name, other):
            declared |= {*own_keys(study.variants[each]), *settings(start.get(each, []))}
        if left := {key: value for key, value in unlike.items() if not covered(key, declared)}:
            left_by_variant[name] = left
    return left_by_variant


def measured_differently(configs: Mapping[str, Config], study: Study) -> dict[str, list[str]]:
    """For each variant whose validation loss is not measured like its reference's, return the
    reasons: config keys, or the weights of the mean over validation sets. Validation sets at
    different paths are the same if their tokens are."""
    found = {}
    for name, other in pairs(study):
        reasons = [
            key
            for key, paths in unlike_keys(configs[name], configs[other]).items()
            if MEASURED.fullmatch(key) and not (key.endswith(".path") and same_tokens(*paths))
        ]
        data = [configs[each].data for each in (name, other)]
        if data[0].mean_weights() != data[1].mean_weights():
            reasons.append(MEAN)
        if reasons:
            found[name] = reasons
    return found


def same_tokens(*paths: str | None) -> bool:
    """Return whether all paths are datasets with the same tokens and tokenizer."""
    found = [path is not None and digests(ROOT / path) for path in paths]
    return all(each and each == found[0] for each in found)


def covered(key: str, keys: Collection[str]) -> bool:
    """Return whether `keys` contains `key`, a parent section of `key`, or a key inside `key`."""
    return any(f"{key}.".startswith(f"{k}.") or f"{k}.".startswith(f"{key}.") for k in keys)


def own_keys(variant: Variant) -> set[str]:
    """Return the keys that a study sets or tunes for a variant."""
    own = {*settings(variant.overrides)}
    for stage in variant.search.values():
        own |= {key for keys in (*stage.grid, *stage.factors) for key in keys.split("+")}
        own |= {key for choice in stage.choices for key in settings(choice)}
    return own


def unlike_keys(one: Config, other: Config) -> Differences:
    """Return the keys that affect results and differ between two configs.

    A section that is present in only one of the configs counts as a single key.
    """
    first, second = dict(flat(asdict(one))), dict(flat(asdict(other)))
    used = [
        {str(value) for key, value in each.items() if key.endswith(".rule")}
        for each in (first, second)
    ]
    rules = asdict(one.optimizer)["rules"]
    unshared = rules.keys() - (used[0] & used[1])
    skipped = [*NOT_TRAINED, *(f"optimizer.rules.{rule}." for rule in unshared)]
    unlike: Differences = {}
    for key in first.keys() | second.keys():
        if key.startswith(tuple(skipped)) or first.get(key) == second.get(key):
            continue
        lacks = second if key in first else first
        section = next((each for each in lacks if key.startswith(f"{each}.")), None)
        if section is not None:
            unlike[section] = (first.get(section, "set"), second.get(section, "set"))
        else:
            unlike[key] = (first.get(key), second.get(key))
    rule, its = one.optimizer.matrix.rule, other.optimizer.matrix.rule
    if rule != its:  # compare the hyper-parameters that exist in both matrix rules
        mine, theirs = rules[rule], asdict(other.optimizer)["rules"][its]
        for key in mine.keys() & theirs.keys():
            if mine[key] != theirs[key]:
                unlike[f"optimizer.rules.{rule}.{key}"] = (mine[key], theirs[key])
    return dict(sorted(unlike.items()))


def sentences(study: Study, differ: Mapping[str, Differences]) -> list[str]:
    """Return a message for each variant with unexpected differences from its reference."""
    compared = dict(pairs(study))
    return [
        f"{name} and {compared[name]} also differ in "
        + ", ".join(f"{key} ({mine}, {its})" for key, (mine, its) in keys.items())
        + f"; if this is intentional, add differs: [{', '.join(keys)}] to {name}"
        for name, keys in differ.items()
    ]
