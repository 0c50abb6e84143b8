"""What a config needs on N ranks, without running it: bytes of memory on the fullest rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.config import ModelConfig
from models.families import FAMILIES
from models.units import Unit
from parallel.groups import stages
from parallel.routing import Assign, Assignment


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank. Activations are an estimate without recomputation; the rest is exact."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_per_rank(
    model: ModelConfig,
    assign: Assign,
    *,
    dtype: torch.dtype,
    tensor: int,
    pipeline: int,
    virtual_pipeline: int,
    sequence_parallel: bool,
    micro_batch: int,
    sequence_length: int,
    **unit_options: object,
) -> Memory:
    """Memory of the pipeline rank that needs most. Every data-parallel rank holds the same."""
    dense = FAMILIES[model.family].units

    def on_rank(rank: int) -> Memory:
        parts = stages(model.layers, rank=rank, size=pipeline, virtual=virtual_pipeline)
        units = [
            unit
            for part in parts
            for unit in dense(
                model,
                layers=part.layers,
                embedding=part.embedding,
                head=part.head,
                tensor_size=tensor,
                **unit_options,
            )
        ]
        elements = sum(_local_numel(unit, tensor) for unit in units)
        # 1F1B keeps `pipeline - rank` micro-batches of activations in flight on stage `rank`.
        in_flight = pipeline - rank
        activations = sum(
            _activation_bytes(
                model,
                layers=len(part.layers),
                head=part.head,
                tokens=micro_batch * sequence_length,
                tensor=tensor,
                sequence_parallel=sequence_parallel,
                bytes_per_element=dtype.itemsize,
            )
            for part in parts
        )
        return Memory(
            weights=elements * dtype.itemsize,
            gradients=elements * 4,
            optimizer=sum(
                _optimizer_bytes(unit, assign(unit.role), tensor, dtype) for unit in units
            ),
            activations=activations * in_flight,
        )

    return max((on_rank(rank) for rank in range(pipeline)), key=lambda memory: memory.total)


def _local_numel(unit: Unit, tensor: int) -> int:
    return unit.numel // tensor if unit.shard_axis is not None else unit.numel


def _optimizer_bytes(unit: Unit, assigned: Assignment, tensor: int, dtype: torch.dtype) -> int:
    """Bytes of state and float32 master weights; a cut matrix's state is whole on every rank."""
    local = _local_numel(unit, tensor)
    shape = unit.shape if assigned.rule.whole_matrix else (local,)
    state = state_bytes(assigned.rule.init_state, shape)
    return state + (4 * local if dtype != torch.float32 else 0)


def state_bytes(
    init_state: Callable[[torch.Tensor], dict[str, torch.Tensor]], shape: Sequence[int]
) -> int:
    """Bytes of a rule's state for one unit of `shape`, found without allocating it."""
    state = init_state(torch.empty(1, *shape, device="meta"))
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())


def _activation_bytes(
    model: ModelConfig,
    *,
    layers: int,
    head: bool,
    tokens: int,
    tensor: int,
    sequence_parallel: bool,
    bytes_per_element: int,
) -> int:
    """Bytes one micro-batch of `tokens` leaves behind for backward in one chunk.

    Per layer: the inputs of both norms and both residuals (cut only by sequence parallelism), what
    attention saves (q, k, v, its output), what the gated block saves (gate, up, their product) and
    the norms' outputs. The head saves float32 logits and their softmax.
    """
    width = 4 * model.hidden // (tensor if sequence_parallel else 1) + 2 * model.hidden
    attention = (2 * model.heads + 2 * model.query_groups) * model.head_size // tensor
    block = 3 * model.ffn // tensor
    saved = layers * tokens * (width + attention + block) * bytes_per_element
    logits = 2 * 4 * tokens * model.padded_vocab // tensor if head else 0
    return saved + logits
