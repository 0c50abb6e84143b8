"""What makes a run the run it is, and how it differs from the one a checkpoint is of."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, get_args

from training.config import Config
from training.config.sections.running import Kind
from training.data.manifest import Manifest
from training.data.order import TrainingData

KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
SHOWN: Final = 6
BACKENDS: Final = {"attention_backend", "moe.backend"}
"""Keys of the model that say how it is computed, not what."""

Identity = dict[str, dict[str, Any]]
"""Values by kind and dotted key."""


def identity(config: Config, data: TrainingData, manifest: Manifest | None) -> Identity:
    """Everything that must stay the same for a run to be continued, by kind.

    Not in it is what no result depends on: layout, micro-batches, backends, paths, logging,
    validation, and how long this start of the run is to go on.
    """
    model = {k: v for k, v in flat(asdict(config.model)) if k not in BACKENDS}
    if config.pc is not None:  # where PC(W) is evaluated changes no result
        model |= {f"pc.{k}": v for k, v in flat(asdict(config.pc)) if k != "evaluator"}
    optimizer = optimizer_identity(config)
    if config.gram_penalty is not None:
        penalty = flat(asdict(config.gram_penalty))
        optimizer |= {f"gram_penalty.{k}": v for k, v in penalty}
    train = {"global_batch": config.train.global_batch, "precision": config.train.precision}
    found: Identity = {
        "data": _data(config, data),
        "tokenizer": {"sha256": _tokenizer(config, manifest)},
        "model": model,
        "optimizer": optimizer,
        "schedule": {**asdict(config.schedule), "steps": config.train.steps},
        "train": train,
    }
    # As it is when read back from JSON.
    plain: Identity = json.loads(json.dumps(found))
    return plain


def differences(saved: Identity, now: Identity, allowed: Collection[str]) -> dict[str, list[str]]:
    """By kind that is not allowed to change, a sentence for each value that did."""
    found = {
        kind: list(changes(saved.get(kind, {}), now[kind])) for kind in KINDS if kind not in allowed
    }
    return {kind: lines for kind, lines in found.items() if lines}


def refusal(place: str, different: Mapping[str, list[str]]) -> str:
    """The message that refuses to continue, a line per kind and one that says what to do."""
    lines = []
    for kind, changes in different.items():
        more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
        lines.append(f"{place} has another {kind}: {', '.join(changes[:SHOWN])}{more}")
    if any(change.startswith("pc.") for change in different.get("model", [])):
        lines.append(
            "a new run that begins with the same weights, PC layers merged into them, sets "
            "checkpoint.initialize_from"
        )
    names = ", ".join(different)
    lines.append(
        f"to continue it all the same set checkpoint.allow_change=[{names}]; "
        "--resume none starts over"
    )
    return "\n".join(lines)


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each value that is not the same."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        before, after = saved.get(key, "absent"), now.get(key, "absent")
        if before != after:
            yield f"{key} was {_short(before)}, is {_short(after)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _data(config: Config, data: TrainingData) -> dict[str, Any]:
    """What decides which tokens sample k holds."""
    found: dict[str, Any] = {"seed": config.seed, "sequence_length": config.train.sequence_length}
    shares = data.blend.quotas / len(data.blend.choice)
    for each, share in zip(data.sets, shares, strict=True):
        found[f"{each.name}.share"] = round(float(share), 6)
        found[f"{each.name}.tokens"] = each.tokens
        found[f"{each.name}.content"] = each.digest()
    # The last word: it covers what decides the order beyond these.
    found["fingerprint"] = data.fingerprint()
    return found


def _tokenizer(config: Config, manifest: Manifest | None) -> str | None:
    """sha256 of the tokenizer's file, None if it is not known."""
    if config.data.tokenizer is None:
        return None if manifest is None else manifest.tokenizer.sha256
    path = Path(config.data.tokenizer)
    path = path / "tokenizer.json" if path.is_dir() else path
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None


def optimizer_identity(config: Config) -> dict[str, Any]:
    """The settings of the groups, of the rules in use, and of what the distribution changes."""
    settings = asdict(config.optimizer)
    distributed = settings.pop("distributed")
    rules = settings.pop("rules")
    groups = [settings[name] for name in ("matrix", "embedding", "head", "scalar")]
    used = {each["rule"] for each in [*groups, *settings["roles"].values()]}
    if settings["layer_rates"] is None:
        del settings["layer_rates"]
    for role in settings["roles"].values():
        if role["lr_factor"] == 1.0:
            del role["lr_factor"]
    if settings["auto_rule"] is None:
        del settings["auto_rule"]
    else:
        used.add("adamw")
    settings["rules"] = {name: rule for name, rule in rules.items() if name in used}
    found = dict(flat(settings))
    return found | {key: distributed[key] for key in ("tensor_mode", "momentum_dtype")}


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything in nested mappings."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
