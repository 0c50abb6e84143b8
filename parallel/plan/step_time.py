"""Models the step time with a roofline model and the constants below, not with measurements.

The time of a matmul is its FLOPs divided by the achievable FLOP/s for its shape. The time of any
other operation is its bytes divided by the copy rate, but at least the launch time. The time of
communication is its bytes divided by the bandwidth of the slowest link. Activation communication
does not overlap with computation. Gradient reduce-scatters overlap with the last micro-batch's
backward pass, and weight all-gathers overlap with the first micro-batch's forward pass, unless the
config disables the overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final, NamedTuple

from models.families import mean_keys
from parallel.plan.activation_costs import activation_traffic
from parallel.plan.devices import ATTENTION, EXPLICIT_ATTENTION, product_seconds, varying_share
from parallel.plan.step_shape import LayerWeight, Replicas, StepShape, layer_weights
from parallel.storage.bucket_layout import default_step_groups

LAYER_LAUNCHES: Final = 20
"""Number of kernel launches in a layer's forward pass, not counting matmuls."""
MIXTURE_LAUNCHES: Final = 100
"""Number of small kernels launched in the forward and backward pass of an MoE layer to sort tokens
by expert."""
STEP_BYTES: Final = 34
"""Bytes moved by the optimizer per shard element: it reads and writes float32 masters, gradients
and momentum, and a float32 second moment or copy, and it writes the new weight."""
MATRIX_BYTES: Final = 105
"""Additional bytes per element for whole-matrix rules: momentum, momentum exchange, update."""


class Passes(NamedTuple):
    """Number of elements moved per token, divided by the tensor's width.

    stream      residual stream: two norms, two sums, and their gradients
    queries, keys   queries and keys: rotation, copies, and their gradients
    head_norm   normalised queries and keys
    gated, plain    feed-forward block with and without a gate
    routed      routed experts, per expert selected by a token
    """

    stream: float
    queries: float
    keys: float
    head_norm: float
    gated: float
    plain: float
    routed: float


SINGLE: Final = Passes(22, 26, 20, 5, 34, 19, 55)
"""Passes without fusion: every operation is a separate kernel."""
COMPILED: Final = Passes(16, 4, 6, 1, 8, 5, 11)
"""Passes if torch.compile fuses rotations, activations, and norms with the preceding sums, and if
the gradients of queries, keys and values are written as one tensor."""

DISPATCHED: Final = 11
"""Passes over the residual stream per expert selected by a token."""
ARRIVED: Final = 8
"""Passes, for each expert selected by a token, to sort received tokens by expert and to restore the
order of the results. Only ranks with several experts need these passes."""
SHARED_GATE: Final = 11
"""Passes over the residual stream for the gate of shared experts."""
ROUTER: Final = 18
"""Additional passes over the residual stream in an MoE layer."""
SCORES: Final = 150
"""Passes over each head's keys if scores are computed block by block."""
PACKED: Final = 8
"""Passes over queries and keys if documents are packed: copies of queries, keys, values and outputs
in sequence order, and copies of their gradients."""
ENDS: Final = 12
"""Passes over the residual stream for the embedding or the final norm."""
LOGITS: Final = 61
"""Bytes moved per logit."""
FUSED_LOGITS: Final = 22
"""Bytes moved per logit with Liger's loss: maximum, float32 exponential, and gradient."""
ACCUMULATED: Final = 10
"""Bytes moved per embedding or expert parameter to add a micro-batch's gradient to the float32 sum;
other gradients are accumulated by the wgrad GEMM."""
STACKED: Final = 8
"""Bytes moved per expert parameter to copy a layer's experts into one stack."""
FORWARD: Final = 0.4
"""Fraction of the bytes that is moved in the forward pass."""


@dataclass(frozen=True)
class StageTime:
    """Seconds per micro-batch on one rank of a stage.

    forward, backward   computation
    recompute           recomputation
    sending             activation communication, forward and backward, by kind
    """

    forward: float
    backward: float
    recompute: float
    sending: dict[str, float]

    @property
    def total(self) -> float:
        """Time of one micro-batch, in seconds."""
        return self.forward + self.backward + self.recompute + sum(self.sending.values())


