"""Checks between the sections of a config; each section checks itself.

A file per subject, each with a generator of sentences that begin with the key they are about. They
import the schema, which does not import them. Start with `problems_between`.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from models.config import ModelConfig
from models.families import family_problems
from spectral.rules import MuonPlusPlusRule, MuonSphereRule, SpectralSphereRule
from training.config.binding import Check
from training.config.checks import gram_penalty, layout, pc, rules, run
from training.config.schema import Config

SECTION_CHECKS: Final[Mapping[type, Check]] = {
    ModelConfig: family_problems,
    MuonSphereRule: rules.sphere,
    SpectralSphereRule: rules.sphere,
    MuonPlusPlusRule: rules.muon_plus_plus,
}
"""Checks of section classes that the classes cannot make themselves."""


def problems_between(config: Config) -> Iterator[str]:
    """Yield what is wrong between the sections of `config`, on any number of ranks."""
    yield from run.problems(config)
    yield from layout.problems(config)
    yield from pc.problems(config)
    yield from gram_penalty.problems(config)
