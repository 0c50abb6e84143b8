"""Keys and values that the run config once had, and what to do about each."""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

REMOVED: Final[Mapping[str, str]] = {
    "gram_penalty.adaptive": "set gram_penalty.horizon, the part of the run; 1 was best",
    "gram_penalty.schedule": "leave it out; gram_penalty.horizon says how long the penalty acts",
    "optimizer.auto_rule": "set the rule of matrices in optimizer.matrix.rule",
    "optimizer.distributed.placement=longest_processing_time": "leave it at auto",
    "optimizer.distributed.placement=round_robin": "leave it at auto",
    "optimizer.distributed.tensor_mode=duplicated": "leave it at owner, whose result is the same",
    "optimizer.rules.*.power_iteration_steps": "set krylov_steps, which needs about half as many",
    "checkpoint.asynchronous": "leave it out; training goes on while a checkpoint is written",
    "log.wandb.entity": "set WANDB_ENTITY in the environment",
    "log.wandb.group": "set WANDB_RUN_GROUP in the environment",
    "log.wandb.mode": "set WANDB_MODE in the environment",
    "log.wandb.tags": "set WANDB_TAGS in the environment",
    "optimizer.clip.matrix_roles": "leave it out; the norm is that of all gradients",
    "optimizer.distributed.bucket_elements": "leave it out; a bucket has one or two layers",
    "optimizer.layer_rates": "leave it out; roles have rates of their own in optimizer.roles",
    "optimizer.roles.*.lr_factor": "set the role's lr",
    "watchdog.heartbeat_seconds": "leave it out; the heartbeat is written every 10 seconds",
    "checkpoint.memory_interval": "set checkpoint.interval, from which a restart continues",
}
"""By dotted key, `*` for any part of one, or by `key=value`: what to do, in one sentence. The key
of a section stands for all that is in it."""


def removal(key: str) -> str | None:
    """Return the line that answers a removed `key` or `key=value`, None for any other."""
    advice = next((text for name, text in REMOVED.items() if fnmatchcase(key, name)), None)
    return None if advice is None else f"{key} was removed: {advice}"
