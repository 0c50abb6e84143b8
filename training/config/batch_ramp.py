"""The batch ramp: parts at the start of a run whose steps read fewer sequences."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from models.section import Check, Count, Section

Batch = Annotated[int, Field(ge=1, le=1 << 24)]


class RampStage(Section):
    """A part of the run, from its start or the stage before, with fewer sequences a step."""

    batch: Batch
    """Sequences per optimizer step, below those of later stages and `train.global_batch`."""
    until_steps: Count | None = None
    """Step of the run that is the last of the stage; null = `until_tokens` says when it ends."""
    until_tokens: Count | None = None
    """Tokens of the run after which the stage ends, with the step that reaches them; null =
    `until_steps` says when it ends."""

    def checks(self) -> Iterator[Check]:
        """Check that one limit is given."""
        given = [limit for limit in (self.until_steps, self.until_tokens) if limit is not None]
        rule = f"must be given or until_tokens, one of the two, got {len(given)} of them"
        yield "until_steps", len(given) != 1, rule

    def steps_left(self, step: int, tokens: int, sequence_length: int) -> int:
        """Return the steps of this stage after `step` steps and `tokens` tokens."""
        if self.until_tokens is None:
            return max(0, (self.until_steps or 0) - step)
        return max(0, -((tokens - self.until_tokens) // (self.batch * sequence_length)))

    def __str__(self) -> str:
        if self.until_steps is not None:
            return f"{self.batch} until step {self.until_steps:,}"
        return f"{self.batch} until {self.until_tokens:,} tokens"


@dataclass(frozen=True)
class EqualSteps:
    """Consecutive steps of a run with one global batch.

    first    steps taken before
    steps    how many they are
    batch    sequences of each
    """

    first: int
    steps: int
    batch: int

    @property
    def samples(self) -> int:
        """Sequences of all steps."""
        return self.steps * self.batch


def ramp_checks(
    ramp: tuple[RampStage, ...], final: int, steps: int, sequence_length: int
) -> Iterator[Check]:
    """Check that the batch of each stage is below the next, and that no stage is without a step.

    final  global batch after the ramp
    steps  of the run
    """
    step = tokens = 0
    if any(wrong for stage in ramp for _, wrong, _ in stage.checks()):
        return  # which the stage says itself
    for i, stage in enumerate(ramp):
        after = ramp[i + 1].batch if i + 1 < len(ramp) else final
        place, name = f"batch_ramp[{i}]", "global_batch" if i + 1 == len(ramp) else "the next stage"
        grows = f"must be below {name} = {after}, as a ramp only grows, got {stage.batch}"
        yield f"{place}.batch", stage.batch >= after, grows
        count = stage.steps_left(step, tokens, sequence_length)
        key = "until_tokens" if stage.until_steps is None else "until_steps"
        limit = getattr(stage, key)
        over = f"must be above {step:,} steps and {tokens:,} tokens, which are over then"
        yield f"{place}.{key}", not count, f"{over}, got {limit:,}"
        step, tokens = step + count, tokens + count * stage.batch * sequence_length
        rule = f"must end before the last of steps = {steps:,}, got {limit:,}, {step:,} steps"
        help_ = "a shorter run is exit_step, which leaves the ramp as it is"
        yield f"{place}.{key}", step >= steps, f"{rule}: {help_}"
