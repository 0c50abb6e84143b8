"""A run from start to finish: resuming, training, saving and logging."""

import contextlib
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Final

import torch.distributed as dist

from parallel.checkpoint.state_writer import WriterError, first_rank
from parallel.comm.collectives import Agreement, CollectiveError, absent_ranks, from_all
from parallel.comm.groups import Groups
from parallel.optimizer.distributed_optimizer import DisagreementError, DistributedOptimizer
from training.assignments import config_routes
from training.build import build_trainer, restore, rewind
from training.checkpoint.checkpoints import check_place
from training.checkpoint.identity import Identity, data_facts, identity
from training.checkpoint.initial_weights import InitialWeights, initial_weights
from training.checkpoint.resume import check_content, find_start, tracker_id
from training.checkpoint.saving import CheckpointError, Saver
from training.checkpoint.stored_checkpoint import CheckpointInfo, ResumeError
from training.config import Config, check
from training.config.yaml_files import flat
from training.data.build_data import (
    build_data,
    build_tasks,
    check_rows,
    tokenizer_path,
    unverified_facts,
)
from training.data.order import TrainingData
from training.data.tasks import Task
from training.data.validation_data import ValidationData
from training.errors import InputError
from training.lifecycle.lifecycle import Lifecycle, StopRequests, Watchdog
from training.lifecycle.pace import collected_at_steps
from training.lifecycle.run_folder import (
    FolderError,
    HeldFolder,
    locked,
    mark_done,
    mark_started,
    starts_again,
)
from training.lifecycle.terminal import Interrupts
from training.loop import Hooks, Loop, Outcome, ignore
from training.machine.backends import (
    check_backends,
    kernel_of,
)
from training.machine.device import (
    device_facts,
    environment_variables,
    repeatable,
    versions,
)
from training.machine.start import require_agreement
from training.nonfinite import NonFiniteError
from training.opening_notes import (
    data_notes,
    kernel_notes,
    resume_notes,
    settings_notes,
    weight_notes,
)
from training.planning.added_cost import monitor_cost
from training.run_log import RunLog, write_failure
from training.step import StepResult, Trainer

SAME_ON_ALL_RANKS: Final = (
    InputError,
    NonFiniteError,
    DisagreementError,
    CheckpointError,
    WriterError,
)
"""Errors that all ranks raise together, with the same message."""


def all_owners(optimizer: DistributedOptimizer) -> dict[str, int]:
    """Map the name of every matrix in the model to the global rank of its owner. Collective."""
    gathered = from_all(dict(optimizer.owners))
    # For a tied embedding, the owner is on the first stage; the last stage updates a copy.
    return {name: rank for owners in reversed(gathered) for name, rank in owners.items()}


def train(
    config: Config,
    groups: Groups,
    *,
    resume: str = "latest",
    on_step: Callable[[int, StepResult], None] = ignore,
    interrupts: Interrupts | None = None,
) -> Outcome:
    """Train to the end of the run on this rank. Only rank 0 writes to `run.dir` and prints.

    `resume` is `latest` (the newest checkpoint in `run.dir`), `none`, or the step of a checkpoint.
    If torchrun or SLURM has restarted the command, `resume` counts as `latest`. `on_step` is called
    after every step with the number and the result of the step. `interrupts` handles Ctrl-C, which
    stops the run.

    Raises ConfigError if a backend is not installed, or if a CUDA graph is requested without a GPU;
    DataError if the data cannot be used; FolderError if the run folder cannot be used; ResumeError
    if a checkpoint cannot be used; NonFiniteError after too many consecutive skipped steps; and
    CheckpointError if a save fails.
    """
    check_backends(config, groups.device)
    data, validation = build_data(config, share=(groups.rank, dist.get_world_size()))
    tasks = build_tasks(config)
    data_identity = agreed_facts(config, data, validation, tasks)
    run_dir = config.run.dir
    with contextlib.ExitStack() as stack:
        if config.run.deterministic:
            stack.enter_context(repeatable())
        first_rank(lambda: stack.enter_context(locked(run_dir)))
        chosen = find_start(
            run_dir,
            resumed(run_dir, resume, groups.rank),
            identity(config, data_identity),
            config.checkpoint.allow_change,
        )
        start = chosen.info
        check_start(config, start)
        if start is not None and is_finished(config, start):
            first_rank(lambda: chosen.settle(run_dir))
            return nothing_to_do(config, groups, start)
        kernel = kernel_of(config, groups) if groups.device.type == "cuda" else None
        weights = first_weights(config, data_identity) if start is None else None
        cost = monitor_cost(config, dist.get_world_size(), groups.device)
        trainer = build_trainer(
            config,
            groups,
            data,
            validation,
            tasks=tasks,
            weights=weights,
            monitor_interval=cost.interval,
        )
        stack.callback(trainer.update.release)
        if start is not None:
            restore(trainer, start)
        if config.checkpoint.interval:
            first_rank(lambda: check_place(run_dir))
        # Nothing above this line changes the run folder, and no check below it ends the run.
        first_rank(lambda: chosen.settle(run_dir))
        if interrupts is not None:
            interrupts.training_begins(saves=config.checkpoint.interval > 0)
        first_rank(lambda: mark_started(run_dir))
        facts = run_facts(config, groups, data_identity, start, weights)
        log = open_log(trainer, facts, start, weights, kernel)
        if log is not None:
            stack.callback(log.close)
            if cost.interval:
                log.note(
                    "monitors", trainer.progress.step, f"monitors: {cost.up_to(config.train.last)}"
                )
        lifecycle = stack.enter_context(accompanied(trainer, facts, start, interrupts))
        hooks = run_hooks(trainer, lifecycle, log, on_step)
        try:
            with naming_absent(groups), collected_at_steps():
                outcome = Loop(trainer, hooks).run()
        except Exception as error:
            if reports(error, groups.rank) and not isinstance(error, FolderError):
                write_failure(run_dir, trainer.progress.step, groups.rank, error)
            raise
        if log is not None:
            log.conclude(outcome, resume)
    return outcome


