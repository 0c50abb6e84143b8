"""Settings of an update rule that another setting of the same rule leaves without effect.

The rules themselves accept them, as code that builds a rule may set all of its fields.
"""

from collections.abc import Iterator

from models.section import ignored
from spectral.rules import MuonPlusPlusRule, MuonSphereRule


def sphere(rule: MuonSphereRule) -> Iterator[str]:
    """Yield unused settings of the retraction, of MuonSphere or SSO."""
    if rule.retraction == "hard":
        yield from ignored(rule, "retraction_rate", when="with retraction hard")


def muon_plus_plus(rule: MuonPlusPlusRule) -> Iterator[str]:
    """Yield unused settings of Muon++'s algorithms and of its rescaling by correlation."""
    if rule.algorithm != "dual":
        when = f"with algorithm {rule.algorithm}"
        yield from ignored(rule, "tolerance", "max_evaluations", when=when)
    if not rule.correlation_rescale:
        when = "with correlation_rescale false"
        yield from ignored(rule, "correlation_threshold", when=when)
