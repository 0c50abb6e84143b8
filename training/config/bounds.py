"""The largest numbers that a config may have: far above any use, far below what takes forever."""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any, Final

from models.section import shown
from training.config.binding import join

LARGEST: Final[Mapping[str, float]] = {
    "model.layers": 10_000,
    "model.hidden": 1 << 20,
    "model.ffn": 1 << 24,
    "model.*heads": 1 << 14,
    "model.head_dim": 1 << 16,
    "model.vocab_*": 1 << 26,
    "model.latent.*": 1 << 20,
    "model.moe.*experts": 1 << 14,
    "model.moe.*groups": 1 << 14,
    "model.moe.top_k": 1 << 14,
    "model.moe.expert_ffn": 1 << 24,
    "train.*_batch": 1 << 24,
    "train.sequence_length": 1 << 26,
    "train.*steps": 10**10,
    "data.workers": 256,
    "parallel.timeout_seconds": 10**7,
    "parallel.*": 1 << 20,
    "stop.*": 10**7,
    "watchdog.*": 10**7,
    "spikes.window": 10**6,
    "monitors.noise_samples": 1 << 12,
    "monitors.activation_gib": 10**6,
    "optimizer.distributed.bucket_elements": 1 << 40,
    "optimizer.distributed.step_groups": 1 << 16,
    "optimizer.rules.*steps": 1000,
    "optimizer.rules.*evaluations": 1000,
    "pc.steps": 1000,
    "pc.polynomial.degree": 32,
}
"""By key, with `*` for any part of it; the first that a key matches counts."""

LARGEST_INTEGER: Final = 1 << 53
LARGEST_FLOAT: Final = 1e100
"""Of every other key."""

MOST_IN_ALL_LAYERS: Final = 1 << 18
"""Heads, and experts, of all layers together, each of which has matrices of its own."""


def oversized(content: object, path: str = "") -> Iterator[str]:
    """Yield a sentence for each number in nested mappings that is larger than its key allows."""
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from oversized(value, join(path, str(key)))
        if path == "model":
            yield from _all_layers(content)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from oversized(value, path)
    elif isinstance(content, int | float) and abs(content) > largest(path, content):
        yield f"{path} must be at most {largest(path, content)}, got {shown(content)}"


def largest(path: str, value: float) -> float:
    """Return the largest number that a key may have."""
    usual = LARGEST_INTEGER if isinstance(value, int) else LARGEST_FLOAT
    return next((most for key, most in LARGEST.items() if fnmatchcase(path, key)), usual)


def _all_layers(model: Mapping[Any, Any]) -> Iterator[str]:
    """Yield whether a model has too many matrices to be laid out in bounded time."""
    moe = model.get("moe")
    counts = {"model.heads": model.get("heads")}
    counts["model.moe.experts"] = moe.get("experts") if isinstance(moe, Mapping) else None
    layers = model.get("layers")
    for key, count in counts.items():
        if not (isinstance(layers, int) and isinstance(count, int)):
            continue
        if layers * count > MOST_IN_ALL_LAYERS >= max(layers, count):
            yield (
                f"{key} times model.layers must be at most {MOST_IN_ALL_LAYERS}, "
                f"got {count} times {layers}"
            )
