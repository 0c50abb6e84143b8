"""Scaled-down recipes, in which only the sizes are changed."""

import lzma
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.paths import ROOT
from tests.slow_cases import slow_but
from tests.token_files import write_stream
from training.config import Config, load_config

HIDDEN, HEADS, EXPERTS = 64, 4, 16
STEPS = 40
AXES = ("tensor", "pipeline", "virtual_pipeline", "context", "expert")


def write_bytes(folder: Path, count: int = 200_000) -> None:
    """Write bytes from the bundled corpus, which need few token ids, to `folder`/tokens."""
    text = lzma.decompress((ROOT / "examples/data/kjv.txt.xz").read_bytes())[:count]
    write_stream(folder / "tokens", np.frombuffer(text, np.uint8).astype(np.uint16))


FAST = (
    "tiny_sso",
    "llama1b_adamw_pc",
    "gpt160m_muon_gram",
    "qwen3_1.7b_muon_sphere",
    "moe_8b_a1b_muon",
    "deepseek16b_sso",
)
"""Recipes used in the fast tests. They cover every model family, every rule, PC layers and the Gram
penalty."""


def recipe(name: str, *overrides: str) -> Config:
    """Load the config of a recipe."""
    return load_config(ROOT / "configs" / f"{name}.yaml", overrides)


def every_recipe(pattern: str = "*") -> list[Any]:
    """Return a parameter for each recipe whose name matches. Recipes not in `FAST` are slow."""
    names = sorted(path.stem for path in (ROOT / "configs").glob(f"{pattern}.yaml"))
    return slow_but(FAST, names)


LARGEST = {
    "gpt160m": "gpt1.4b",
    "gpt405m": "gpt1.4b",
    "llama271m": "llama1b",
    **{f"qwen3_width{width}": "qwen3_1.7b" for width in (256, 512, 1024, 2048)},
}
"""Models that differ from a larger model only in size, so that their scaled-down recipes are the
same."""
UNLIKE_LARGE = ("tiny_annealed_sso", "tiny_documents_muon", "tiny_gemma2_sso", "tiny_sso")
"""Tiny recipes that are not just a float32 version of a large recipe, plus one recipe that is."""
NUMBER = re.compile(r" \S+=[0-9.e-]+(?= |$)")


def distinct(runs: Iterable[str]) -> list[str]:
    """Filter runs (recipes with overrides). Drop runs that differ from an earlier run only in
    sizes, learning rates and other numbers, and tiny versions of large recipes."""
    found: dict[str, str] = {}
    for run in sorted(runs):
        if run.startswith("tiny_") and run not in UNLIKE_LARGE:
            continue
        model = next((name for name in LARGEST if run.startswith(f"{name}_")), "")
        same = LARGEST.get(model, "") + run.removeprefix(model)
        found.setdefault(NUMBER.sub("", same), run)
    return list(found.values())


def recipes() -> dict[str, list[str]]:
    """Return the names of distinct recipes by model. Tiny recipes are grouped by the first two
    words of their names."""
    found: dict[str, list[str]] = {}
    for name in distinct(path.stem for path in (ROOT / "configs").glob("*.yaml")):
        size = "_".join(name.split("_")[: 2 if name.startswith("tiny_") else 1])
        found.setdefault(size, []).append(name)
    return found


def small_recipe(name: str, folder: str, overrides: Sequence[str] = (), **parallel: int) -> Config:
    """Return a scaled-down recipe that trains on the tokens in `folder` with the layout `parallel`.

    `overrides` apply to the recipe, except for sizes, tasks and profile. The recipe's precision,
    rules and their settings, PC layers, penalty, clipping, storage and learning rates are kept.
    """
    path = ROOT / "configs" / f"{name}.yaml"
    full = load_config(path, overrides)
    model = full.model
    sizes: dict[str, object] = {
        "model.layers": 2,
        "model.hidden": HIDDEN,
        "model.heads": HEADS,
        "model.ffn": 96,
        "model.vocab_size": 256,
        "model.vocab_multiple": 128,
        "train.steps": STEPS,
        "train.global_batch": 8,
        "train.micro_batch": 2,
        "train.sequence_length": 32,
        "schedule.warmup_steps": 4,
        "checkpoint.interval": 0,
        "validation.samples": 8,
        "validation.samples_interval": 0,
        "tasks.files": None,  # would require a tokenizer
        "log.profile": None,
        "data.workers": 0,
        **{f"parallel.{axis}": 1 for axis in AXES},
        "run.dir": f"{folder}/{name}",
    }
    if model.kv_heads is not None:
        sizes["model.kv_heads"] = max(2, HEADS * model.kv_heads // model.heads)  # to be cut
    if model.head_dim is not None:
        sizes["model.head_dim"] = HIDDEN * model.head_dim // model.hidden * model.heads // HEADS
    if model.latent is not None:
        sizes |= {
            f"model.latent.{key}": size
            for key, size in (("kv_rank", 24), ("nope_head_dim", 16), ("rope_head_dim", 8))
        }
        sizes["model.latent.value_head_dim"] = 16
        if model.latent.query_rank is not None:
            sizes["model.latent.query_rank"] = 32
    if full.train.batch_ramp:
        sizes |= {"train.global_batch": 16, "train.batch_ramp": "[{batch: 8, until_tokens: 1024}]"}
    if model.moe is not None:
        sizes |= {"model.moe.experts": EXPERTS, "model.moe.expert_ffn": 32}
    for group, sets in (("train", full.data.train), ("validation", full.data.validation)):
        sizes |= {f"data.{group}.{each}.path": f"{folder}/tokens" for each in sets}
    sizes |= {f"parallel.{axis}": size for axis, size in parallel.items()}
    written = ["null" if value is None else str(value) for value in sizes.values()]
    small = [f"{key}={value}" for key, value in zip(sizes, written, strict=True)]
    return load_config(path, [*overrides, *small])
