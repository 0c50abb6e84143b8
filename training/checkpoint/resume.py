"""Choose the checkpoint to resume from, and compare the identities of the saved and the resumed
run. A run's identity contains the facts that must not change when the run resumes."""

import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch.distributed as dist

from models.config import ModelConfig
from models.families import all_units
from parallel.checkpoint.state_writer import first_rank
from parallel.comm.collectives import found_by_any
from parallel.disk import free_name
from spectral.rules import RULES
from training.checkpoint import checkpoints
from training.checkpoint.checkpoints import read_checkpoint
from training.checkpoint.stored_checkpoint import CheckpointInfo, ResumeError
from training.config import Config
from training.config.optimizer_section import GROUPS
from training.config.schedule import step_factor
from training.config.yaml_files import flat
from training.data.hashes import file_sha256
from training.data.manifest import Manifest
from training.data.order import TrainingData
from training.data.token_bytes import tokenizer_file
from training.data.validation_data import ValidationData
from training.errors import BrokenCheckpointError

SHOWN: Final = 6
OF_STATE: Final = {
    *("qkv_units", "split_gate_up", "momentum_dtype"),
    *("pc.blocks", "pc.learnable_gamma", "moe.expert_bias"),
}
"""Keys that determine the names and dtypes of all checkpoint tensors other than weights. The update
rules of groups and roles also determine these names and dtypes."""
OF_TRAIN: Final = ("global_batch", "precision", "fp8", "z_loss")
"""Keys in section `train` that affect results. `steps` is not included, because `steps` is part of
the kind `schedule`."""
BACKENDS: Final = {"attention_backend", "attention_kernel", "moe.backend"}
"""Keys in section `model` that only select an implementation and therefore only affect rounding."""
ROUNDING: Final = (
    *(f"model.{key}" for key in sorted(BACKENDS)),
    *(f"train.{key}" for key in ("micro_batch", "loss_chunk", "fused_loss", "fused_backward")),
    "train.compile",
)
"""Keys in all sections that only select an implementation and therefore only affect rounding."""

Identity = dict[str, dict[str, Any]]
"""Maps each kind of facts (such as `model` or `schedule`) to a mapping from dotted keys to
values."""


class Change(NamedTuple):
    """A value that differs between a saved and a resumed run. A missing value is given as
    "absent"."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        texts = (str(self.before), str(self.after))
        before, after = (text if len(text) <= 40 else f"{text[:12]}..." for text in texts)
        return f"{self.key} was {before} and is now {after}"


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
    config: Config,
    data: TrainingData,
    validation: Iterable[ValidationData],
    manifest: Manifest | None,
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
    sha256 = None if manifest is None else manifest.tokenizer.sha256
    if config.data.tokenizer is not None:
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


def differences(
    saved: Identity, now: Identity, allowed: Collection[str]
) -> dict[str, list[Change]]:
    """For each kind in `now` that is not in `allowed`, return the changes from `saved` to `now`.
    Kinds without changes are omitted."""
    found = {
        kind: list(changes(*comparable(saved.get(kind, {}), values)))
        for kind, values in now.items()
        if kind not in allowed
    }
    return {kind: changed for kind, changed in found.items() if changed}


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


def comparable(
    saved: Mapping[str, Any], now: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return copies of both mappings. An optional fact is omitted if it is missing from either
    mapping.

    Validation sets and tasks may be added or removed. Only sets with a manifest have a sha256, and
    only large sets without a manifest have a modification time. If only one of the runs uses a
    rule, the settings of this rule are optional, because the change of rule is already reported for
    the group or role.
    """
    optional = {
        key
        for key in saved.keys() | now.keys()
        if key.startswith(("validation.", "tasks.")) or key.endswith((".sha256", ".modified"))
    }
    dropped = {key for key in optional if saved.get(key) is None or now.get(key) is None}
    dropped |= {key for key in saved.keys() ^ now.keys() if key.startswith("rules.")}
    before, after = (
        {key: value for key, value in each.items() if key not in dropped} for each in (saved, now)
    )
    return before, after


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


def changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the changes from `saved` to `now`."""
    for key in [*saved, *(key for key in now if key not in saved)]:
        before, after = saved.get(key, "absent"), now.get(key, "absent")
        if before != after:
            yield Change(key, before, after)


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


@dataclass(frozen=True)
class Start:
    """The starting point of a run, chosen without modifying the run folder.

    info    checkpoint to resume from; None to start from step 0
    resume  `latest`, `none` or a step
    broken  reasons why broken checkpoints cannot be loaded, by step
    """

    info: CheckpointInfo | None
    resume: str
    broken: Mapping[int, str] = field(default_factory=dict)

    def settle(self, run_dir: str | Path) -> None:
        """Move broken and superseded checkpoints to other folders and print the new paths.

        For rank 0 only. Call this after all checks that can abort the run.
        """
        if self.resume == "none":
            folder = Path(run_dir) / checkpoints.FOLDER
            if folder.is_dir() and any(folder.iterdir()):
                moved = free_name(folder.with_name(f"{checkpoints.FOLDER}-aside"))
                folder.rename(moved)
                print(f"starting over; moved earlier checkpoints to {moved}", flush=True)
            return
        if names := checkpoints.sweep(run_dir):
            print(f"removed {len(names)} unfinished checkpoints: {', '.join(names)}", flush=True)
        if self.info is None:
            return
        for step, problem in self.broken.items():
            aside = checkpoints.quarantine(checkpoints.step_folder(run_dir, step))
            print(f"broken checkpoint: {problem}; moved to {aside}", flush=True)
        path = self.info.path
        latest = path.parent / checkpoints.LATEST
        named = (
            latest.read_text(encoding="utf-8", errors="replace").strip()
            if latest.is_file()
            else None
        )
        if named not in (None, path.name):
            print(f"{latest} contained {named!r:.80} instead of {path.name}", flush=True)
        if self.resume != "latest":
            later = checkpoints.set_aside_after(run_dir, self.info.step)
            if later is not None:
                print(f"moved checkpoints of later steps to {later}", flush=True)
        if named != path.name:
            checkpoints.name_latest(run_dir, path.name)
        print(f"continuing from {path}", flush=True)


def find_start(run_dir: str | Path, resume: str, now: Identity, allowed: Collection[str]) -> Start:
    """Decide whether a run starts from a fully verified checkpoint or from step 0.

    Collective, without side effects.

    resume   `latest`, `none` or a step
    now      identity of the resuming run
    allowed  kinds that may differ from the checkpoint's identity

    Raises ResumeError if there are checkpoints but the run cannot resume from any of them: only the
    user may decide to start over.
    """
    if resume == "none":
        return Start(None, resume)
    candidates = first_rank(lambda: candidate_steps(run_dir, resume))
    broken: dict[int, str] = {}
    for step in candidates:
        try:
            info = first_rank(partial(read_checkpoint, checkpoints.step_folder(run_dir, step)))
            first_rank(partial(_raise_differences, info, now, allowed))
            check_content(info)
        except BrokenCheckpointError as error:
            broken[step] = str(error)
            continue
        return Start(info, resume, broken)
    if broken:
        lines = [*broken.values(), "no checkpoint can be loaded; to start over, use --resume none"]
        raise ResumeError("\n".join(lines))
    return Start(None, resume)


def candidate_steps(run_dir: str | Path, resume: str) -> list[int]:
    """Return the steps of the checkpoints that a run may resume from, in order of preference.

    Raises ResumeError if the requested step has no checkpoint, or if only broken checkpoints are
    left.
    """
    there = checkpoints.steps(run_dir)
    if resume != "latest":
        if int(resume) not in there:
            steps = ", ".join(map(str, there)) or "none"
            raise ResumeError(f"{run_dir} has no checkpoint of step {resume}; available: {steps}")
        return [int(resume)]
    folder = Path(run_dir) / checkpoints.FOLDER
    if not there and folder.is_dir() and any(folder.glob("broken-*")):
        raise ResumeError(
            f"{folder} contains only broken checkpoints; to start over, use --resume none"
        )
    return there[::-1]


def _raise_differences(info: CheckpointInfo, now: Identity, allowed: Collection[str]) -> None:
    saved = saved_identity(info)
    if saved["model"]["weights"] != now["model"]["weights"]:  # the weights cannot be loaded
        allowed = {*allowed} - {"model"}
    different = differences(saved, now, allowed)
    if different:
        raise ResumeError(refusal(str(info.path), different, "pc.level" in now["model"]))


def check_content(info: CheckpointInfo) -> None:
    """Raise BrokenCheckpointError on every rank if a file has changed since it was written, or if a
    tensor contains non-finite values.

    Collective: all ranks must call this function. Each rank reads its share of the files and
    tensors.
    """
    share = slice(dist.get_rank(), None, dist.get_world_size())
    for find in (checkpoints.problems, checkpoints.not_finite):
        sentences = found_by_any(find(info, share))
        if sentences:
            raise BrokenCheckpointError("; ".join(sentences))


def tracker_id(start: CheckpointInfo | None, run_dir: str, run: str) -> str:
    """Return the id that trackers use for a run with the id `run`.

    A copied run folder gets another id, so that both runs can be tracked. A folder counts as a copy
    if the checkpoint was saved in a different folder that still exists.
    """
    if start is None:
        return run

    def find() -> str:
        saved = Path(start.config.run.dir)
        copied = saved.is_dir() and not saved.samefile(run_dir)
        return secrets.token_hex(4) if copied else str(start.meta.get("tracker_id", run))

    return first_rank(find)
