"""Disk space of a run's checkpoints."""

from math import prod

from parallel.plan.domain import element_state_bytes, pc_bytes, state_of_matrix
from training.assignments import config_assignments, config_units
from training.checkpoint.checkpoints import superseded
from training.config import Config


def checkpoint_bytes(config: Config) -> int:
    """Return the size of the tensors in a checkpoint: float32 weights, and the rules' state."""
    assign = config_assignments(config)
    total = 0
    for unit in config_units(config):
        assigned = assign(unit)
        weight = 4 * prod(unit.shape)
        if assigned.pc is not None:
            total += pc_bytes(assigned, unit.shape)
        elif assigned.whole_matrix:
            total += weight + sum(state_of_matrix(assigned.rule, unit.shape).values())
        else:
            total += weight + element_state_bytes(assigned.rule) * prod(unit.shape)
    return total


def checkpoints_text(config: Config) -> str:
    """Return size, interval and number of the checkpoints that a run keeps, and their disk
    space."""
    section, steps = config.checkpoint, config.train.last
    if section.interval == 0:
        return "none: checkpoint.interval is 0"
    size = checkpoint_bytes(config) / 1e9
    saved = [*range(section.interval, steps, section.interval), steps]
    number = len(saved) - len(superseded(saved, section.keep_last, section.keep_every))
    return (
        f"{size:.3g} GB each, every {section.interval:,} steps; {number:,} are kept, "
        f"{number * size:.3g} GB, and {size:.3g} GB more while one is written"
    )
