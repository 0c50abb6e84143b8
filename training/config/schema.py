"""The run config, made of its sections. The sentence under each field is its manual."""

from dataclasses import field

from models.config import ModelConfig
from models.pc_config import PCConfig
from models.section import Section, Whole
from training.config.sections.data import DataConfig
from training.config.sections.gram_penalty import GramPenaltyConfig
from training.config.sections.optimizer import OptimizerConfig
from training.config.sections.parallel import ParallelConfig
from training.config.sections.reporting import LogConfig, MonitorsConfig, ValidationConfig
from training.config.sections.running import (
    CheckpointConfig,
    PlanConfig,
    RunConfig,
    SpikeConfig,
    StopConfig,
    WatchdogConfig,
)
from training.config.sections.train import ScheduleConfig, TrainConfig


class Config(Section):
    """A whole run."""

    run: RunConfig
    seed: Whole = 1234
    """Seed of the initial weights and of the data order."""
    model: ModelConfig
    """Shape of the model."""
    pc: PCConfig | None = None
    """PC layers (polynomial weight preconditioning); null has none, `{}` has the paper's."""
    gram_penalty: GramPenaltyConfig | None = None
    """Off-diagonal Gram penalty on the loss; null has none, `{}` has the paper's."""
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    train: TrainConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    spikes: SpikeConfig = field(default_factory=SpikeConfig)
    log: LogConfig = field(default_factory=LogConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
