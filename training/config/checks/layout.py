"""Whether a layout fits the model that it cuts, and the number of ranks."""

from collections.abc import Iterator

from models.config import MoEConfig
from training.config.schema import Config


def whole(config: Config) -> Iterator[str]:
    """Divisibility of the model by its layout."""
    model, parallel = config.model, config.parallel
    if min(parallel.tensor, parallel.pipeline, parallel.virtual_pipeline) < 1:
        return  # reported by the section
    tensor, stages = parallel.tensor, parallel.pipeline * parallel.virtual_pipeline
    sizes = {"heads": model.heads, "kv_heads": model.query_groups, "ffn": model.ffn}
    if model.vocab_size is not None and model.vocab_multiple >= 1:
        sizes["vocab_size, padded to a multiple of model.vocab_multiple,"] = model.padded_vocab
    for key, size in sizes.items():
        if size % tensor:
            yield f"model.{key} must be divisible by parallel.tensor = {tensor}, got {size}"
    if parallel.first_stage_layers is not None or parallel.last_stage_layers is not None:
        yield from _uneven_stages(config)
    elif model.layers % stages:
        yield (
            "model.layers must be divisible by parallel.pipeline * parallel.virtual_pipeline = "
            f"{stages}, got {model.layers}"
        )
    if parallel.sequence_parallel and config.train.sequence_length % tensor:
        yield (
            f"train.sequence_length must be divisible by parallel.tensor = {tensor} under sequence "
            f"parallelism, got {config.train.sequence_length}"
        )
    yield from _context(config)
    if model.moe is None:
        yield from _single(config, "expert")
        yield from _single(config, "expert_tensor")
    else:
        yield from _expert_layout(config, model.moe)


def _uneven_stages(config: Config) -> Iterator[str]:
    """Whether the layers that the first and last stage leave divide over the others."""
    parallel = config.parallel
    ends = [n for n in (parallel.first_stage_layers, parallel.last_stage_layers) if n is not None]
    middle = parallel.pipeline - len(ends)
    if parallel.pipeline == 1 or parallel.virtual_pipeline > 1 or min(ends) < 1:
        return  # reported by the section
    rest = config.model.layers - sum(ends)
    if rest < middle or (rest % middle if middle else rest):
        yield (
            f"model.layers must leave parallel.first_stage_layers and last_stage_layers = "
            f"{' + '.join(map(str, ends))} a multiple of the other {middle} stages, "
            f"got {config.model.layers}"
        )


def _context(config: Config) -> Iterator[str]:
    """Whether sequences can be shared as parallel.context says."""
    tensor, context = config.parallel.tensor, config.parallel.context
    if context <= 1:
        return
    length = config.train.sequence_length
    pieces = 2 * context
    if config.parallel.sequence_parallel and length % pieces == 0:
        pieces = context * tensor
    if length % pieces:
        yield (
            f"train.sequence_length must be divisible by {pieces} for parallel.context = {context} "
            f"and parallel.tensor = {tensor}, got {length}"
        )


def _expert_layout(config: Config, moe: MoEConfig) -> Iterator[str]:
    """Whether the experts can be shared out as parallel.expert and expert_tensor say."""
    parallel = config.parallel
    if parallel.expert >= 1 and moe.experts % parallel.expert:
        yield (
            f"model.moe.experts must be divisible by parallel.expert = {parallel.expert}, "
            f"got {moe.experts}"
        )
    if parallel.expert_tensor >= 1 and moe.expert_ffn % parallel.expert_tensor:
        yield (
            "model.moe.expert_ffn must be divisible by parallel.expert_tensor = "
            f"{parallel.expert_tensor}, got {moe.expert_ffn}"
        )
    width = moe.shared_experts * moe.expert_ffn
    if width % parallel.tensor:
        yield (
            "model.moe.shared_experts * model.moe.expert_ffn must be divisible by "
            f"parallel.tensor = {parallel.tensor}, got {width}"
        )
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        yield (
            f"parallel.sequence must not be false for model.family {config.model.family} with "
            "tensor > 1, got false"
        )


def _single(config: Config, key: str) -> Iterator[str]:
    """Whether an axis of parallelism that the model family does not have is 1."""
    if getattr(config.parallel, key) > 1:
        yield (
            f"parallel.{key} must be 1 for model.family {config.model.family}, "
            f"got {getattr(config.parallel, key)}"
        )


def world(config: Config, world_size: int) -> Iterator[str]:
    """What does not fit `world_size` ranks."""
    parallel, train = config.parallel, config.train
    ranks = parallel.model_ranks
    if ranks < 1 or train.micro_batch < 1:
        return  # reported by the sections
    if world_size % ranks:
        yield (
            f"the number of ranks must be divisible by parallel.tensor * pipeline * context = "
            f"{parallel.tensor} * {parallel.pipeline} * {parallel.context} = {ranks}, "
            f"got {world_size}"
        )
        return
    stage = world_size // parallel.pipeline
    sharing = parallel.expert * parallel.expert_tensor
    if parallel.expert >= 1 and parallel.expert_tensor >= 1 and stage % sharing:
        yield (
            "the number of ranks of a pipeline stage must be divisible by parallel.expert * "
            f"expert_tensor = {parallel.expert} * {parallel.expert_tensor} = {sharing}, got {stage}"
        )
    copies = world_size // ranks
    per_pass = train.micro_batch * copies
    if train.global_batch % per_pass:
        yield (
            "train.global_batch must be divisible by train.micro_batch times the data-parallel size"
            f" = {train.micro_batch} * {copies} = {per_pass}, got {train.global_batch}"
        )
    elif parallel.virtual_pipeline > 1 and train.global_batch // per_pass % parallel.pipeline:
        yield (
            "train.global_batch must give microbatches in multiples of parallel.pipeline = "
            f"{parallel.pipeline} for the interleaved schedule, "
            f"got {train.global_batch // per_pass} from {train.global_batch}"
        )
