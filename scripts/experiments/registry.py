"""The experiments by name, in the order of their execution."""

from typing import Any

from scripts.experiments import (
    correlated_weights,
    deep_linear,
    gated_batches,
    gated_features,
    gated_regression,
    muon_gap,
    over_flattening,
    pi_bound,
    rank_growth,
    relu_features,
    solver_curve,
    sparse_regression,
)
from scripts.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment[Any]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        pi_bound,
        relu_features,
        gated_features,
        rank_growth,
        sparse_regression,
        gated_batches,
        gated_regression,
        deep_linear,
        over_flattening,
        muon_gap,
        correlated_weights,
        solver_curve,
    )
}
