"""Build a run's model, optimizer and trainer. Load a checkpoint into the trainer to resume or
rewind the run."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.checkpoint.state import StateError, load_state
from parallel.checkpoint.state_writer import first_rank
from parallel.comm.groups import Groups
from parallel.error_text import last_line
from parallel.model import ModelOptions, ParallelModel, build_model
from parallel.observe.weight_watch import check_replicas
from parallel.optimizer.distributed_optimizer import DistributedOptimizer, build_optimizer
from parallel.storage.bucket_layout import BucketPlanner
from training.assignments import config_assignments, unit_options
from training.checkpoint import checkpoints
from training.checkpoint.changes import new_run
from training.checkpoint.initial_weights import InitialWeights
from training.checkpoint.resume import check_content
from training.checkpoint.saving import set_rng_state
from training.checkpoint.stored_checkpoint import META, RNG, CheckpointInfo, ResumeError
from training.config import Config
from training.config.binding import bind
from training.data.order import Progress, TrainingData
from training.data.tasks import Task
from training.data.validation_data import ValidationData
from training.lifecycle.lifecycle import Lifecycle
from training.machine.backends import (
    DTYPES,
    compile_backend,
    exchange_dtype,
    fused_backward,
    fused_loss,
    optional_dtype,
)
from training.nonfinite import NonFiniteError
from training.run_log import RunLog
from training.step import Trainer


def build_parallel_model(
    config: Config, groups: Groups, weights: InitialWeights | None = None
) -> ParallelModel:
    """Build this rank's part of the model. If `weights` is None, initialize new weights."""
    assign = config_assignments(config)
    distributed, train = config.optimizer.distributed, config.train
    dtype = DTYPES[train.precision]
    options = ModelOptions(
        seed=config.seed,
        sequence_length=train.sequence_length,
        buckets=BucketPlanner(
            parameter_bytes=dtype.itemsize, preconditioned=lambda unit: assign(unit).pc is not None
        ),
        dtype=dtype,
        engine={"recompute": train.recompute, "fp8": train.fp8},
        split=unit_options(config),
        loss={
            "loss_chunk": train.loss_chunk,
            "fused_loss": fused_loss(config, groups.device),
            "z_loss": train.z_loss > 0,
        },
        overlap_reduce=distributed.overlap_reduce,
        gradient_dtype=optional_dtype(distributed.gradient_dtype),
        pc=config.pc,
        radius_scalers=config.optimizer.radius_scalers(),
        weights=None if weights is None else weights.unit,
        fused_backward=fused_backward(config, groups.device),
        compile_backend=compile_backend(config, groups.device)[0],
    )
    model = build_model(config.model, groups, options)
    if weights is not None:
        weights.fill_buffers_(model)
    return model


def build_distributed_optimizer(config: Config, model: ParallelModel) -> DistributedOptimizer:
    """Build the optimizer for the model as configured."""
    distributed = config.optimizer.distributed
    return build_optimizer(
        model,
        config_assignments(config),
        placement=distributed.placement,
        step_groups=distributed.step_groups,
        exchange_dtype=exchange_dtype(config),
        momentum_dtype=optional_dtype(distributed.momentum_dtype),
        overlap_gather=distributed.overlap_gather,
        tensor_mode=distributed.tensor_mode,
    )


def build_trainer(
    config: Config,
    groups: Groups,
    data: TrainingData,
    validation: Sequence[ValidationData],
    *,
    tasks: Sequence[Task] = (),
    weights: InitialWeights | None = None,
    monitor_interval: int | None = None,
) -> Trainer:
    """Build the model and optimizer, and return this rank's trainer.

    `weights` are the initial weights; if None, new weights are initialized. `tasks` are the tasks
    on which the model is evaluated during training. Monitors run every `monitor_interval` steps; if
    None, the interval in the config is used.
    """
    model = build_parallel_model(config, groups, weights)
    optimizer = build_distributed_optimizer(config, model)
    return Trainer(
        config,
        groups,
        model,
        optimizer,
        data,
        validation,
        tasks=tasks,
        monitor_interval=config.monitors.interval if monitor_interval is None else monitor_interval,
    )


