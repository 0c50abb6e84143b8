"""The trainer of a benchmark: that of pretrain.py, without saving, validation or reports."""

from parallel.comm.groups import Groups, world_size
from training.build import build_data, build_trainer, check_backend, on_mock_tokens, start_groups
from training.config import Config, check
from training.loop import Trainer


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
        config = on_mock_tokens(config)
    data, _ = build_data(config)
    return build_trainer(config, groups, data, [])
