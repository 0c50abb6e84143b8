"""Phases of the data: parts of a run that read its sets by other weights."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from models.section import Check, Count, Positive, Section

BEGINNINGS = ("after_steps", "after_share", "with_decay")
"""Keys of which a phase has one."""


class DataPhase(Section):
    """A part of the run, to its end or the next phase, with its own weights of the sets."""

    after_steps: Count | None = None
    """Steps of the run before the phase; null = another key says where it begins."""
    after_share: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of `train.steps` before the phase, rounded to a step; null = another key says where it
    begins."""
    with_decay: bool = False
    """Begin with the decay of `schedule.kind` wsd."""
    weights: Annotated[dict[str, Positive], Field(min_length=1)]
    """Weight of each set of `data.train` in the phase; those that are not named are not read."""

    def checks(self) -> Iterator[Check]:
        """Check that one beginning is given."""
        given = [key for key in BEGINNINGS if getattr(self, key)]
        rule = f"must be given, or after_share or with_decay, one of them, got {len(given)}"
        yield "after_steps", len(given) != 1, rule

    @property
    def beginning(self) -> str:
        """The key that says where the phase begins."""
        return next(key for key in BEGINNINGS if getattr(self, key))
