"""What must hold between the sections of a config; each section says for itself what must hold in
it.

A file per subject, each a generator of sentences that begin with the key they are about. They
import the schema, which knows nothing of them. Start with `problems_between`."""

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
"""Per section class, what must hold of it that it cannot know by itself."""


def problems_between(config: Config) -> Iterator[str]:
    """Yield what does not fit between sections, on any number of ranks."""
    yield from run.whole(config)
    yield from layout.whole(config)
    yield from pc.whole(config)
    yield from gram_penalty.whole(config)
