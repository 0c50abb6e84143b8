"""How the optimizer of a run is spread over ranks, as far as plans depend on it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from models.dense import Recompute
from models.units import Unit
from parallel.optimizer.placement import Strategy
from parallel.plan.monitor_memory import MonitorInputs
from parallel.storage.bucket_layout import Storage


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """Ranks of each kind of parallelism, widths of elements, and how layout and placement are made.

    data             ranks that hold copies of the dense parameters (data x context)
    expert           ranks that share the experts of a layer
    expert_tensor    ranks that share each of these experts
    first_stage_layers, last_stage_layers   of the pipeline, as parallel.comm.groups.stages
    recompute        which activations backward computes again
    loss_chunk       vocabulary entries of a rank whose logits exist at a time, None for all
    dtype            of weights and activations; gradients and masters are float32
    exchange_bytes   of an element of momentum or update that travels
    look             what monitors look at, None for nothing
    penalised        whether the run has a Gram penalty
    """

    data: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    expert: int = 1
    expert_tensor: int = 1
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    recompute: Recompute = "none"
    loss_chunk: int | None = None
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.bfloat16
    exchange_bytes: int = 2
    storage: Storage = "auto"
    placement: Strategy = "auto"
    bucket_numel: int | None = None
    step_groups: int = 4
    monitored: MonitorInputs | None = None
    penalised: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for a number of ranks below 1, or experts that do not divide them."""
        positive = ("data", "tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor")
        for name in (*positive, "step_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise ValueError(
                f"expert x expert_tensor must divide data x tensor = {self.stage_ranks}, "
                f"got {self.expert} x {self.expert_tensor}"
            )

    @property
    def stage_ranks(self) -> int:
        """Ranks that hold the same layers."""
        return self.data * self.tensor

    def domains(
        self, units: Sequence[Sequence[Unit]]
    ) -> Iterator[tuple["PlanInputs", list[list[Unit]], int]]:
        """`(setting, units, repeats)` of the dense units of a stage and of its experts, if any.

        `units` are those of each tensor rank. There are `repeats` sets of ranks that hold copies
        of a domain, each data x tensor of its setting; rank r of the stage is in set
        `r // tensor % repeats`.
        """
        chosen = {
            domain: [[unit for unit in members if unit.domain == domain] for members in units]
            for domain in ("dense", "expert")
        }
        if chosen["dense"][0]:
            yield self, chosen["dense"], 1
        if chosen["expert"][0]:
            experts = replace(
                self,
                data=self.stage_ranks // (self.expert * self.expert_tensor),
                tensor=self.expert_tensor,
                expert=1,
                expert_tensor=1,
                sequence_parallel=False,
            )
            yield experts, chosen["expert"][:1] * self.expert_tensor, self.expert
