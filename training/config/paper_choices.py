"""Defaults that depend on other sections: what a paper chose for the rule or the width at hand."""

from dataclasses import replace

from models.pc_config import ADAMW_LEVEL, SPECTRAL_LEVEL, PCConfig
from spectral.rules import RULES
from training.config.schema import Config
from training.config.sections.gram_penalty import (
    LARGE_COEFFICIENT,
    LARGE_WIDTH,
    SMALL_COEFFICIENT,
    GramPenaltyConfig,
)


def with_paper_choices(config: Config) -> Config:
    """Return `config` with the papers' choices for PC layers and Gram penalty where it has null, so
    that a run's own config says what it trains with. What has no effect is null."""
    return replace(config, pc=_pc(config), gram_penalty=_penalty(config))


def _pc(config: Config) -> PCConfig | None:
    """The PC layers with their level and the decay of gamma."""
    pc, optimizer = config.pc, config.optimizer
    if pc is None:
        return None
    level, decay = pc.level, pc.gamma_decay(optimizer.settings_for("gamma").weight_decay)
    if level is None:
        spectral = RULES[optimizer.matrix.rule].whole_matrix
        level = SPECTRAL_LEVEL if spectral else ADAMW_LEVEL
    return replace(
        pc,
        level=level if pc.polynomial.kind == "preset" else None,
        gamma_weight_decay=decay if pc.learnable_gamma else None,
    )


def _penalty(config: Config) -> GramPenaltyConfig | None:
    """The Gram penalty with its coefficient."""
    penalty = config.gram_penalty
    if penalty is None or penalty.coefficient is not None:
        return penalty
    large = config.model.hidden >= LARGE_WIDTH
    return replace(penalty, coefficient=LARGE_COEFFICIENT if large else SMALL_COEFFICIENT)
