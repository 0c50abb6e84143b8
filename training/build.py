"""Construction of a run's model, optimizer and trainer from its config."""

from collections.abc import Sequence
from functools import partial

from parallel.comm.groups import Groups
from parallel.model import ModelOptions, ParallelModel, build_model
from parallel.optimizer.distributed_optimizer import DistributedOptimizer, build_optimizer
from parallel.storage.bucket_layout import BucketPlanner
from training.assignments import config_assignments, unit_options
from training.checkpoint.initial_weights import InitialWeights
from training.config import Config
from training.data.batches import training_batches
from training.data.order import TrainingData
from training.data.tasks import Task
from training.data.validation_data import ValidationData
from training.machine.backends import (
    DTYPES,
    compile_backend,
    exchange_dtype,
    fused_backward,
    fused_loss,
    optional_dtype,
)
from training.samples import build_sampler
from training.step import Trainer


def build_parallel_model(
    config: Config, groups: Groups, weights: InitialWeights | None = None
) -> ParallelModel:
    """Build this rank's part of the config's model, with new weights if `weights` is None."""
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
    """Return the optimizer of the config's model."""
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
    """Build model and optimizer and return this rank's trainer.

    `weights` are the initial weights, None for new weights; `tasks` score the model. Monitors
    measure every `monitor_interval` steps; None uses the config's interval.
    """
    model = build_parallel_model(config, groups, weights)
    optimizer = build_distributed_optimizer(config, model)
    return Trainer(
        config,
        groups,
        model,
        optimizer,
        data,
        partial(training_batches, config, groups, data),
        validation,
        tasks=tasks,
        sampler=build_sampler(config, validation),
        monitor_interval=config.monitors.interval if monitor_interval is None else monitor_interval,
    )
