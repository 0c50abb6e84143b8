"""The kinds of memory on a rank, and formulas for activation memory and activation traffic.

Activation sizes are estimates.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from models.blocks.attention import ROWS
from models.families import FAMILIES
from models.layout import ChunkSpec
from parallel.plan.devices import Links
from parallel.plan.step_shape import StepShape, layer_weights


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    weights       parameter buckets, unsharded
    gradients     gradient buckets, unsharded
    master        this rank's shard of the float32 weights; 0 if the parameters are float32
    state         this rank's share of the optimizer state, and the weights it stores as an owner
    activations   estimated activation memory
    buffers       estimated transient memory of the optimizer step
    """

    weights: int
    gradients: int
    master: int
    state: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        """Peak memory in bytes.

        Activations are freed before the optimizer step allocates its buffers. The Gram penalty's
        buffers are not included. A rehearsal includes these buffers.
        """
        permanent = self.weights + self.gradients + self.master + self.state
        return permanent + max(self.activations, self.buffers)


def activation_bytes(shape: StepShape, chunks: Sequence[ChunkSpec], in_flight: float = 1) -> int:
    """Return the bytes of activation memory on a rank with the given chunks.

    This is the sum of the activations saved for `in_flight` micro-batches and the temporary memory
    of one micro-batch. Temporary memory is the maximum of two amounts. The first is the head's
    memory, which is needed until the loss is computed. The second is a layer's gradients and
    recomputed activations in its backward pass. The head saves the input and output of its norm,
    float32 logits, and logits in the model's dtype. With `loss_chunk`, the head needs float32
    logits and their softmax for one chunk at a time. With selective recomputation, a feed-forward
    block saves only the tensors of routed experts. With full recomputation, a layer only saves its
    input.
    """
    model, inputs, tokens = shape.model, shape.inputs, shape.tokens
    itemsize, stream = inputs.dtype.itemsize, shape.stream
    dense = model.layers if model.moe is None else model.moe.dense_layers
    kinds = Counter(layer >= dense for part in chunks for layer in part.layers)
    kept = once = 0
    for mixed, number in kinds.items():
        layer = dense if mixed else 0
        whole, routed = (layer_width(shape, layer, routed_only=only) for only in (False, True))
        saved = {"none": whole, "selective": routed, "full": stream}[inputs.recompute]
        kept += number * saved
        block = _block_width(shape, layer, routed_only=False)
        # Gradients of the block's tensors; those of gate and up are also copied into one tensor.
        gradients = stream + (_block_copies(shape) + model.gated) * block
        once = max(once, whole - saved + gradients)
    head = 0
    if any(part.head for part in chunks):
        rows, chunk = model.padded_vocab // inputs.tensor, inputs.loss_chunk
        logit_bytes = 8 if chunk is not None else 4 + itemsize % 4
        logit_bytes += 0 if model.final_softcap is None else 4  # derivative of the soft cap
        head = 2 * tokens * stream * itemsize
        head += logit_bytes * tokens * (rows if chunk is None else min(rows, chunk))
    return int(tokens * itemsize * kept * in_flight) + max(head, tokens * itemsize * once)


def layer_width(shape: StepShape, layer: int, *, routed_only: bool = False) -> int:
    """Return the number of elements per token that a layer saves for its backward pass.

    Three groups of tensors are counted. First, the inputs and outputs of both norms (sharded only
    with sequence parallelism). Second, q, k, v, the attention output, rotated q and k, a copy of
    normalised grouped queries, and keys and values from other context ranks. Third, the tensors of
    the gated block: gate, up, the activation, a copy of up, and the product of activation and up
    (with torch.compile or a gradient kernel, only gate, up and the product). A shared gate adds one
    tensor, the output of the shared experts. All of a token's experts, and the copies of the token
    sent to them, are counted on the token's own rank. Each tensor-parallel rank sends its share of
    the tokens to experts.
    """
    model, inputs, stream = shape.model, shape.inputs, shape.stream
    tensor = inputs.tensor
    width = 4 * stream
    sizes = model.head_size + model.value_head_size
    width += (model.heads + model.query_groups) * (sizes + model.head_size) // tensor
    width += (inputs.context - 1) * model.query_groups * sizes // tensor  # other ranks' k and v
    family = FAMILIES[model.family]
    if family.post_norms:
        width += 2 * stream  # inputs of these norms
    if family.zero_centered_gains:  # inputs and normalised values, in float32
        width += 3 * stream * (4 if family.post_norms else 2)
    if model.qk_norm and model.query_groups != model.heads:
        width += model.heads * model.head_size // tensor  # norm input, copied per head
    if model.explicit_scores:
        width += model.heads * model.value_head_size // tensor  # output, per head
    moe = model.mixture(layer)
    if moe is not None:
        width += moe.top_k * model.hidden * inputs.expert_tensor // tensor
        if moe.shared_gate and not routed_only:
            width += stream  # input of the gate matmul
    return width + _block_copies(shape) * _block_width(shape, layer, routed_only=routed_only)


def _block_copies(shape: StepShape) -> int:
    """Return how many tensors with the width of a feed-forward block are saved."""
    fused = shape.inputs.compiled or shape.inputs.fused_backward
    return (3 if fused else 5) if shape.model.gated else 2