@dataclass(frozen=True)
class StepTime:
    """Modelled step time on the slowest rank, in seconds.

    forward, backward, recompute   computation of all micro-batches
    activations   activation communication
    bubble        time spent waiting for other pipeline stages
    gradients     exposed reduce-scatter time, and the time to sum a tied embedding's gradients
    weights       exposed all-gather time
    exchange      exchange of momentum and updates between shards and owners
    optimizer     optimizer step
    """

    forward: float
    backward: float
    recompute: float
    activations: float
    bubble: float
    gradients: float
    weights: float
    exchange: float
    optimizer: float

    @property
    def total(self) -> float:
        """Step time, in seconds."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class OptimizerLoad:
    """The optimizer's work per step on the busiest rank of a stage.

    flops      FLOPs of the rules for the rank's matrices
    elements   elements in the rank's shards
    gradients, weights   bytes of reduce-scatters and all-gathers across replicas, by domain
    exchanged  bytes of momentum and updates sent between owners and shards
    tied       bytes of a tied embedding's gradient sent between the first and last stage
    """

    flops: float
    elements: float
    gradients: Mapping[Replicas, float]
    weights: Mapping[Replicas, float]
    exchanged: float = 0.0
    tied: float = 0.0


def layer_elements(shape: StepShape, layer: int) -> float:
    """Return the number of elements moved by a layer per token of a micro-batch on one rank."""
    model, inputs = shape.model, shape.inputs
    passes, tensor = COMPILED if inputs.compiled else SINGLE, inputs.tensor
    stream = shape.stream
    queries = model.heads * model.head_size / tensor
    keys = model.query_groups * model.head_size / tensor
    block = passes.gated if model.gated else passes.plain
    elements = passes.stream * stream + passes.queries * queries + passes.keys * keys
    elements += passes.head_norm * (queries + keys) * model.qk_norm
    if model.explicit_scores:
        elements += SCORES * model.heads / tensor * shape.sequence_length
    elif shape.attended is not None and shape.micro_batch > 1:
        elements += PACKED * (queries + keys)
    moe = model.mixture(layer)
    if moe is None:
        return elements + block * model.ffn / tensor
    sent = moe.top_k * inputs.expert_tensor / tensor
    arrive = inputs.expert * inputs.expert_tensor > 1 and moe.experts > inputs.expert
    width = passes.routed * moe.expert_ffn / inputs.expert_tensor
    width += (DISPATCHED + ARRIVED * arrive) * model.hidden
    return (
        elements
        + sent * width
        + (ROUTER + SHARED_GATE * moe.shared_gate) * stream
        + block * moe.expert_ffn * (moe.shared_experts / tensor)
    )


def weight_seconds(shape: StepShape, weight: LayerWeight) -> float:
    """Return the time in seconds of a weight's matmul for one micro-batch. For an expert's weight,
    this includes the matmuls of all experts on a rank."""
    inputs, model = shape.inputs, shape.model
    if not weight.expert:
        rows, cols = weight.local(inputs.tensor)
        tokens = shape.own_tokens if weight.cut is None else shape.tokens
        operands = "fp32" if weight.router else shape.operands
        return product_seconds(shape.device, operands, tokens, cols, rows)
    assert model.moe is not None
    rows, cols = weight.local(inputs.expert_tensor)
    local = model.moe.experts // inputs.expert
    rows_of_expert = shape.pairs * inputs.expert / model.moe.experts
    return local * product_seconds(shape.device, shape.operands, rows_of_expert, cols, rows)


def attention_seconds(shape: StepShape, layer: int) -> float:
    """Return the time in seconds of a layer's attention in one micro-batch's forward pass."""
    model, inputs, share = shape.model, shape.inputs, ATTENTION
    length: float = shape.sequence_length
    if model.explicit_scores:  # masked scores are also computed
        share = EXPLICIT_ATTENTION
    elif shape.attended is not None:
        length, share = shape.attended, varying_share(shape.device)
    keys = mean_keys(model, layer, length)
    width = model.heads // inputs.tensor * (model.head_size + model.value_head_size)
    operands = "bf16" if shape.operands == "fp8" else shape.operands
    return 2 * shape.tokens * keys * width / (share * shape.device.peak[operands])


def stage_elements(shape: StepShape, stage: int) -> tuple[int, int]:
    """Return the numbers of elements in a rank's dense parameters and in its routed experts."""
    model, inputs = shape.model, shape.inputs
    dense = experts = 0
    for layer, number in shape.kinds(stage).items():
        weights = layer_weights(model, layer)
        dense += number * weights.elements(inputs.tensor)
        moe = model.mixture(layer)
        if moe is not None:
            local = moe.experts // inputs.expert
            experts += number * local * weights.expert_elements(inputs.expert_tensor)
    for chunk in shape.chunks(stage):
        vocabulary = model.padded_vocab // inputs.tensor * model.hidden
        once = model.tie_embeddings and chunk.embedding and chunk.head
        dense += (chunk.embedding + chunk.head - once) * vocabulary
        dense += chunk.head * model.hidden  # the final norm
    return dense, experts


