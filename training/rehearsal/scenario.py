"""The rehearsed run: a few steps of the config; the last step includes all periodic work."""

from dataclasses import dataclass, replace
from pathlib import Path

from spectral.kernels.dispatch import has_triton
from training.config import Config
from training.data.build_data import on_mock_tokens
from training.dry_run import compiled_on_gpu, fused_on_gpu
from training.monitor.monitors import steps_compared
from training.rehearsal.triton_launches import liger_installed

PLAIN_STEP = 2
"""The step that represents steps without periodic work (plain steps)."""

MICROBATCHES = 4
"""Largest number of micro-batches per step that a rehearsal without a pipeline runs. Further
micro-batches are assumed to be equal."""


@dataclass(frozen=True)
class Scenario:
    """A config, changed for a rehearsal.

    last           last step, which is monitored, validated and saved
    microbatches   number of micro-batches per step and rank in the real run
    rehearsed      number of rehearsed micro-batches per step and rank
    stages         number of pipeline stages
    chunks         number of model chunks per rank
    """

    config: Config
    last: int
    microbatches: int
    rehearsed: int
    stages: int
    chunks: int


def scenario(config: Config, world: int, folder: Path) -> Scenario:
    """Return the scenario of `config` on `world` ranks; all output is written to `folder`."""
    config = on_mock_tokens(with_known_kernels(config))
    parallel, train = config.parallel, config.train
    data = world // parallel.model_ranks
    microbatches = train.global_batch // (train.micro_batch * data)
    stages = parallel.pipeline
    enough = 3 * stages if stages > 1 else MICROBATCHES
    rehearsed = min(microbatches, enough)
    due = last_step(config)
    return Scenario(
        replace(
            config,
            run=replace(config.run, dir=str(folder / "run")),
            data=replace(config.data, workers=0, tokenizer=None),
            train=replace(
                train,
                steps=max(train.steps, due),
                exit_step=due,
                global_batch=rehearsed * train.micro_batch * data,
                batch_ramp=(),
            ),
            checkpoint=replace(
                config.checkpoint,
                interval=due if config.checkpoint.interval else 0,
                initialize_from=None,
            ),
            stop=replace(config.stop, slurm_margin_seconds=None),
            watchdog=replace(config.watchdog, hang_seconds=None),
            log=replace(config.log, interval=due, trackers=(), profile=None),
            monitors=replace(config.monitors, interval=0 if config.monitors.interval == 0 else due),
            tasks=replace(config.tasks, interval=0),
            validation=replace(config.validation, interval=0, samples=2 * train.micro_batch * data),
        ),
        due,
        microbatches,
        rehearsed,
        stages,
        parallel.virtual_pipeline,
    )


def with_known_kernels(config: Config) -> Config:
    """Return `config` with kernels that rehearsals support.

    Backend aot_eager replaces inductor. If liger-kernel is not installed on this machine, the loss
    is rehearsed operation by operation; if triton is not installed, backward passes are compiled
    too.
    """
    compiled = compiled_on_gpu(config) and config.train.compile != "aot_eager"
    train = replace(config.train, compile="aot_eager" if compiled else None)
    if train.fused_backward == "auto":
        kernels = fused_on_gpu(config) and has_triton()
        train = replace(train, fused_backward="triton" if kernels else None)
    if not liger_installed():
        train = replace(train, fused_loss=None)
    # PyTorch's attention kernel moves as many bytes, has the same FLOPs, and needs no package.
    return replace(config, train=train, model=replace(config.model, attention_kernel="auto"))


def last_step(config: Config) -> int:
    """Return the last step, which is monitored and follows at least one plain step and, with a CUDA
    graph, one replay."""
    compared = 0 if config.monitors.interval == 0 else steps_compared(config.monitors)
    graph = 4 if config.optimizer.distributed.cuda_graph else 0
    return max(PLAIN_STEP + 1, compared + 1, graph)
