"""The experiments by name, in the order in which they run."""

from typing import Any

from scripts.reproduce import gated_features, pi_bound, rank_growth, relu_features
from scripts.reproduce.frame import Experiment

EXPERIMENTS: dict[str, Experiment[Any]] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (pi_bound, relu_features, gated_features, rank_growth)
}
