"""Bytes of activations and their gradients that a rank sends per step, by kind."""

from collections.abc import Iterator
from dataclasses import dataclass

from parallel.plan.devices import Links
from parallel.plan.step_shape import StepShape, layer_weights


@dataclass(frozen=True)
class Traffic:
    """Bytes of one kind that a rank sends per step in `calls` collectives, without what stays.

    across   share of them that leaves the node
    """

    kind: str
    size: float
    calls: float
    links: Links
    across: float

    @property
    def seconds(self) -> float:
        """Modelled time."""
        return self.links.seconds(self.size, self.across, self.calls)


def activation_traffic(shape: StepShape, stage: int) -> list[Traffic]:
    """Return what a rank of a pipeline stage sends for its activations, kinds with none left out.

    Recomputation sends again what its forward pass sends.
    """
    kinds = [_tensor(shape, stage), _context(shape, stage), _pipeline(shape, stage)]
    kinds += _experts(shape, stage)
    return [traffic for traffic in kinds if traffic.size]


def _tensor(shape: StepShape, stage: int) -> Traffic:
    """All-gathers and reduce-scatters of tensor-parallel matrices, or all-reduces without sequence
    parallelism.

    Under sequence parallelism a column-parallel matrix gathers its inputs forward, and once more
    backward, where it scatters their gradients; a row-parallel one scatters its outputs and gathers
    their gradients.
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
            if not sequence:  # an all-reduce sends twice
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
    """Keys and values, gathered forward, and their gradients, scattered backward."""
    model, inputs, links = shape.model, shape.inputs, shape.links("context")
    heads = model.heads if model.latent is not None else model.query_groups
    width = heads * (model.head_size + model.value_head_size) // inputs.tensor
    times = 3 if inputs.recompute == "full" else 2
    calls = times * sum(shape.kinds(stage).values()) * shape.microbatches
    size = calls * width * shape.tokens * inputs.dtype.itemsize * (shape.inputs.context - 1)
    return Traffic("context keys and values", size, calls, links, links.ring_across)


def _pipeline(shape: StepShape, stage: int) -> Traffic:
    """Outputs of every chunk but the last, and gradients of the inputs of every one but the first,
    to the stage after and before."""
    inputs, links = shape.inputs, shape.links("pipeline")
    chunks = shape.chunks(stage)
    sends = sum(not chunk.head for chunk in chunks) + sum(not chunk.embedding for chunk in chunks)
    calls = sends * shape.microbatches if inputs.pipeline > 1 else 0
    size = calls * shape.own_tokens * shape.model.hidden * inputs.dtype.itemsize
    across = 1 / max(1, shape.device.node_size // inputs.stage_ranks)
    return Traffic("pipeline activations", size, calls, links, across)


def _experts(shape: StepShape, stage: int) -> Iterator[Traffic]:
    """Tokens to their experts and back, and their gradients likewise."""
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
