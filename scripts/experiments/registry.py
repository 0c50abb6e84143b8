"""The experiments by name, in the order of their execution."""

from importlib import import_module
from typing import Any

from scripts.experiments.experiment import Experiment

NAMES = (
    "pi_bound", "relu_features", "gated_features", "rank_growth", "sparse_regression",
    "gated_batches", "gated_regression", "deep_linear", "over_flattening", "muon_gap",
    "correlated_weights", "solver_curve",
)  # fmt: skip
EXPERIMENTS: dict[str, Experiment[Any]] = {
    name: import_module(f"scripts.experiments.{name}").EXPERIMENT for name in NAMES
}