def agreed_facts(
    config: Config, data: TrainingData, validation: Sequence[ValidationData], tasks: Sequence[Task]
) -> Identity:
    """Check that the facts about the data are the same on all ranks, and return the facts that are
    part of the run's identity."""
    facts = data_facts(config, data, validation)
    facts["data"] |= {f"tasks.{task.name}.sha256": task.sha256 for task in tasks}
    sets = [*data.all_sets, *(each.set for each in validation)]
    require_agreement({**dict(flat(facts)), **unverified_facts(config, sets)})
    # Copies of a set on different nodes may have different times, so all ranks use the times on the
    # first rank.
    times = first_rank(lambda: {f"{each.name}.modified": each.modified for each in data.all_sets})
    facts["data"] |= {key: time for key, time in times.items() if time is not None}
    return facts


def run_facts(
    config: Config,
    groups: Groups,
    data_identity: Identity,
    start: CheckpointInfo | None,
    weights: InitialWeights | None,
) -> dict[str, Any]:
    """Return the facts about the run that are stored in the meta.json of each of its checkpoints.
    Collective."""
    if start is None:
        run_id, origin = first_rank(lambda: secrets.token_hex(4)), None
    else:
        run_id, origin = str(start.meta["run_id"]), start.meta.get("initialized_from")
    if weights is not None:
        info = weights.info
        origin = {"path": str(info.path), "step": info.step, "sha256": info.sha256}
    return {
        "identity": data_identity,
        "run_id": run_id,
        "tracker_id": tracker_id(start, config.run.dir, run_id),
        "initialized_from": origin,
        "versions": {**versions()},
        "device": {**device_facts(groups.device)},
        "environment": {**environment_variables()},
        "layout": {"ranks": dist.get_world_size(), **asdict(config.parallel)},
    }


def check_start(config: Config, start: CheckpointInfo | None) -> None:
    """Check that a run with this config can continue from the checkpoint `start`. `start` is None
    for a new run.

    Raises ResumeError if the config sets initial weights but the checkpoint's run started without
    initial weights. Raises InvalidConfigError if the batch size of a later stage of the batch ramp
    is not valid for this world size.
    """
    path = config.checkpoint.initialize_from
    if start is not None and path is not None and start.meta.get("initialized_from") is None:
        raise ResumeError(
            f"checkpoint.initialize_from={path} requires a new run, but {start.path} is a "
            "checkpoint of a run started without this key: set another run.dir, or start over "
            "with --resume none"
        )
    if config.train.batch_ramp:
        done = {} if start is None else start.meta["progress"]
        check(config, dist.get_world_size(), done.get("step", 0), done.get("tokens", 0))


def first_weights(config: Config, facts: Identity) -> InitialWeights | None:
    """Return the weights that this run loads from another run, or None if it initialises its own.

    Raises BrokenCheckpointError or ResumeError if the weights from another run cannot be used, and
    VocabularyError if a newly initialised embedding would have more rows than the data needs.
    """
    weights = initial_weights(config, facts["tokenizer"]["sha256"], tokenizer_path(config))
    if weights is None:
        check_rows(config)
    else:
        check_content(weights.info)
    return weights


