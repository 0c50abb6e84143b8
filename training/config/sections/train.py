"""How long and on how much the model is trained, and the learning rate over that time."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from models.section import Section, at_least, ignored


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Section):
    """How long and on how much at once the model is trained."""

    steps: int
    """Optimizer steps of the whole run; the schedule ends here."""
    exit_step: int | None = None
    """Stop cleanly after this step, with the schedule of the whole run; null = after `steps`."""
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    micro_batch: int
    """Sequences per forward and backward pass on one rank."""
    sequence_length: int
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Type of forward and backward; master weights, reductions and optimizer state stay fp32."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """Format of the linears' products on Transformer Engine; null = those of `precision`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward computes again instead of keeping: none, those of
    dense and shared feed-forward blocks (selective), or all of a layer but its input (full)."""
    loss_chunk: int | None = None
    """Vocabulary entries of a rank whose logits exist at one time, forward and backward; costs one
    more product with the head in backward. null = all, kept from forward to backward."""
    compile: Literal["inductor", "aot_eager"] | None = None
    """Backend of torch.compile for norms, rotary positions and activations: fused kernels
    (inductor), or the same graphs without kernels, to find faults (aot_eager); null = no graphs."""
    max_skipped_steps: int = 10
    """Steps in a row that are skipped for a loss or gradient that is not finite; one more stops."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the length of the run or the sizes of its batches."""
        yield from at_least(self, 1, "steps", "exit_step", "global_batch", "micro_batch")
        yield from at_least(self, 1, "sequence_length", "loss_chunk")
        yield from at_least(self, 0, "max_skipped_steps")
        if self.fp8 is not None and self.precision != "bf16":
            yield f"fp8 needs precision bf16, got {self.fp8} with precision {self.precision}"
        if self.exit_step is not None and self.exit_step > self.steps:
            yield f"exit_step must be at most steps = {self.steps}, got {self.exit_step}"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over the run, as a factor on every group's peak."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warm-up, stable, decay) is constant, then falls linearly."""
    warmup_steps: int = 0
    """Steps over which the factor rises linearly to 1."""
    min_ratio: float = 0.1
    """Factor at the end of the run (for all kinds but constant)."""
    cooldown_fraction: float = 0.2
    """Share of the run over which wsd falls."""

    def cooldown_steps(self, total_steps: int) -> int:
        """Steps over which wsd falls, of a run of `total_steps`."""
        return round(self.cooldown_fraction * total_steps)

    def problems(self) -> Iterator[str]:
        """What is wrong with the schedule by itself."""
        yield from at_least(self, 0, "warmup_steps")
        if self.kind == "constant":
            yield from ignored(self, "min_ratio", when="with kind constant")
        if self.kind != "wsd":
            yield from ignored(self, "cooldown_fraction", when=f"with kind {self.kind}")
        if not 0 <= self.min_ratio <= 1:
            yield f"min_ratio must be in [0, 1], got {self.min_ratio}"
        if not 0 < self.cooldown_fraction <= 1:
            yield f"cooldown_fraction must be in (0, 1], got {self.cooldown_fraction}"
