"""How ranks share a model: the sizes of the axes, the layers of a chunk, the part of one rank."""

from dataclasses import dataclass
from typing import Literal

QKVUnits = Literal["head", "group", "component", "fused"]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Number of ranks on each axis, and how the pipeline is cut.

    tensor             ranks that share each dense matrix
    pipeline           ranks that share the layers
    virtual_pipeline   model chunks of each pipeline rank
    context            ranks that share each sequence
    expert             ranks that share the experts of a layer
    expert_tensor      ranks that share each of these experts
    sequence_parallel  whether activations between tensor-parallel blocks are cut
    first_stage_layers, last_stage_layers   None for as many as the other stages have
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence_parallel: bool = False
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None


@dataclass(frozen=True)
class ChunkSpec:
    """What one model chunk of a pipeline rank holds.

    layers      numbers of its layers, ascending
    embedding   whether it holds the embedding
    head        whether it holds the head, and the final norm
    """

    layers: tuple[int, ...]
    embedding: bool = True
    head: bool = True


@dataclass(frozen=True, kw_only=True)
class Split:
    """How weights are split into units, and which of them a rank holds.

    qkv_units       units of a fused attention weight
    split_gate_up   whether gate and up are two units
    tensor_rank, tensor_size   the tensor-parallel rank, and the number of these ranks
    expert_rank, expert_size   the same for expert parallelism: a rank holds `experts / expert_size`
                               of each layer, with the domain `expert`
    expert_tensor   ranks that a routed expert's matrices are cut over
    """

    qkv_units: QKVUnits = "head"
    split_gate_up: bool = True
    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor: int = 1
