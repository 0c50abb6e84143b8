"""Keeps experts evenly used: counts tokens over ranks, moves the expert bias, reports MaxVio."""

import torch
from torch import Tensor

from models.config import ModelConfig
from models.load_balance import balance_, max_violation, token_counts
from parallel.collectives import MAX, all_reduce_
from parallel.groups import Groups
from parallel.model import ParallelModel


class ExpertBalance:
    """The expert bias of this rank's mixture-of-experts layers; does nothing without them."""

    def __init__(self, model: ParallelModel, groups: Groups, config: ModelConfig) -> None:
        self.model = model
        self.groups = groups
        self.config = config
        self._worst = torch.zeros((), device=groups.device)

    def step(self, active: Tensor) -> None:
        """None; once per optimizer step, after it. Where `active` is False no bias moves."""
        if self.config.moe is None:
            return
        counts = token_counts(self.model.chunks)
        if counts.numel():
            stage = self.groups.dense.stage
            all_reduce_(counts, stage, self.model.traffic, "tokens per expert")
            self._worst = max_violation(counts).max().float()
        balance_(self.model.chunks, counts, rate=self.config.moe.expert_bias_rate, active=active)

    def metrics(self) -> dict[str, float]:
        """`moe/max_vio`: the largest (most tokens - mean) / mean of any layer in the last step.

        Waits for the device and, with experts, for all pipeline stages.
        """
        if self.config.moe is None:
            return {}
        pipeline, traffic = self.groups.pipeline, self.model.traffic
        worst = all_reduce_(self._worst.clone(), pipeline, traffic, "metrics", MAX)
        return {"moe/max_vio": worst.item()}
