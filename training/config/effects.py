"""Settings that a run does not use: those that other settings, often of a base, leave without
effect. A section refuses what makes no sense in it (`ignored`); what is here is said at the start,
but for settings of what an interval of 0 has switched off.
"""

from collections.abc import Iterator
from operator import attrgetter

from models.section import shown
from spectral.rules import RULES
from spectral.rules.base import undoes_decay
from training.config.optimizer import GroupConfig, groups_of
from training.config.schema import Config


def without_effect(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that is not at its default and has no effect."""
    yield from _decays(config)
    for section, keys, wrong, when in _unused(config):
        part = attrgetter(section)(config)
        for key in keys:
            value = getattr(part, key)
            if wrong and value != getattr(type(part), key):
                yield f"{section}.{key} = {shown(value)} has no effect {when}"


def _decays(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    groups = groups_of(config.model)
    places: dict[str, GroupConfig] = {name: getattr(optimizer, name) for name in groups}
    places |= {
        f"roles.{role}": optimizer.settings_for(role)
        for role, own in optimizer.roles.items()
        if own.weight_decay is not None or own.rule is not None
    }
    for place, own in places.items():
        if own.weight_decay > 0 and undoes_decay(optimizer.rule(own.rule)):
            yield (
                f"optimizer.{place}.weight_decay = {own.weight_decay} has no effect with the hard "
                f"retraction of {own.rule}, which sets the spectral norm"
            )


def _unused(config: Config) -> Iterator[tuple[str, tuple[str, ...], object, str]]:
    """Yield a section, keys of it, whether they have no effect, and when that is so."""
    kind, spikes, monitors = config.schedule.kind, config.spikes, config.monitors
    yield "schedule", ("cooldown_fraction",), kind != "wsd", f"with schedule.kind {kind}"
    yield "schedule", ("min_ratio",), kind == "constant", f"with schedule.kind {kind}"
    yield "spikes", ("window",), spikes.deviations is None, "with spikes.deviations null"
    quiet = monitors.interval != 0 and "noise" not in monitors.groups
    yield "monitors", ("noise_samples",), quiet, "without noise in monitors.groups"
    unseen = not config.data.validation and not config.data.mock
    keys = ("interval", "samples", "samples_interval", "samples_tokens")
    yield "validation", keys, unseen, "without sets in data.validation"
    silent = not unseen and config.validation.samples_interval == 0
    yield "validation", ("samples_tokens",), silent, "with validation.samples_interval 0"
    yield "tasks", ("interval", "examples"), not config.tasks.files, "without tasks.files"
    untracked = "wandb" not in config.log.trackers
    yield "log.wandb", ("project",), untracked, "without wandb in log.trackers"
    whole = config.checkpoint.keep_last is None
    yield "checkpoint", ("keep_every",), whole, "with checkpoint.keep_last null"
    ungated = not config.model.gated
    yield "optimizer", ("split_gate_up",), ungated, "with an activation without a gate"
    pc, moe = config.pc, config.model.moe
    if pc is not None:
        keys, shape = ("degree", "cutoff", "alpha", "upper"), pc.polynomial.kind
        yield "pc.polynomial", keys, shape != "fitted", f"with pc.polynomial.kind {shape}"
        untracked_norm = pc.spectral_norm == "none"
        yield "pc", ("steps", "norm_recovery"), untracked_norm, "with pc.spectral_norm none"
        fixed_gamma = not pc.learnable_gamma
        decays = ("gamma_lr", "gamma_weight_decay")
        yield "pc", decays, fixed_gamma, "with pc.learnable_gamma false"
    if moe is not None:
        fixed = not moe.expert_bias
        yield "model.moe", ("expert_bias_rate",), fixed, "with model.moe.expert_bias false"


def settings_of_unused_rules(config: Config) -> Iterator[str]:
    """Yield the key of each setting that is not at its default, of a rule that no role uses.

    Bases have settings for the rules of all their recipes.
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
