"""How the model is cut over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass

from models.section import Section, at_least, positive


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """How the model is cut over ranks; data parallelism takes the ranks that are left."""

    tensor: int = 1
    """Ranks that share every matrix."""
    pipeline: int = 1
    """Ranks that share the layers."""
    virtual_pipeline: int = 1
    """Stages per pipeline rank, for the interleaved schedule."""
    first_stage_layers: int | None = None
    """Layers of the first pipeline stage, which also has the embedding; null = as the others."""
    last_stage_layers: int | None = None
    """Layers of the last pipeline stage, which also has the head; null = as the others."""
    expert: int = 1
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor: int = 1
    """Ranks that share every routed expert's matrices, whatever `tensor` is."""
    context: int = 1
    """Ranks that share each sequence."""
    timeout_seconds: float = 600.0
    """Stop the run when a collective has waited so long for a rank."""
    sequence: bool | None = None
    """Cut activations outside the matrices over the tensor ranks too; null = if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """`sequence`, the default filled in."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model together."""
        return self.tensor * self.pipeline * self.context

    def problems(self) -> Iterator[str]:
        """What is wrong with the layout, whatever it is a layout of."""
        sizes = ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context")
        yield from at_least(self, 1, *sizes)
        yield from positive(self, "timeout_seconds")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            yield (
                f"virtual_pipeline needs pipeline > 1, got {self.virtual_pipeline} with pipeline 1"
            )
        yield from at_least(self, 1, "first_stage_layers", "last_stage_layers")
        for key in ("first_stage_layers", "last_stage_layers"):
            if getattr(self, key) is None:
                continue
            if self.pipeline == 1:
                yield f"{key} needs pipeline > 1, got {getattr(self, key)} with pipeline 1"
            elif self.virtual_pipeline > 1:
                yield (
                    f"{key} needs virtual_pipeline = 1, got {getattr(self, key)} with "
                    f"virtual_pipeline {self.virtual_pipeline}"
                )
        if self.sequence and self.tensor == 1:
            yield "sequence needs tensor > 1, got true with tensor 1"
