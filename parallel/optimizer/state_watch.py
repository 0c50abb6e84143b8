"""Whether anybody but its rule has written a state."""

from torch import Tensor

from spectral.rules.base import Rule, State


class StateWatch:
    """Says whether the state of a rule can be trusted, without reading it.

    A sound state stays sound through steps on finite gradients, so it only has to be read once
    somebody else has written it. PyTorch counts the writes to each tensor; the count says who. A
    state that others have written is not trusted again until `inspect` has read it.

    Attributes:
        trusted: False once a write by others was noticed.
    """

    def __init__(self, rule: Rule, state: State) -> None:
        self.rule = rule
        self.state = state
        self.trusted = True
        self._versions = self._written()

    def check(self) -> bool:
        """Return whether the state can be trusted; call it before the rule's step."""
        self.trusted = self.trusted and self._versions == self._written()
        return self.trusted

    def note(self) -> None:
        """Take what was written since `check` for the rule's step."""
        self._versions = self._written()

    def inspect(self) -> None:
        """Read the state, after it was loaded, and trust it if it is sound; waits for the
        device."""
        self.trusted = bool(self.rule.sound_state(self.state).all())
        self._versions = self._written()

    def _written(self) -> list[tuple[int, int]]:
        return [(id(tensor), version_of(tensor)) for tensor in self.state.values()]


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor, or what it shares memory with, was written in place."""
    return tensor._version
