"""Defaults that depend on other sections: what a paper chose for the rule or the width at hand."""

from dataclasses import replace
from typing import Final

from spectral.rules import RULES
from training.config.schema import Config

ADAMW_LEVEL: Final = 4
"""The level of PC layers under AdamW."""

SPECTRAL_LEVEL: Final = 2
"""The level of PC layers under Muon."""

SMALL_COEFFICIENT: Final = 1e-3
"""The lambda of the Gram penalty for 160M parameters, whose width is 768."""

LARGE_COEFFICIENT: Final = 1e-4
"""The lambda for 405M and 1.4B parameters, whose widths are 1024 and 2048."""

LARGE_WIDTH: Final = 1024
"""Least width of a model that takes `LARGE_COEFFICIENT`."""


def with_paper_choices(config: Config) -> Config:
    """Return `config` with the papers' choices for PC layers and Gram penalty where it has null, so
    that a run's own config says what it trains with. What has no effect is null."""
    pc, penalty, optimizer = config.pc, config.gram_penalty, config.optimizer
    if pc is not None:
        spectral = RULES[optimizer.matrix.rule].whole_matrix
        level = (SPECTRAL_LEVEL if spectral else ADAMW_LEVEL) if pc.level is None else pc.level
        decay = pc.gamma_decay(optimizer.settings_for("gamma").weight_decay)
        pc = replace(
            pc,
            level=level if pc.polynomial.kind == "preset" else None,
            gamma_weight_decay=decay if pc.learnable_gamma else None,
        )
    if penalty is not None and penalty.coefficient is None:
        large = config.model.hidden >= LARGE_WIDTH
        penalty = replace(penalty, coefficient=LARGE_COEFFICIENT if large else SMALL_COEFFICIENT)
    return replace(config, pc=pc, gram_penalty=penalty)
