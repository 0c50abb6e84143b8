"""What the activations of a step depend on: the model, its layout, the batch and the devices."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from models.config import ModelConfig
from parallel.comm.groups import ChunkSpec, chunk_specs
from parallel.plan.devices import Device
from parallel.plan.inputs import PlanInputs
from parallel.plan.network import Links

Replicas = Literal["dense", "experts"]
Axis = Replicas | Literal["tensor", "context", "expert", "stage", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step of a run.

    micro_batch      sequences of a forward and backward pass on one rank
    sequence_length  tokens of a whole sequence
    context          ranks that share each sequence
    microbatches     passes of a rank in a step
    operands         type of the operands of large products, a key of `Device.peak`
    """

    model: ModelConfig
    inputs: PlanInputs
    device: Device
    micro_batch: int
    sequence_length: int
    microbatches: int
    context: int = 1
    operands: str = "bf16"

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch * self.sequence_length // self.context

    @property
    def own_tokens(self) -> int:
        """Tokens of a micro-batch outside the tensor-parallel matrices of one rank."""
        return self.tokens // (self.inputs.tensor if self.inputs.sequence_parallel else 1)

    @property
    def pairs(self) -> int:
        """(token, expert) pairs of a micro-batch that leave one rank, in layers with experts."""
        assert self.model.moe is not None
        return self.own_tokens * self.model.moe.top_k * self.inputs.expert_tensor

    def chunks(self, stage: int) -> tuple[ChunkSpec, ...]:
        """Return the chunks of a stage."""
        inputs = self.inputs
        return _chunks(
            self.model.layers,
            stage,
            inputs.pipeline,
            inputs.virtual_pipeline,
            inputs.first_stage_layers,
            inputs.last_stage_layers,
        )

    def kinds(self, stage: int) -> dict[int, int]:
        """Return one layer of each kind of a stage, and how many layers are like it."""
        return _kinds(self.model, self.chunks(stage))

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose activations a rank keeps at most, under Megatron's schedules."""
        stages, virtual = self.inputs.pipeline, self.inputs.virtual_pipeline
        if virtual == 1:
            return min(stages - stage, self.microbatches)
        chunks = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return min(chunks / virtual, self.microbatches)

    def links(self, axis: Axis) -> Links:
        """Return the links of an axis; `dense` and `experts` are those of replicas."""
        inputs = self.inputs
        sharing = inputs.expert * inputs.expert_tensor
        sizes: dict[Axis, tuple[int, int]] = {
            "tensor": (inputs.tensor, 1),
            "context": (self.context, inputs.tensor),
            "expert": (sharing, 1),
            "dense": (inputs.data, inputs.tensor),
            "experts": (inputs.stage_ranks // sharing, sharing),
            "stage": (inputs.stage_ranks, 1),
            "pipeline": (inputs.pipeline, inputs.stage_ranks),
        }
        return Links(*sizes[axis], self.device)


@lru_cache(maxsize=4096)
def _chunks(
    layers: int, stage: int, size: int, virtual: int, first: int | None, last: int | None
) -> tuple[ChunkSpec, ...]:
    return tuple(
        chunk_specs(layers, rank=stage, size=size, virtual=virtual, first=first, last=last)
    )


@lru_cache(maxsize=4096)
def _kinds(model: ModelConfig, chunks: tuple[ChunkSpec, ...]) -> dict[int, int]:
    found: dict[int, int] = {}
    first: dict[tuple[bool, int | None], int] = {}
    for layer in (layer for chunk in chunks for layer in chunk.layers):
        mixed = model.moe is not None and layer >= model.moe.dense_layers
        like = first.setdefault((mixed, model.window(layer)), layer)
        found[like] = found.get(like, 0) + 1
    return found
