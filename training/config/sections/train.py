"""The train and schedule sections of a run config: steps, batches, precision, learning rate."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from models.section import Check, Count, Section, Whole

Steps = Annotated[int, Field(ge=1, le=10**10)]
Batch = Annotated[int, Field(ge=1, le=1 << 24)]


class TrainConfig(Section):
    """How long the model is trained, on which batches, and in which precision."""

    steps: Steps
    """Optimizer steps of the whole run, where the learning-rate schedule ends."""
    exit_step: Count | None = None
    """Step after which the run ends early, on the schedule of `steps`; null = `steps`."""
    global_batch: Batch
    """Sequences per optimizer step, over all ranks; gradients accumulate over the micro-batches."""
    micro_batch: Batch
    """Sequences per forward and backward pass on one rank."""
    sequence_length: Annotated[int, Field(ge=1, le=1 << 26)]
    """Tokens per sequence."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Data type of forward and backward; master weights and optimizer state are fp32."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """FP8 format of linear layers under Transformer Engine; null computes them in `precision`."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that backward recomputes: none; selective: those of dense and shared feed-forward
    blocks; full: all of a layer but its input."""
    loss_chunk: Count | None = None
    """Vocabulary entries per rank whose logits are in memory at once; backward then multiplies by
    the output head once more. null keeps all logits."""
    fused_loss: Literal["auto", "liger"] | None = "auto"
    """Kernels of the loss: liger uses liger-kernel, which passes over the logits twice; null uses
    the engine's, one pass per operation. auto is liger on a GPU if liger-kernel is installed and
    `loss_chunk` is null."""
    compile: Literal["auto", "inductor", "aot_eager"] | None = "auto"
    """Backend of torch.compile for norms, rotary embedding and activations: inductor fuses them,
    aot_eager captures the same graphs, for debugging; null does not compile. auto is inductor on a
    GPU where it works, null on a CPU and under Transformer Engine, which fuses the same
    operations."""
    max_skipped_steps: Whole = 10
    """Consecutive non-finite steps to skip before the run aborts."""

    def checks(self) -> Iterator[Check]:
        """Check the loss, the precision and the length."""
        chunked = self.fused_loss == "liger" and self.loss_chunk is not None
        yield "loss_chunk", chunked, "must be null with fused_loss liger"
        yield "fp8", self.fp8 is not None and self.precision != "bf16", "needs precision bf16"
        late = self.exit_step is not None and self.exit_step > self.steps
        yield "exit_step", late, f"must be at most steps = {self.steps}"


class ScheduleConfig(Section):
    """Learning rate over the run, as a factor on every group's peak."""

    kind: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd (warmup-stable-decay) is constant, then decays linearly."""
    warmup_steps: Whole = 0
    """Steps of linear warm-up from 0 to the peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Factor at the end of the run, for every kind but constant."""
    cooldown_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Fraction of the run over which wsd decays."""

    def cooldown_steps(self, total_steps: int) -> int:
        """Return the steps over which wsd decays in a run of `total_steps`."""
        return round(self.cooldown_fraction * total_steps)
