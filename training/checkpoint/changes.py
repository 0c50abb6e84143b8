"""Changes between a saved and a resumed run, and the messages about these changes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any, Final, NamedTuple

from training.checkpoint.identity import BACKENDS, Identity, identity, saved_identity
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.config import Config
from training.config.schedule import step_factor
from training.config.yaml_files import flat

SHOWN: Final = 6
OF_STATE: Final = {
    *("qkv_units", "split_gate_up", "momentum_dtype"),
    *("pc.blocks", "pc.learnable_gamma", "moe.expert_bias"),
}
"""Keys that determine the names and dtypes of all checkpoint tensors other than weights. The update
rules of groups and roles also determine these names and dtypes."""
ROUNDING: Final = (
    *(f"model.{key}" for key in sorted(BACKENDS)),
    *(f"train.{key}" for key in ("micro_batch", "loss_chunk", "fused_loss", "fused_backward")),
    "train.compile",
)
"""Keys in all sections that only select an implementation and therefore only affect rounding."""


ABSENT: Final = "absent"
"""Value of a missing key in a `Change`."""


class Change(NamedTuple):
    """A value that differs between a saved and a resumed run."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        texts = (str(self.before), str(self.after))
        before, after = (text if len(text) <= 40 else f"{text[:12]}..." for text in texts)
        return f"{self.key} was {before} and is now {after}"


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes from `saved` to `now`."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        before, after = saved.get(key, ABSENT), now.get(key, ABSENT)
        if before != after:
            yield Change(key, before, after)


def differences(
    saved: Identity, now: Identity, allowed: Collection[str]
) -> dict[str, list[Change]]:
    """For each kind in `now` that is not in `allowed`, return the changes from `saved` to `now`.
    Kinds without changes are omitted."""
    found = {
        kind: [each for each in changes(saved.get(kind, {}), values) if not _optional(each)]
        for kind, values in now.items()
        if kind not in allowed
    }
    return {kind: changed for kind, changed in found.items() if changed}


def _optional(change: Change) -> bool:
    """Return whether a fact may be missing from one of the two runs, as it is in `change`.

    Validation sets and tasks may be added or removed. Only sets with a manifest have a sha256, and
    only large sets without a manifest have a modification time. If only one of the runs uses a
    rule, the settings of this rule are optional, because the change of rule is already reported for
    the group or role.
    """
    key, *values = change
    if key.startswith("rules."):
        return ABSENT in values
    optional = key.startswith(("validation.", "tasks.")) or key.endswith((".sha256", ".modified"))
    return optional and (ABSENT in values or None in values)


def announced(
    info: CheckpointInfo, config: Config, facts: Identity, machine: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """Return messages about changes since the checkpoint. Only accepted changes that affect metrics
    are reported.

    Changed facts of allowed kinds are reported, as is the resulting change of the learning rate.
    Changes of validation sets, tasks and spike detection are also reported. Changes of the layout,
    the micro-batch size, implementations, and the software and device in `machine` are reported
    because they affect rounding or speed.
    """
    saved, now = saved_identity(info), identity(config, facts)
    allowed = config.checkpoint.allow_change
    found = [*chain.from_iterable(differences(saved, now, now.keys() - allowed).values())]
    before, progress = info.config, info.meta["progress"]
    was, is_now = (
        f"{step_factor(progress['step'], progress['tokens'], each.train, each.schedule):.4g}"
        for each in (before, config)
    )
    if was != is_now:
        found.append(Change("learning-rate factor of the next step", was, is_now))
    found += changes(_other_settings(before), _other_settings(config))
    for kind in ("layout", "device", "versions"):
        stored = info.meta.get(kind)
        for key, value in machine[kind].items():
            if isinstance(stored, Mapping) and key in stored and stored[key] != value:
                found.append(Change(key, stored[key], value))
    return [str(change) for change in found]


def _other_settings(config: Config) -> dict[str, Any]:
    """Return the settings that affect metrics but are not part of the identity. Also return the
    path of the initial weights: a resumed run does not load the initial weights again."""
    values = dict(flat({"model": asdict(config.model), "train": asdict(config.train)}))
    rounding = {key: values[key] for key in ROUNDING if key in values}
    rounding["run.deterministic"] = config.run.deterministic
    origin = {"checkpoint.initialize_from": config.checkpoint.initialize_from}
    if config.pc is not None:
        rounding["pc.evaluator"] = config.pc.evaluator
    spikes = {f"spikes.{key}": value for key, value in asdict(config.spikes).items()}
    sets: dict[str, Any] = {f"validation.{name}": "there" for name in config.data.validation}
    sets |= {f"tasks.{name}": "there" for name in config.tasks.files}
    means = config.data.mean_weights()
    sets |= {f"weight of {name} in val/loss": weight for name, weight in means.items()}
    sizes = {
        "validation.samples": config.validation.samples, "tasks.examples": config.tasks.examples
    }  # fmt: skip
    return {**rounding, **origin, **spikes, **sizes, **sets}


def refusal(checkpoint: str, different: Mapping[str, Sequence[Change]], pc: bool) -> str:
    """Return the error message for a run that cannot resume: one line for each kind of facts that
    differs, then the remedy.

    `pc` is True if the run has PC layers.
    """
    lines = []
    for kind, changed in different.items():
        shown = ", ".join(map(str, changed[:SHOWN]))
        more = f", and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
        lines.append(f"{checkpoint} differs in its {kind}: {shown}{more}")
    every = [change for changed in different.values() for change in changed]
    # Changes that add or remove tensors other than weights, or change their dtype.
    of_state = [
        key
        for key, *values in every
        if key in OF_STATE
        or key.endswith(".rule")
        or (key == "moe.global_aux_loss" and 0.0 in values)
    ]
    if any(change.key == "weights" for change in every):
        todo = "the weights do not fit this model: set another run.dir"
    elif of_state:
        todo = f"the checkpoint cannot be loaded: {new_run(checkpoint, pc)}"
    else:
        todo = f"to continue anyway, set checkpoint.allow_change=[{', '.join(different)}]"
    return "\n".join([*lines, f"{todo}; to start over, use --resume none"])


def new_run(checkpoint: str, pc: bool) -> str:
    """Return the remedy for a checkpoint whose state does not fit a run. `pc` is True if the run
    has PC layers."""
    if pc:  # not checkpoint.initialize_from, which would change the effective weights of PC layers
        return "set another run.dir"
    source = f"checkpoint.initialize_from={checkpoint}"
    return f"set another run.dir, and {source} to start from its weights"
