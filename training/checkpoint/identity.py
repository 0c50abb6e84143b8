"""A run's identity: the facts that must not change when the run resumes."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from math import prod
from typing import Any, Final

from models.config import ModelConfig
from models.families import all_units
from spectral.rules import RULES
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.config import Config
from training.config.optimizer_section import GROUPS
from training.config.yaml_files import flat
from training.data.build_data import data_manifest
from training.data.hashes import file_sha256
from training.data.order import TrainingData
from training.data.token_bytes import tokenizer_file
from training.data.validation_data import ValidationData

OF_TRAIN: Final = ("global_batch", "precision", "fp8", "z_loss")
"""Keys in section `train` that affect results. `steps` is not included, because `steps` is part of
the kind `schedule`."""
BACKENDS: Final = {"attention_backend", "attention_kernel", "moe.backend"}
"""Keys in section `model` that only select an implementation and therefore only affect rounding."""


Identity = dict[str, dict[str, Any]]
"""Maps each kind of facts (such as `model` or `schedule`) to a mapping from dotted keys to
values."""


def identity(config: Config, facts: Identity) -> Identity:
    """Return the facts that must not change when a run resumes, grouped by kind.

    `facts` contains the facts of the kinds `data` and `tokenizer`, as returned by `data_facts`.
    Layout, micro-batches, backends, paths, logging, validation and `train.exit_step` are not part
    of the identity, because they do not affect results.
    """
    kept = {key: asdict(config.data)[key] for key in ("document_mask", "first_token_loss")}
    # If `after_share` or `with_decay` sets the start of a phase, changes in other sections may move
    # it.
    kept |= {f"phases[{i}].start": start for i, start in enumerate(config.phase_starts())}
    return {**facts, "data": {**facts["data"], **kept}, **settings(config)}


def saved_identity(info: CheckpointInfo) -> Identity:
    """Return the identity of the run that saved a checkpoint.

    Settings are read from the checkpoint's config. If the config was saved by an earlier version,
    missing keys are set to their defaults, and renamed keys are compared under their current names.
    Raises BrokenCheckpointError if the config file has changed since it was written.
    """
    return identity(info.config, info.meta["identity"])


def data_facts(
    config: Config, data: TrainingData, validation: Iterable[ValidationData]
) -> Identity:
    """Return the facts of the kinds `data` and `tokenizer` in a run's identity. The facts of kind
    `data` determine the tokens of training samples and validation sets. The only fact of kind
    `tokenizer` is the tokenizer's sha256, or None if the sha256 is unknown."""
    facts: dict[str, Any] = {"seed": config.seed, "sequence_length": config.train.sequence_length}
    for each in data.all_sets:
        facts[f"{each.name}.share"] = round(data.shares.get(each.name, 0.0), 6)
        facts[f"{each.name}.tokens"] = each.tokens
        facts[f"{each.name}.content"] = each.digest
        facts[f"{each.name}.sha256"] = each.stated_sha256
    for held_out in validation:
        facts[f"validation.{held_out.name}.content"] = held_out.set.digest
        facts[f"validation.{held_out.name}.sha256"] = held_out.set.stated_sha256
    for i, (phase, (_, mixture)) in enumerate(zip(config.data.phases, data.later, strict=True)):
        prefix = f"phases[{i}]"
        facts[f"{prefix}.{phase.beginning}"] = getattr(phase, phase.beginning)
        for name, share in mixture.shares.items():
            facts[f"{prefix}.{name}.share"] = round(share, 6)
        facts[f"{prefix}.fingerprint"] = mixture.fingerprint()
    # The fingerprint also covers those settings of the sample order that have no key above.
    facts["fingerprint"] = data.fingerprint()
    if config.data.tokenizer is None:
        manifest = data_manifest(config)
        sha256 = None if manifest is None else manifest.tokenizer.sha256
    else:
        path = tokenizer_file(config.data.tokenizer)
        sha256 = file_sha256(path) if path.exists() else None
    return {"data": facts, "tokenizer": {"sha256": sha256}}


def contents_of(facts: Identity) -> dict[str, str | None]:
    """Return the hash of each token set and of the tokenizer. `facts` is the result of
    `data_facts`. The keys of the returned mapping are `NAME` for a training set, `validation.NAME`
    for a validation set, and `tokenizer`."""
    end = ".content"
    sets = {k.removesuffix(end): v for k, v in facts["data"].items() if k.endswith(end)}
    return sets | {"tokenizer": facts["tokenizer"]["sha256"]}


def settings(config: Config) -> Identity:
    """Return the facts in a run's identity that depend only on the config."""
    units = all_units(config.model)
    model = model_facts(config.model)
    model["weights"] = f"{sum(prod(unit.shape) for unit in units):,} in {len(units):,} units"
    if config.pc is not None:  # the evaluator of PC(W) does not affect results
        model |= {f"pc.{k}": v for k, v in flat(asdict(config.pc)) if k != "evaluator"}
    optimizer = _optimizer(config)
    if config.gram_penalty is not None:
        penalty = flat(asdict(config.gram_penalty))
        optimizer |= {f"gram_penalty.{k}": v for k, v in penalty}
    return {
        "model": model,
        "optimizer": optimizer,
        "schedule": {**asdict(config.schedule), "steps": config.train.steps},
        "train": {
            **{key: asdict(config.train)[key] for key in OF_TRAIN},
            **{f"batch_ramp[{i}]": str(each) for i, each in enumerate(config.train.batch_ramp)},
        },
    }


def model_facts(model: ModelConfig) -> dict[str, Any]:
    """Return the model settings that affect results, keyed by dotted name. A size that is null in
    the config is replaced by the model's actual size."""
    scalar = model.query_pre_attn_scalar
    sizes = {
        "kv_heads": model.query_groups,
        "head_dim": model.head_size,
        "query_pre_attn_scalar": model.head_size if scalar is None else scalar,
    }
    return {k: v for k, v in flat(asdict(model) | sizes) if k not in BACKENDS}


def _optimizer(config: Config) -> dict[str, Any]:
    """Return the optimizer settings that affect results: the settings of groups and roles, of the
    rules in use, and of the distribution."""
    settings = asdict(config.optimizer)
    distributed = settings.pop("distributed")
    del settings["rules"]
    groups = [settings[name] for name in GROUPS]
    used = {each["rule"] for each in [*groups, *settings["roles"].values()]}
    plain = replace(config.optimizer, roles={})
    for role, overrides in settings["roles"].items():
        usual = asdict(plain.settings_for(role))  # overrides equal to these values are dropped
        settings["roles"][role] = {
            k: v for k, v in overrides.items() if v not in (None, usual.get(k))
        }
    settings["rules"] = {
        name: config.optimizer.rule(name).settings() for name in RULES if name in used
    }
    values = dict(flat(settings))
    values["tensor_mode"] = distributed["tensor_mode"]
    values["exchange_dtype"] = distributed["exchange_dtype"] or config.train.precision
    return values | {k: distributed[k] or "fp32" for k in ("gradient_dtype", "momentum_dtype")}
