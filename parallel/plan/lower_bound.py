"""What a layout takes at least, in a fraction of the time that its plan takes to make."""

from parallel.plan.memory import stage_activations
from parallel.plan.step_shape import Replicas, StepShape
from parallel.plan.step_time import (
    OptimizerLoad,
    StageTime,
    optimizer_parts,
    stage_elements,
    stage_time,
)


def least_permanent(shape: StepShape, stage: int) -> int:
    """Return the bytes of weights, gradients and masters of a stage, without padding."""
    dense, experts = stage_elements(shape, stage)
    itemsize = shape.inputs.dtype.itemsize
    copies = shape.links("experts").size
    master = 4 * (dense // shape.inputs.data + experts // copies) if itemsize < 4 else 0
    return (dense + experts) * (itemsize + 4) + master


def fits_at_best(shape: StepShape, room: int) -> bool:
    """Return whether what is left out of the bound might fit beside it into `room` bytes."""
    for stage in range(shape.inputs.pipeline):
        if least_permanent(shape, stage) + stage_activations(shape, stage) > room:
            return False
    return True


def least_seconds(shape: StepShape, owned_flops: float) -> float:
    """Return a step time that no plan of this layout is below.

    `owned_flops` are those of the rules of all matrices, which are shared equally at best.
    """
    times = [stage_time(shape, stage) for stage in range(shape.inputs.pipeline)]
    gpus = shape.inputs.stage_ranks * shape.inputs.pipeline
    rules = (
        owned_flops
        / gpus
        / (shape.device.efficiency * shape.device.peak[shape.inputs.rule_operands])
    )
    parts = [_parts(shape, stage, time) for stage, time in enumerate(times)]
    optimizer = max(*parts, sum(parts) / len(parts) + rules, 0.0)
    slowest = max(stage.total for stage in times)
    bubble = (sum(stage.total for stage in times) - slowest) / shape.inputs.virtual_pipeline
    return shape.microbatches * slowest + bubble + optimizer


def _parts(shape: StepShape, stage: int, time: StageTime) -> float:
    """Seconds of a stage after its backward pass, without the rules and the exchange."""
    dense, experts = stage_elements(shape, stage)
    itemsize = shape.inputs.dtype.itemsize
    sizes: dict[Replicas, int] = {"dense": dense, "experts": experts}
    copies = {name: shape.links(name).size for name in sizes}
    shares = {name: size * (copies[name] - 1) / copies[name] for name, size in sizes.items()}
    load = OptimizerLoad(
        flops=0.0,
        elements=sum(size / copies[name] for name, size in sizes.items()),
        gradients={name: 4 * share for name, share in shares.items()},
        weights={name: itemsize * share for name, share in shares.items()},
    )
    return sum(optimizer_parts(shape, time, load))
