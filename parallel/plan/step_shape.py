"""The inputs of a plan: layers as matmuls, the layout, the batch and the device."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final, Literal

import torch

from models.config import ModelConfig
from models.dense import Recompute
from models.families import FAMILIES
from models.layout import ChunkSpec, Layout
from models.units import Unit, units_of_domain
from parallel.comm.groups import chunk_specs
from parallel.optimizer.unit_transfer import TensorMode
from parallel.plan.devices import Device, Links
from spectral.batching import grouped
from spectral.sharded.placement import Strategy

Cut = Literal["rows", "cols"] | None
"""Axis sharded by tensor parallelism: rows for column-parallel weights, cols for row-parallel
ones."""

BLOCK: Final = ("gate", "up", "gate_up", "down")
"""Roles of the matrices in a feed-forward block."""


@dataclass(frozen=True)
class LayerWeight:
    """A weight `[rows, cols]`, applied to inputs of width cols.

    cut      see `Cut`
    expert   whether the weight belongs to a routed expert
    block    whether the weight belongs to a dense or shared feed-forward block
    router   whether the weight is a router, whose matmul runs in float32
    """

    rows: int
    cols: int
    cut: Cut
    expert: bool
    block: bool
    router: bool

    def local(self, tensor: int) -> tuple[int, int]:
        """Return the rows and cols of each rank's shard, given a tensor-parallel size of
        `tensor`."""
        rows, cols = self.rows, self.cols
        return rows // (tensor if self.cut == "rows" else 1), cols // (
            tensor if self.cut == "cols" else 1
        )


@dataclass(frozen=True)
class Layer:
    """The weights of a layer, including a single routed expert, and the sizes of its gains and
    biases.

    Gains are replicated. Biases are sharded across tensor-parallel ranks.
    """

    weights: tuple[LayerWeight, ...]
    gains: int
    cut_biases: int

    def elements(self, tensor: int) -> int:
        """Return the number of elements on each of `tensor` ranks, excluding routed experts."""
        vectors = self.gains + self.cut_biases // tensor
        return vectors + sum(math.prod(w.local(tensor)) for w in self.weights if not w.expert)

    def expert_elements(self, tensor: int) -> int:
        """Return the number of elements of one routed expert on each of the `tensor` ranks that
        share it."""
        return sum(math.prod(w.local(tensor)) for w in self.weights if w.expert)


def layer_weights(model: ModelConfig, layer: int) -> Layer:
    """Return the weights of layer `layer`, cached per kind of layer."""
    moe = model.mixture(layer)
    return _kind(model, 0 if moe is None else moe.dense_layers)


@lru_cache(maxsize=64)
def _kind(model: ModelConfig, layer: int) -> Layer:
    whole, half = (_by_parameter(model, layer, tensor) for tensor in (1, 2))
    odd = any(n % 2 for n in (model.heads, model.query_groups, model.ffn))
    weights = []
    for name, units in whole.items():
        cols, elements = units[0].axes[-1], sum(unit.numel for unit in units)
        cut: Cut = None
        if not odd and half[name][0].local_axes(2)[-1] < cols:
            cut = "cols"
        elif not odd and sum(math.prod(unit.local_axes(2)) for unit in half[name]) < elements:
            cut = "rows"
        expert = units[0].domain == "expert"
        block = units[0].role.removeprefix("shared_") in BLOCK and not expert
        router = units[0].role == "router"
        weights.append(LayerWeight(elements // cols, cols, cut, expert, block, router))
    vectors = [unit for unit in _units(model, layer, 1) if not unit.is_matrix]
    gains = sum(unit.numel for unit in vectors if unit.replicated)
    return Layer(tuple(weights), gains, sum(unit.numel for unit in vectors) - gains)


def _by_parameter(model: ModelConfig, layer: int, tensor: int) -> dict[str, list[Unit]]:
    """Return a layer's matrices on the first of `tensor` ranks, with only the first expert."""
    matrices = (
        unit
        for unit in _units(model, layer, tensor)
        if unit.is_matrix and (unit.domain == "dense" or ".experts.0." in unit.name)
    )
    return grouped(matrices, lambda unit: unit.parameter)


def _units(model: ModelConfig, layer: int, tensor: int) -> list[Unit]:
    family = FAMILIES[model.family]
    units = family.units(model, layers=[layer], tensor_size=tensor, expert_tensor=tensor)
    return [unit for unit in units if unit.layer == layer]


Replicas = Literal["dense", "experts"]
Axis = Replicas | Literal["tensor", "context", "expert", "stage", "pipeline"]


