"""Memory of one rank by kind, and the bytes of activations that the rank stores and sends.

The bytes of activations are estimates.
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

    weights       the parameters' buckets, whole on every rank
    gradients     the gradients' buckets, whole on every rank
    master        this rank's shard of the float32 weights, 0 if the parameters are float32
    state         this rank's share of the rules' state, and the weights that it stores as an owner
    activations   estimate of the activations
    buffers       estimate of the transient memory of the optimizer's step
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

        Activations are freed before the optimizer's step allocates its buffers. The buffers of the
        Gram penalty are not included, but are shown by a rehearsal.
        """
        permanent = self.weights + self.gradients + self.master + self.state
        return permanent + max(self.activations, self.buffers)


def activation_bytes(shape: StepShape, chunks: Sequence[ChunkSpec], in_flight: float = 1) -> int:
    """Return the bytes of activations on a rank with these chunks.

    The result is the saved activations of `in_flight` micro-batches plus the temporary memory of
    one micro-batch. Temporary memory is the larger of two amounts: the head's memory, which is
    needed until the loss is computed, and a layer's gradients and recomputed activations in its
    backward pass. The head saves its norm, float32 logits, and logits in the model's dtype. With
    `loss_chunk` it needs float32 logits and their softmax for one chunk at a time. With selective
    recomputation, feed-forward blocks save only tensors of routed experts. With full recomputation,
    a layer saves only its input.
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
        # Gradients of the block's tensors; gradients of gate and up are also copied to one tensor.
        gradients = stream + (_block_copies(shape) + model.gated) * block
        once = max(once, whole - saved + gradients)
    head = 0
    if any(part.head for part in chunks):
        rows, chunk = model.padded_vocab // inputs.tensor, inputs.loss_chunk
        logit_bytes = 8 if chunk is not None else 4 + itemsize % 4
        logit_bytes += 0 if model.final_softcap is None else 4  # the slope of the soft cap
        head = 2 * tokens * stream * itemsize
        head += logit_bytes * tokens * (rows if chunk is None else min(rows, chunk))
    return int(tokens * itemsize * kept * in_flight) + max(head, tokens * itemsize * once)


def layer_width(shape: StepShape, layer: int, *, routed_only: bool = False) -> int:
    """Return the number of elements per token that a layer saves for its backward pass.

    Three kinds of elements are counted. The first are inputs and outputs of both norms (sharded
    only by sequence parallelism). The second are q, k, v, the attention output, rotated q and k, a
    copy of normalised grouped queries, and keys and values of other context ranks. The third are
    the tensors of the gated block: gate, up, the activation, a copy of up, and the product of
    activation and up (only gate, up and the product if compiled or with a gradient kernel). With a
    shared gate the output of shared experts is added. All experts of a token, and the token's
    copies for these experts, are counted on the token's rank. Each tensor-parallel rank sends its
    share of the tokens to experts.
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
        width += model.heads * model.head_size // tensor  # the norm's input, copied by heads
    if model.explicit_scores:
        width += model.heads * model.value_head_size // tensor  # the output, by heads
    moe = model.mixture(layer)
    if moe is not None:
        width += moe.top_k * model.hidden * inputs.expert_tensor // tensor
        if moe.shared_gate and not routed_only:
            width += stream  # input of the gate's product
    return width + _block_copies(shape) * _block_width(shape, layer, routed_only=routed_only)


def _block_copies(shape: StepShape) -> int:
    """Return the number of saved tensors with the width of a feed-forward block."""
    fused = shape.inputs.compiled or shape.inputs.fused_backward
    return (3 if fused else 5) if shape.model.gated else 2


def _block_width(shape: StepShape, layer: int, *, routed_only: bool) -> int:
    """Return the hidden size, on one rank, of a token's feed-forward block in `layer`, or of its
    routed experts only.

    Parts of a sharded expert are narrower, but process proportionally more rows.
    """
    moe, tensor = shape.model.mixture(layer), shape.inputs.tensor
    if moe is None:
        return 0 if routed_only else shape.model.ffn // tensor
    routed = moe.expert_ffn * moe.top_k // tensor
    return routed if routed_only else routed + moe.expert_ffn * moe.shared_experts // tensor


def stage_activations(shape: StepShape, stage: int) -> int:
    """Return the bytes of activations on a rank of a stage.

    Attention without a fused kernel needs four float32 copies of one block's scores for backward.
    """
    size = activation_bytes(shape, shape.chunks(stage), shape.in_flight(stage))
    if shape.model.explicit_scores:
        scores = min(ROWS, shape.tokens) * shape.tokens
        size += 4 * 4 * shape.model.heads // shape.inputs.tensor * scores
    return size


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind that a rank sends per step to other ranks, in `calls` collectives.

    across   share of the bytes that leave the node
    """

    kind: str
    size: float
    calls: float
    links: Links
    across: float

    @property
    def seconds(self) -> float:
        """Estimated seconds."""
        return self.links.seconds(self.size, self.across, self.calls)


def activation_traffic(shape: StepShape, stage: int) -> list[Traffic]:
    """Return the nonzero activation traffic of a rank of a pipeline stage, by kind.

    Recomputation repeats the traffic of the forward pass.
    """
    kinds = [_tensor(shape, stage), _context(shape, stage), _pipeline(shape, stage)]
    kinds += _experts(shape, stage)
    return [traffic for traffic in kinds if traffic.size]


def _tensor(shape: StepShape, stage: int) -> Traffic:
    """Return the traffic of tensor parallelism: all-gathers and reduce-scatters, or all-reduces
    without sequence parallelism.

    Under sequence parallelism, a column-parallel layer all-gathers its inputs in forward and
    backward, and reduce-scatters their gradients; a row-parallel layer reduce-scatters its outputs
    and all-gathers their gradients.
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
            if not sequence:  # an all-reduce sends twice the bytes
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
    """Return the traffic of keys and values, which are all-gathered in forward, and of their
    gradients, which are reduce-scattered in backward."""
    model, inputs, links = shape.model, shape.inputs, shape.links("context")
    heads = model.heads if model.latent is not None else model.query_groups
    width = heads * (model.head_size + model.value_head_size) // inputs.tensor
    times = 3 if inputs.recompute == "full" else 2
    calls = times * sum(shape.kinds(stage).values()) * shape.microbatches
    size = calls * width * shape.tokens * inputs.dtype.itemsize * (shape.inputs.context - 1)
    return Traffic("context keys and values", size, calls, links, links.ring_across)


def _pipeline(shape: StepShape, stage: int) -> Traffic:
    """Return the traffic of outputs to the next stage, and of gradients to the previous stage."""
    inputs, links = shape.inputs, shape.links("pipeline")
    chunks = shape.chunks(stage)
    sends = sum(not chunk.head for chunk in chunks) + sum(not chunk.embedding for chunk in chunks)
    calls = sends * shape.microbatches if inputs.pipeline > 1 else 0
    size = calls * shape.own_tokens * shape.model.hidden * inputs.dtype.itemsize
    return Traffic("pipeline activations", size, calls, links, links.ring_across)


def _experts(shape: StepShape, stage: int) -> Iterator[Traffic]:
    """Yield the traffic of tokens and their gradients to experts and back."""
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
