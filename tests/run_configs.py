"""Configs for tiny runs."""

from pathlib import Path
from typing import Any

import yaml

from training.config import Config, load_config

RULES = {
    "adamw": 3e-3,
    "muon": 2e-2,
    "muon_sphere": 2e-2,
    "spectral_sphere": 2e-2,
    "muon_plus_plus": 1e-2,
}
"""Peak learning rate of each rule on the tiny model."""

MIXTURE = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
}
"""Overrides that turn the tiny model into a mixture of experts."""
ROUTED = MIXTURE | {"optimizer__roles__router__rule": "adamw", "optimizer__roles__router__lr": 3e-3}
"""Overrides for a mixture of experts with a separate router learning rate."""


def tiny_config(folder: str, rule: str = "spectral_sphere", **overrides: Any) -> Config:
    """Return the config of a two-layer Llama of width 64 that trains on the token set
    `folder`/tokens. `overrides` are dotted keys with `__` in place of dots."""
    group = {"rule": "adamw", "lr": 3e-3, "weight_decay": 0.1}
    content = {
        "run": {"name": "test", "dir": f"{folder}/run"},
        "seed": 7,
        "model": {
            "layers": 2,
            "hidden": 64,
            "heads": 4,
            "kv_heads": 2,
            "ffn": 96,
            "vocab_size": 120,
        },
        "data": {
            "train": {"walk": {"path": f"{folder}/tokens"}},
            "validation": {"walk": {"path": f"{folder}/tokens"}},
        },
        "train": {"steps": 20, "global_batch": 8, "micro_batch": 2, "sequence_length": 32},
        "optimizer": {
            "matrix": {"rule": rule, "lr": RULES[rule], "weight_decay": 0.1},
            "embedding": group,
            "head": group,
            "scalar": {**group, "weight_decay": 0.0},
        },
        "schedule": {"warmup_steps": 2},
        "checkpoint": {"interval": 0},
        "log": {"interval": 5},
        "validation": {"samples": 5},
    }
    Path(folder, "config.yaml").write_text(
        yaml.dump(content, Dumper=yaml.CSafeDumper, sort_keys=False)
    )
    return read_config(folder, **overrides)


def read_config(folder: str, **overrides: Any) -> Config:
    """Load the config that `tiny_config` wrote to `folder`, with further overrides."""
    return load_config(
        f"{folder}/config.yaml",
        [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()],
    )
