"""Find settings that have no effect because of other settings.

Such settings are often inherited from a base config, so a run lists them at startup instead of
raising an error. Settings of a feature disabled by an interval of 0 are not listed.
Contradictory settings within a section are rejected instead (`models.section.ignored`).
"""

from collections.abc import Iterator
from math import lcm
from operator import attrgetter

from models.section import shown
from spectral.rules import RULES
from training.config.optimizer_section import GroupConfig, groups_of
from training.config.schema import Config


def without_effect(config: Config) -> Iterator[str]:
    """Yield a message for each non-default setting that has no effect."""
    optimizer = config.optimizer
    groups = groups_of(config.model)
    sections: dict[str, GroupConfig] = {name: getattr(optimizer, name) for name in groups}
    for role, overrides in optimizer.roles.items():
        if overrides.weight_decay is not None or overrides.rule is not None:
            sections[f"roles.{role}"] = optimizer.settings_for(role)
    for path, settings in sections.items():
        decay, rule = settings.weight_decay, settings.rule
        if decay > 0 and optimizer.rule(rule).undoes_decay:
            yield (
                f"optimizer.{path}.weight_decay = {decay} has no effect with the hard "
                f"retraction of {rule}, which sets the spectral norm"
            )
    yield from _never(config)
    for path, keys, unused, reason in _unused(config):
        section = attrgetter(path)(config)
        for key in keys:
            value = getattr(section, key)
            if unused and value != getattr(type(section), key):
                yield f"{path}.{key} = {shown(value)} has no effect {reason}"


def _never(config: Config) -> Iterator[str]:
    """Yield a message for each setting that would only take effect after step `train.steps` or
    after a timeout that ends the run."""
    train, schedule, checkpoint = config.train, config.schedule, config.checkpoint
    every = checkpoint.keep_every if checkpoint.interval and checkpoint.keep_last else None
    validated = config.data.validation or config.data.mock
    firsts = {
        "monitors.interval": config.monitors.interval,
        "validation.samples_interval": config.validation.samples_interval if validated else None,
        "checkpoint.keep_every": None if every is None else lcm(every, checkpoint.interval),
        "watchdog.replica_interval": config.watchdog.replica_interval,
    }
    for key, first in firsts.items():
        if first is not None and first > train.steps:
            value = attrgetter(key)(config)
            multiple = (
                "" if value == first else f" (first at step {first}, with checkpoint.interval)"
            )
            yield f"{key} = {value}{multiple} has no effect in a run of {train.steps} steps"
    spikes, limit = config.spikes, config.parallel.timeout_seconds / 2
    if spikes.deviations is not None and spikes.window >= train.steps:
        yield (
            f"spikes.deviations = {spikes.deviations} has no effect in a run of {train.steps} "
            f"steps, because the first spikes.window = {spikes.window} losses never count as spikes"
        )
    hang = config.watchdog.hang_seconds
    if hang is not None and hang > limit and hang != type(config.watchdog).hang_seconds:
        yield (
            f"watchdog.hang_seconds = {hang:g} has no effect with parallel.timeout_seconds = "
            f"{2 * limit:g}: half of that timeout is used instead"
        )
    if schedule.kind == "wsd" and not schedule.cooldown_steps(schedule.length(train)):
        yield (
            f"schedule.cooldown_fraction = {schedule.cooldown_fraction} has no effect with "
            f"train.steps = {train.steps}: the cooldown is shorter than half a step"
        )


def _unused(config: Config) -> Iterator[tuple[str, tuple[str, ...], object, str]]:
    """Yield (section, keys, unused, reason) tuples. `unused` is true if the keys of the section
    have no effect."""
    kind, monitors, samples = config.schedule.kind, config.monitors, config.validation
    yield "schedule", ("cooldown_fraction",), kind != "wsd", f"with schedule.kind {kind}"
    yield "schedule", ("min_ratio",), kind == "constant", f"with schedule.kind {kind}"
    yield "spikes", ("window",), config.spikes.deviations is None, "with spikes.deviations null"
    no_noise = monitors.interval != 0 and "noise" not in monitors.groups
    yield "monitors", ("noise_samples",), no_noise, "without noise in monitors.groups"
    no_sets = not config.data.validation and not config.data.mock
    keys: tuple[str, ...] = ("interval", "samples", "samples_interval", "samples_tokens")
    yield "validation", keys, no_sets, "without sets in data.validation"
    no_samples = not no_sets and samples.samples_interval == 0
    yield "validation", ("samples_tokens",), no_samples, "with validation.samples_interval 0"
    yield "tasks", ("interval", "examples"), not config.tasks.files, "without tasks.files"
    no_wandb = "wandb" not in config.log.trackers
    yield "log.wandb", ("project",), no_wandb, "without wandb in log.trackers"
    keep_all = config.checkpoint.keep_last is None
    yield "checkpoint", ("keep_every",), keep_all, "with checkpoint.keep_last null"
    no_gate = not config.model.gated
    yield "optimizer", ("split_gate_up",), no_gate, "with an activation without a gate"
    pc, moe = config.pc, config.model.moe
    if pc is not None:
        keys, polynomial = ("degree", "cutoff", "alpha", "upper"), pc.polynomial.kind
        reason = f"with pc.polynomial.kind {polynomial}"
        yield "pc.polynomial", keys, polynomial != "fitted", reason
        no_norm = pc.spectral_norm == "none"
        yield "pc", ("steps", "norm_recovery"), no_norm, "with pc.spectral_norm none"
        keys = ("gamma_lr", "gamma_weight_decay")
        yield "pc", keys, not pc.learnable_gamma, "with pc.learnable_gamma false"
    if moe is not None:
        keys, no_bias = ("expert_bias_rate",), not moe.expert_bias
        yield "model.moe", keys, no_bias, "with model.moe.expert_bias false"


def settings_of_unused_rules(config: Config) -> Iterator[str]:
    """Yield the keys of non-default settings for rules that no role uses.

    Base configs contain such settings because the recipes that inherit them use different rules.
    """
    optimizer = config.optimizer
    used = {optimizer.settings_for(role).rule for role in optimizer.roles}
    used |= {getattr(optimizer, group).rule for group in groups_of(config.model)}
    for name in RULES.keys() - used:
        rule = optimizer.rule(name)
        default = vars(type(rule)())
        for key, value in vars(rule).items():
            if value != default[key]:
                yield f"optimizer.rules.{name}.{key}"