def run_hooks(
    trainer: Trainer,
    lifecycle: Lifecycle,
    log: RunLog | None,
    on_step: Callable[[int, StepResult], None],
) -> Hooks:
    """Return the hooks of a run. If logging fails, the run saves a checkpoint before it ends."""
    hooks = Hooks(
        on_step=on_step, rewind=partial(rewind, trainer, lifecycle, log), lifecycle=lifecycle
    )
    if log is None:
        return hooks
    return replace(
        hooks,
        report=lifecycle.deferring(log.report),
        record=lifecycle.deferring(log.record),
        note=lifecycle.deferring(log.note),
    )


def resumed(run_dir: str, resume: str, rank: int) -> str:
    """Return `resume`, or `latest` if torchrun or SLURM has restarted the command."""
    if not any(from_all(starts_again(run_dir))) or resume == "latest":
        return resume
    if rank == 0:
        print(
            f"--resume {resume} was applied at the first start: resuming from the newest checkpoint"
        )
    return "latest"


def open_log(
    trainer: Trainer,
    facts: Mapping[str, Any],
    start: CheckpointInfo | None,
    weights: InitialWeights | None,
    kernel: str | None,
) -> RunLog | None:
    """Open the run log on rank 0 and write its opening notes. Return None on other ranks."""
    routes = config_routes(trainer.config, all_owners(trainer.optimizer))
    counts = trainer.spectral.state()  # collective
    rescaled = {} if weights is None else trainer.optimizer.rescalings()  # collective
    if trainer.groups.rank > 0:
        return None
    log, step = RunLog(trainer, routes, counts, facts), trainer.progress.step
    notes = [
        *kernel_notes(trainer, kernel),
        *data_notes(trainer),
        *(() if weights is None else weight_notes(weights, rescaled, facts)),
        *(() if start is None else resume_notes(trainer, start, facts)),
        *settings_notes(trainer),
    ]
    for kind, text in notes:
        log.note(kind, step, text)
    if not any(row.lr for row in routes):
        log.note("warning", step, "warning: all learning rates are 0, so weights will not change")
    return log


def reports(error: Exception, rank: int) -> bool:
    """Return whether this rank writes an event about its error.

    Rank 0 writes errors raised on all ranks, and each rank writes errors raised only on that rank.
    If ranks are missing from a collective, the lowest rank that is present writes the error.
    """
    if isinstance(error, CollectiveError):
        return all(before in error.absent for before in range(rank))
    return rank == 0 or not isinstance(error, SAME_ON_ALL_RANKS)


@contextlib.contextmanager
def naming_absent(groups: Groups) -> Iterator[None]:
    """Context manager that adds the names of missing ranks to the error of a failed collective."""
    try:
        yield
    except CollectiveError as error:
        silent = absent_ranks(groups.store, groups.rank, dist.get_world_size())
        if silent:
            named = ", ".join(f"rank {rank} (host {host})" for rank, host in silent.items())
            raise CollectiveError(f"{error}; no answer from {named}", silent) from error
        raise


def is_finished(config: Config, start: CheckpointInfo) -> bool:
    """Return whether the run ends at this checkpoint and has reported all of its metrics."""
    return start.step >= config.train.last and not start.meta["progress"]["unreported"]


def nothing_to_do(config: Config, groups: Groups, start: CheckpointInfo) -> Outcome:
    """Print that the run has already finished, and return its outcome."""
    if groups.rank == 0:
        mark_done(config.run.dir, start.step >= config.train.steps)
        longer = "train.steps and set checkpoint.allow_change=[schedule]"
        if config.train.exits_early:
            longer = "train.exit_step"
        print(
            f"nothing to do: the run ended at {start.path}; to train longer, increase {longer}; to "
            "start over, use --resume none",
            flush=True,
        )
    return Outcome(start.step, {})


@contextlib.contextmanager
def accompanied(
    trainer: Trainer,
    facts: Mapping[str, Any],
    start: CheckpointInfo | None,
    interrupts: Interrupts | None,
) -> Iterator[Lifecycle]:
    """Context manager that provides checkpointing, the watchdog and stop requests. Each checkpoint
    stores `facts`."""
    config, groups = trainer.config, trainer.groups
    folder = HeldFolder(config.run.dir)
    saver = Saver(
        config, groups, trainer.model, trainer.optimizer, facts, check_folder=folder.check
    )
    saver.last_saved = None if start is None else start.step
    watchdog = Watchdog(config, groups.rank)
    stops = StopRequests(config.run.dir, config.stop, first=groups.rank == 0, interrupts=interrupts)
    with contextlib.closing(folder), watchdog, stops:
        try:
            yield Lifecycle(
                config, saver, stops, watchdog, Agreement(groups.host), trainer.progress.step
            )
        finally:
            saver.abandon()
