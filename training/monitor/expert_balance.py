"""Expert load balancing: token counts across ranks, expert bias, MaxVio and balancing losses."""

import torch
from torch import Tensor

from models.blocks.experts import (
    balance_,
    layer_numbers,
    max_violation,
    take_balancing_losses,
    token_counts,
)
from models.config import ModelConfig
from parallel.comm.collectives import all_reduce_
from parallel.comm.groups import Groups
from parallel.model import ParallelModel


class ExpertBalance:
    """Load balancing for this rank's mixture-of-experts layers. No-op for a dense model."""

    def __init__(self, model: ParallelModel, groups: Groups, config: ModelConfig) -> None:
        self.model = model
        self.groups = groups
        self.config = config
        self.layers = torch.tensor(
            layer_numbers(model.chunks), dtype=torch.long, device=groups.device
        )
        self._violation = torch.zeros(config.layers, device=groups.device)
        self._losses: dict[str, Tensor] = {}

    def step(self, active: Tensor) -> None:
        """Update the expert bias after an optimizer step. If `active` is False, the step was
        skipped, and the bias remains unchanged."""
        moe = self.config.moe
        if moe is None:
            return
        counts = token_counts(self.model.chunks)
        if counts.numel():
            stage = self.groups.dense.stage
            all_reduce_(counts, stage, self.model.comm_volume, "tokens per expert")
            self._violation.index_copy_(0, self.layers, max_violation(counts).float())
        self._losses = take_balancing_losses()
        balance_(self.model.chunks, counts, rate=moe.expert_bias_rate, active=active)

    def violations(self) -> dict[int, float]:
        """Return the MaxVio of each layer in the last step, or {} for dense models. Unless the
        model is dense, waits for the device and all pipeline stages."""
        moe = self.config.moe
        if moe is None:
            return {}
        pipeline, comm_volume = self.groups.pipeline, self.model.comm_volume
        violations = all_reduce_(self._violation.clone(), pipeline, comm_volume, "metrics")
        return dict(enumerate(violations[moe.dense_layers :].tolist(), moe.dense_layers))

    def metrics(self, microbatches: int) -> dict[str, float]:
        """Return the metrics of the last step, which had `microbatches` micro-batches per rank.

        moe/max_vio/<layer>  (max - mean) / mean of a layer's token counts per expert
        moe/max_vio          maximum of moe/max_vio/<layer> over layers
        moe/sequence_aux_loss, moe/global_aux_loss, moe/z_loss
                             mean over layers without the coefficient, if the loss is enabled

        Unless the model is dense, waits for the device and all pipeline stages.
        """
        moe = self.config.moe
        if moe is None:
            return {}
        mixed = slice(moe.dense_layers, None)
        pipeline, comm_volume = self.groups.pipeline, self.model.comm_volume
        violations = self.violations()
        metrics = {"moe/max_vio": max(violations.values())}
        metrics |= {f"moe/max_vio/{layer}": value for layer, value in violations.items()}
        stage = self.groups.dense.stage
        shares = {
            "sequence_aux_loss": self.groups.data.size,
            "global_aux_loss": 1,
            "z_loss": stage.size,
        }
        for name, share in shares.items():
            if getattr(moe, name) > 0:
                zeros = torch.zeros(self.config.layers, device=self.groups.device)
                value = self._losses.get(name, zeros).float()
                all_reduce_(value, stage, comm_volume, "metrics")
                all_reduce_(value, pipeline, comm_volume, "metrics")
                metrics[f"moe/{name}"] = value[mixed].mean().item() / (share * microbatches)
        return metrics