def stage_time(shape: StepShape, stage: int) -> StageTime:
    """Return the time of one micro-batch on a rank of a stage."""
    device, inputs, model = shape.device, shape.inputs, shape.model
    copied = shape.tokens * inputs.dtype.itemsize / device.copy_rate  # per element of each token
    _, experts = stage_elements(shape, stage)
    summed = (ACCUMULATED + STACKED) * experts / device.copy_rate
    forward, backward, recompute = 0.0, summed, 0.0
    for layer, number in shape.kinds(stage).items():
        seconds = [(w, weight_seconds(shape, w)) for w in layer_weights(model, layer).weights]
        products, attention = sum(s for _, s in seconds), attention_seconds(shape, layer)
        moved = copied * layer_elements(shape, layer)
        if model.mixture(layer) is not None:
            moved += MIXTURE_LAUNCHES * device.launch_seconds
        least = LAYER_LAUNCHES * device.launch_seconds
        ahead = products + attention + max(FORWARD * moved, least)
        block = sum(s for weight, s in seconds if weight.block)
        forward += number * ahead
        backward += number * (
            2 * products + 2.5 * attention + max((1 - FORWARD) * moved, 2 * least)
        )
        recompute += number * {"none": 0.0, "selective": block, "full": ahead}[inputs.recompute]
    for chunk in shape.chunks(stage):
        stream = model.hidden * shape.own_tokens / shape.tokens
        ends = copied * ENDS * stream * (chunk.embedding + chunk.head)
        forward, backward = forward + FORWARD * ends, backward + (1 - FORWARD) * ends
        rows = model.padded_vocab // inputs.tensor * chunk.embedding
        backward += ACCUMULATED * rows * model.hidden / device.copy_rate
    if any(chunk.head for chunk in shape.chunks(stage)):
        rows = model.padded_vocab // inputs.tensor
        head = product_seconds(device, shape.operands, shape.tokens, model.hidden, rows)
        fused = inputs.fused_loss and inputs.loss_chunk is None
        logits = (FUSED_LOGITS if fused else LOGITS) * shape.tokens * rows / device.copy_rate
        forward += head + FORWARD * logits
        backward += 2 * head + (1 - FORWARD) * logits
        recompute += 0.0 if inputs.loss_chunk is None else head
    sent = activation_traffic(shape, stage)
    sending = {traffic.kind: traffic.seconds / shape.microbatches for traffic in sent}
    return StageTime(forward, backward, recompute, sending)


def step_time(shape: StepShape, loads: Sequence[OptimizerLoad]) -> StepTime:
    """Return the step time, given each stage's optimizer load.

    All stages wait for the stage with the slowest optimizer step.
    """
    times = [stage_time(shape, stage) for stage in range(shape.inputs.pipeline)]
    slowest = max(times, key=lambda stage: stage.total)
    count = shape.microbatches
    parts = [optimizer_parts(shape, *both) for both in zip(times, loads, strict=True)]
    gradients, weights, exchange, optimizer = max(parts, key=sum)
    return StepTime(
        forward=count * slowest.forward,
        backward=count * slowest.backward,
        recompute=count * slowest.recompute,
        activations=count * sum(slowest.sending.values()),
        bubble=bubble_seconds(shape, times),
        gradients=gradients,
        weights=weights,
        exchange=exchange,
        optimizer=optimizer,
    )


def bubble_seconds(shape: StepShape, times: Sequence[StageTime]) -> float:
    """Return how long a rank in the slowest stage waits for other stages, in seconds."""
    totals = [stage.total for stage in times]
    return (sum(totals) - max(totals)) / shape.inputs.virtual_pipeline


def optimizer_parts(
    shape: StepShape, time: StageTime, load: OptimizerLoad
) -> tuple[float, float, float, float]:
    """Return a stage's gradient, weight, exchange and optimizer times in seconds."""
    device, stage, pipeline = shape.device, shape.links("stage"), shape.links("pipeline")

    def ring(sizes: Mapping[Replicas, float]) -> float:
        links = {domain: shape.links(domain) for domain in sizes}
        return sum(links[d].seconds(size, links[d].ring_across) for d, size in sizes.items())

    reduced, gathered = ring(load.gradients), ring(load.weights)
    inputs = shape.inputs
    groups = inputs.step_groups or default_step_groups(int(load.elements))
    return (
        max(0.0, reduced - time.backward * inputs.overlap_reduce)
        + pipeline.seconds(load.tied, pipeline.ends_across),
        max(0.0, gathered - time.forward * inputs.overlap_gather),
        stage.seconds(load.exchanged, stage.all_to_all_across, 2.0 * groups),
        rule_seconds(shape, load.flops)
        + (STEP_BYTES + MATRIX_BYTES * (load.flops > 0)) * load.elements / device.copy_rate,
    )


def rule_seconds(shape: StepShape, flops: float) -> float:
    """Return the time of the rules' matmuls in seconds."""
    return flops / (shape.device.efficiency * shape.device.peak[shape.inputs.rule_operands])
