"""Elements that a layer reads and writes outside its products, forward and backward.

The numbers are those that rehearsals of small models count: each is the slope of one width, the
others held, on the program's own kernels.
"""

from typing import Final, NamedTuple

from parallel.plan.step_shape import StepShape


class Passes(NamedTuple):
    """Elements per token for each element of a width.

    stream      of the residual stream: two norms, two sums, and their gradients
    queries, keys   of their widths: rotation, copies, and their gradients
    head_norm   of queries and keys that are normalised
    gated, plain    of a feed-forward block with and without a gate
    routed      of each expert that a token is sent to
    """

    stream: float
    queries: float
    keys: float
    head_norm: float
    gated: float
    plain: float
    routed: float


SINGLE: Final = Passes(22, 26, 20, 5, 34, 19, 55)
"""Of single operations."""
COMPILED: Final = Passes(26, 17, 0, 7, 8, 5, 11)
"""Of norms, rotations and activations that torch.compile fuses."""

DISPATCHED: Final = 11
"""Of the stream, for each expert that a token is sent to."""
ROUTER: Final = 18
"""Of the stream of a layer with experts, in addition."""
SCORES: Final = 150
"""Of the keys of each head where scores are computed block by block."""
ENDS: Final = 12
"""Of the stream: the embedding, or the final norm."""
LOGITS: Final = 61
"""Bytes for each logit."""
ACCUMULATED: Final = 10
"""Bytes for each parameter: its gradient, added to the float32 sum after each micro-batch."""
STACKED: Final = 8
"""Bytes for each parameter of an expert: those of a layer are copied side by side."""
FORWARD: Final = 0.4
"""Share of all this in the forward pass."""


def layer_elements(shape: StepShape, layer: int) -> float:
    """Return the elements per token of a micro-batch on one rank."""
    model, inputs = shape.model, shape.inputs
    passes, tensor = COMPILED if inputs.compiled else SINGLE, inputs.tensor
    stream = model.hidden / (tensor if inputs.sequence_parallel else 1)
    queries = model.heads * model.head_size / tensor
    keys = model.query_groups * model.head_size / tensor
    block = passes.gated if model.gated else passes.plain
    found = passes.stream * stream + passes.queries * queries + passes.keys * keys
    found += passes.head_norm * (queries + keys) * model.qk_norm
    if model.explicit_scores:
        found += SCORES * model.heads / tensor * shape.sequence_length
    moe = model.moe
    if moe is None or layer < moe.dense_layers:
        return found + block * model.ffn / tensor
    sent = moe.top_k * inputs.expert_tensor / tensor
    width = passes.routed * moe.expert_ffn / inputs.expert_tensor + DISPATCHED * model.hidden
    return (
        found
        + sent * width
        + ROUTER * stream
        + block * moe.expert_ffn * (moe.shared_experts / tensor)
    )