def restore(trainer: Trainer, info: CheckpointInfo) -> None:
    """Load a checkpoint and check that all weight replicas are identical. The checkpoint may have
    been saved on any layout. If the data mixture has changed, start a new data phase.

    Raises ResumeError if the checkpoint does not match the model. Also raises ResumeError if the
    mixture has changed, but the checkpoint does not contain the number of samples read from each
    set. Raises DisagreementError if weight replicas differ.
    """
    rng, meta = info.path / RNG, info.path / META
    with refusing(rng, Exception):  # a corrupt file may raise any exception
        generators = torch.load(rng, weights_only=True)
    with refusing(meta, KeyError, TypeError, ValueError):
        progress = bind(Progress, info.meta["progress"])
        whole = info.meta["identity"]["data"]["fingerprint"]
    present = trainer.data.at(progress.step)
    if present.fingerprint() != (progress.phase.mixture or whole):
        if progress.read is None:
            raise ResumeError(
                f"{info.path} was saved by an earlier version and does not record how much of each "
                "token set was read: resume with the original data until the next checkpoint, then "
                "change the data"
            )
        phase = present.phase_after(progress.sample, progress.read)
        progress = replace(progress, phase=phase)
    try:
        extra = load_state(info.state, trainer.model, trainer.optimizer)
    except StateError as error:
        todo = new_run(str(info.path), trainer.config.pc is not None)
        raise ResumeError(f"{info.path} cannot be loaded: {last_line(error)}; {todo}") from error
    if extra.get("step") != info.step:
        raise ResumeError(
            f"{info.path}: the step in the state must be {info.step}, got {extra.get('step')}"
        )
    check_replicas(trainer.model)
    with refusing(meta, KeyError, TypeError, ValueError):
        trainer.restore(progress, info.meta["trainer"])
    with refusing(rng, LookupError, TypeError, ValueError, RuntimeError):
        if len(generators) == dist.get_world_size():
            set_rng_state(generators[dist.get_rank()])


@contextlib.contextmanager
def refusing(path: Path, *kinds: type[Exception]) -> Iterator[None]:
    """Convert exceptions of the types `kinds` into a ResumeError that names the file `path`."""
    try:
        yield
    except kinds as error:
        raise ResumeError(f"{path} cannot be loaded: {error!r:.200}") from error


def rewind(
    trainer: Trainer, lifecycle: Lifecycle, log: RunLog | None, error: NonFiniteError
) -> bool:
    """Rewind to the last checkpoint before the skipped steps in `error`, and leave out the samples
    of these steps.

    Collective. `log` is None on every rank except rank 0. Return True after rewinding. If there is
    no such checkpoint, or the run has already been rewound `spikes.rewinds` times, change nothing
    and return False.
    """
    lifecycle.wait()  # if the run ends here, a save in progress may be its newest checkpoint
    run_dir = trainer.config.run.dir
    left_out = (*trainer.progress.left_out, error.samples)
    if len(left_out) > trainer.config.spikes.rewinds:
        return False
    before = first_rank(lambda: [s for s in checkpoints.steps(run_dir) if s < error.first_step])
    if not before:
        return False
    newest = checkpoints.step_folder(run_dir, before[-1])
    info = first_rank(lambda: checkpoints.read_checkpoint(newest))
    check_content(info)
    skipped = trainer.guard.skipped
    restore(trainer, info)
    trainer.guard.skipped = skipped
    trainer.leave_out(left_out)
    lifecycle.saver.last_saved = info.step
    if log is not None:
        checkpoints.set_aside_after(run_dir, info.step)
        checkpoints.name_latest(run_dir, info.path.name)
        log.rewind(info.step, f"rewinding to {info.path}: {error}")
    return True
