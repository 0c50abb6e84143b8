"""The trainer of a benchmark: that of pretrain.py, without saving, validation or reports."""

from typing import cast

import torch
from torch import Tensor

from parallel.comm.groups import Groups, world_size
from training.build import build_data, build_trainer, check_backend, start_groups
from training.config import Config, check
from training.data.order import TrainingData
from training.loop import Trainer


class RandomTokens(torch.utils.data.Dataset[Tensor]):
    """Windows `[length + 1]` of random tokens, the same for the same index."""

    def __init__(self, vocabulary: int, length: int) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocabulary, (self.length + 1,), generator=generator)


def start(config: Config) -> Groups:
    """Start the process groups of a config that this world can run.

    Raises InvalidConfigError naming what is wrong with the config.
    """
    check(config, world_size())
    check_backend(config)
    return start_groups(config)


def new_trainer(config: Config, groups: Groups, *, synthetic: bool = False) -> Trainer:
    """A new trainer of `config`, on random tokens if `synthetic`, else on the config's data."""
    if synthetic:
        assert config.model.vocab_size is not None
        tokens = RandomTokens(config.model.vocab_size, config.train.sequence_length)
        data = cast(TrainingData, tokens)
    else:
        data, _ = build_data(config)
    return build_trainer(config, groups, data, [])