@dataclass(frozen=True, kw_only=True)
class PlanInputs(Layout):
    """The layout, dtypes, and bucket and placement options.

    data             number of replicas of the dense parameters, i.e. data-parallel times
                     context-parallel size
    recompute        activations recomputed in the backward pass
    loss_chunk       number of vocabulary entries per rank whose logits are in memory at a time;
                     None: all
    fused_loss       whether the loss is computed by Liger's kernels, without chunks
    compiled         whether norms, rotations and activations are fused by torch.compile
    fused_backward   whether gradients of gated blocks and heads are computed by fused kernels
    dtype            dtype of weights and activations; masters are float32
    rule_operands    operand type of the rules' matmuls, a key of `Device.peak`
    gradient_bytes   bytes per element in which gradients are accumulated and reduced
    exchange_bytes   bytes per element in which momentum and updates are sent
    momentum_bytes   bytes per element in which whole-matrix rules store momentum
    tensor_mode      see `TensorMode`
    step_groups      see `BucketLayout.step_groups`
    overlap_reduce   whether reduce-scatters overlap with the backward pass
    overlap_gather   whether all-gathers overlap with the forward pass
    """

    data: int
    recompute: Recompute = "none"
    loss_chunk: int | None = None
    fused_loss: bool = False
    compiled: bool = False
    fused_backward: bool = False
    dtype: torch.dtype = torch.bfloat16
    rule_operands: str = "fp32"
    gradient_bytes: int = 4
    exchange_bytes: int = 2
    momentum_bytes: int = 4
    placement: Strategy = "auto"
    tensor_mode: TensorMode = "owner"
    step_groups: int | None = None
    overlap_reduce: bool = True
    overlap_gather: bool = True

    @property
    def stage_ranks(self) -> int:
        """Number of ranks in a pipeline stage."""
        return self.data * self.tensor

    def domains(
        self, units: Sequence[Sequence[Unit]]
    ) -> Iterator[tuple["Replicas", "PlanInputs", list[list[Unit]], int]]:
        """Yield `(name, inputs, units, repeats)` for a stage's dense units and, if any, its
        experts.

        `units` holds each tensor-parallel rank's list of units. A domain is replicated or sharded
        across a set of `inputs.data * inputs.tensor` ranks. The stage consists of `repeats` such
        sets. Rank r of the stage is in set `r // tensor % repeats`.
        """
        dense, expert = units_of_domain(units, "dense"), units_of_domain(units, "expert")
        if dense[0]:
            yield "dense", self, dense, 1
        if expert[0]:
            experts = replace(
                self,
                data=self.stage_ranks // (self.expert * self.expert_tensor),
                tensor=self.expert_tensor,
                expert=1,
                expert_tensor=1,
                sequence_parallel=False,
            )
            yield "experts", experts, expert[:1] * self.expert_tensor, self.expert


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """One step of a run.

    micro_batch      sequences per micro-batch
    sequence_length  tokens per sequence, before the context-parallel split
    microbatches     micro-batches per rank and step
    operands         operand type of large matmuls, a key of `Device.peak`
    attended         attended length: on average, a token attends to as many keys as if all
                     documents had this length; None if attention crosses document boundaries
    """

    model: ModelConfig
    inputs: PlanInputs
    device: Device
    micro_batch: int
    sequence_length: int
    microbatches: int
    operands: str = "bf16"
    attended: float | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens per micro-batch on one rank."""
        return self.micro_batch * self.sequence_length // self.inputs.context

    @property
    def own_tokens(self) -> int:
        """Number of tokens per micro-batch on one rank outside tensor-parallel layers."""
        return self.tokens // (self.inputs.tensor if self.inputs.sequence_parallel else 1)

    @property
    def stream(self) -> int:
        """Number of residual-stream elements on one rank, divided by `tokens`."""
        return self.model.hidden // (self.inputs.tensor if self.inputs.sequence_parallel else 1)

    @property
    def pairs(self) -> int:
        """Number of (token, expert) pairs that one rank dispatches per micro-batch in an MoE
        layer."""
        assert self.model.moe is not None
        return self.own_tokens * self.model.moe.top_k * self.inputs.expert_tensor

    def chunks(self, stage: int) -> tuple[ChunkSpec, ...]:
        """Return the chunks of a stage."""
        return _chunks(self.model.layers, self.inputs, stage)

    def kinds(self, stage: int) -> dict[int, int]:
        """Map the first layer of each kind in a stage to the number of layers of that kind."""
        return _kinds(self.model, self.chunks(stage))

    def in_flight(self, stage: int) -> float:
        """Return the maximum number of micro-batches in flight on a rank under Megatron's
        schedules."""
        stages, virtual = self.inputs.pipeline, self.inputs.virtual_pipeline
        if virtual == 1:
            return min(stages - stage, self.microbatches)
        chunks = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
        return min(chunks / virtual, self.microbatches)

    def links(self, axis: Axis) -> Links:
        """Return the links along an axis. `dense` and `experts` are the replica axes."""
        inputs = self.inputs
        sharing = inputs.expert * inputs.expert_tensor
        sizes: dict[Axis, tuple[int, int]] = {
            "tensor": (inputs.tensor, 1),
            "context": (self.inputs.context, inputs.tensor),
            "expert": (sharing, 1),
            "dense": (inputs.data, inputs.tensor),
            "experts": (inputs.stage_ranks // sharing, sharing),
            "stage": (inputs.stage_ranks, 1),
            "pipeline": (inputs.pipeline, inputs.stage_ranks),
        }
        return Links(*sizes[axis], self.device)


@lru_cache(maxsize=4096)
def _chunks(layers: int, layout: Layout, stage: int) -> tuple[ChunkSpec, ...]:
    return tuple(chunk_specs(layers, layout, stage))


@lru_cache(maxsize=4096)
def _kinds(model: ModelConfig, chunks: tuple[ChunkSpec, ...]) -> dict[int, int]:
    counts: dict[int, int] = {}
    first: dict[tuple[bool, int | None], int] = {}
    for layer in (layer for chunk in chunks for layer in chunk.layers):
        like = first.setdefault((model.mixture(layer) is None, model.window(layer)), layer)
        counts[like] = counts.get(like, 0) + 1
    return counts
