"""The settings of a run that its plan depends on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from models.dense import Recompute
from models.units import Unit
from parallel.storage.bucket_layout import Storage
from parallel.storage.stage_units import units_of_domain
from spectral.sharded.placement import Strategy


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """The layout, the dtypes, and how buckets and placement are made.

    data             ranks that hold copies of the dense parameters: data x context
    expert           ranks that share the experts of a layer
    expert_tensor    ranks that share each of these experts
    first_stage_layers, last_stage_layers   of the pipeline, as in `parallel.comm.groups`
    recompute        which activations the backward pass computes again
    loss_chunk       vocabulary entries of a rank whose logits exist at once, None for all
    compiled         whether norms, rotations and activations are fused by torch.compile
    dtype            of weights and activations; gradients and masters are float32
    rule_operands    type of the operands of the rules' products, a key of `Device.peak`
    exchange_bytes   of each element of momentum and update that is sent
    step_groups      as in `BucketLayout.step_groups`
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
    compiled: bool = False
    dtype: torch.dtype = torch.bfloat16
    rule_operands: str = "fp32"
    exchange_bytes: int = 2
    storage: Storage = "auto"
    placement: Strategy = "auto"
    bucket_numel: int | None = None
    step_groups: int | None = None
    penalised: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a number of ranks below 1, or experts that do not divide them."""
        positive = {
            "data": self.data,
            "tensor": self.tensor,
            "pipeline": self.pipeline,
            "virtual_pipeline": self.virtual_pipeline,
            "expert": self.expert,
            "expert_tensor": self.expert_tensor,
            "step_groups": 1 if self.step_groups is None else self.step_groups,
        }
        for name, value in positive.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.stage_ranks % (self.expert * self.expert_tensor):
            raise ValueError(
                f"expert x expert_tensor must divide data x tensor = {self.stage_ranks}, "
                f"got {self.expert} x {self.expert_tensor}"
            )

    @property
    def stage_ranks(self) -> int:
        """Ranks of one pipeline stage."""
        return self.data * self.tensor

    def domains(
        self, units: Sequence[Sequence[Unit]]
    ) -> Iterator[tuple["PlanInputs", list[list[Unit]], int]]:
        """`(inputs, units, repeats)` of a stage's dense units and of its experts, if any.

        `units` are those of each tensor-parallel rank. A domain is copied over data x tensor ranks
        of its own inputs, and the stage has `repeats` such sets; rank r of the stage belongs to set
        `r // tensor % repeats`.
        """
        dense, expert = units_of_domain(units, "dense"), units_of_domain(units, "expert")
        if dense[0]:
            yield self, dense, 1
        if expert[0]:
            experts = replace(
                self,
                data=self.stage_ranks // (self.expert * self.expert_tensor),
                tensor=self.expert_tensor,
                expert=1,
                expert_tensor=1,
                sequence_parallel=False,
            )
            yield experts, expert[:1] * self.expert_tensor, self.expert