def _block_width(shape: StepShape, layer: int, *, routed_only: bool) -> int:
    """Return the per-rank hidden size of a token's feed-forward block in `layer` or, with
    `routed_only`, of its routed experts.

    Shards of an expert are narrower, but process proportionally more rows.
    """
    moe, tensor = shape.model.mixture(layer), shape.inputs.tensor
    if moe is None:
        return 0 if routed_only else shape.model.ffn // tensor
    routed = moe.expert_ffn * moe.top_k // tensor
    return routed if routed_only else routed + moe.expert_ffn * moe.shared_experts // tensor


def stage_activations(shape: StepShape, stage: int) -> int:
    """Return the bytes of activation memory on a rank of a stage.

    Attention without a fused kernel needs four float32 copies of one block's scores for its
    backward pass.
    """
    size = activation_bytes(shape, shape.chunks(stage), shape.in_flight(stage))
    if shape.model.explicit_scores:
        scores = min(ROWS, shape.tokens) * shape.tokens
        size += 4 * 4 * shape.model.heads // shape.inputs.tensor * scores
    return size


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind that a rank sends per step, in `calls` collectives.

    across   fraction of these bytes that leaves the node
    """

    kind: str
    size: float
    calls: float
    links: Links
    across: float

    @property
    def seconds(self) -> float:
        """Estimated time in seconds."""
        return self.links.seconds(self.size, self.across, self.calls)


def activation_traffic(shape: StepShape, stage: int) -> list[Traffic]:
    """Return the nonzero activation traffic of a rank in a pipeline stage, by kind.

    Recomputation repeats the forward pass's traffic.
    """
    kinds = [_tensor(shape, stage), _context(shape, stage), _pipeline(shape, stage)]
    kinds += _experts(shape, stage)
    return [traffic for traffic in kinds if traffic.size]


def _tensor(shape: StepShape, stage: int) -> Traffic:
    """Return the tensor-parallel traffic: all-gathers and reduce-scatters with sequence
    parallelism, otherwise all-reduces.

    With sequence parallelism, a column-parallel layer all-gathers its inputs in the forward and
    backward passes, and reduce-scatters their gradients; a row-parallel layer reduce-scatters its
    outputs and all-gathers their gradients.
    """
    inputs, links = shape.inputs, shape.links("tensor")
    sequence = inputs.sequence_parallel
    width = calls = 0.0
    for layer, number in shape.kinds(stage).items():
        times: dict[int, float] = {}  # by width
        for weight in layer_weights(shape.model, layer).weights:
            if weight.cut is None or weight.expert:
                continue
            again = inputs.recompute == "full" or (inputs.recompute == "selective" and weight.block)
            column = weight.cut == "rows"
            once = (3 if column else 2) + again
            if not sequence:  # an all-reduce sends twice as many bytes
                once = 2 if column else 2 * (1 + again)
            side = weight.cols if column else weight.rows
            times[side] = times.get(side, 0) + once
        latent = shape.model.latent
        if latent is not None:
            times[latent.rope_head_dim] = 2 + (sequence and inputs.recompute == "full")
        width += number * sum(side * count for side, count in times.items())
        calls += number * sum(times.values())
    for chunk in shape.chunks(stage):
        if chunk.embedding:
            width, calls = width + 2 * shape.model.hidden, calls + 2
        if chunk.head:
            ends = 3 if sequence and inputs.loss_chunk is None else 2
            width, calls = width + ends * shape.model.hidden, calls + ends
    size = width * shape.tokens * inputs.dtype.itemsize * (inputs.tensor - 1) / inputs.tensor
    count = shape.microbatches
    return Traffic("tensor activations", size * count, calls * count, links, links.ring_across)


def _context(shape: StepShape, stage: int) -> Traffic:
    """Return the context-parallel traffic: all-gathers of keys and values in the forward pass, and
    reduce-scatters of their gradients in the backward pass."""
    model, inputs, links = shape.model, shape.inputs, shape.links("context")
    heads = model.heads if model.latent is not None else model.query_groups
    width = heads * (model.head_size + model.value_head_size) // inputs.tensor
    times = 3 if inputs.recompute == "full" else 2
    calls = times * sum(shape.kinds(stage).values()) * shape.microbatches
    size = calls * width * shape.tokens * inputs.dtype.itemsize * (shape.inputs.context - 1)
    return Traffic("context keys and values", size, calls, links, links.ring_across)


def _pipeline(shape: StepShape, stage: int) -> Traffic:
    """Return the pipeline traffic: outputs to the next stage and gradients to the previous one."""
    inputs, links = shape.inputs, shape.links("pipeline")
    chunks = shape.chunks(stage)
    sends = sum(not chunk.head for chunk in chunks) + sum(not chunk.embedding for chunk in chunks)
    calls = sends * shape.microbatches if inputs.pipeline > 1 else 0
    size = calls * shape.own_tokens * shape.model.hidden * inputs.dtype.itemsize
    return Traffic("pipeline activations", size, calls, links, links.ring_across)


def _experts(shape: StepShape, stage: int) -> Iterator[Traffic]:
    """Yield the expert-parallel traffic: tokens and their gradients, sent to experts and back."""
    moe, inputs, links = shape.model.moe, shape.inputs, shape.links("expert")
    if moe is None or links.size == 1:
        return
    kinds = shape.kinds(stage).items()
    layers = sum(number for layer, number in kinds if shape.model.mixture(layer) is not None)
    times = 3 if inputs.recompute == "full" else 2
    calls = layers * times * shape.microbatches
    rows = shape.pairs * (links.size - 1) / links.size
    size = calls * rows * shape.model.hidden * inputs.dtype.itemsize
    for kind in ("expert dispatch", "expert combine"):
        yield Traffic(kind, size, calls, links, links.all_to_all_across)
