"""The parallel section of a run config: how the model is split over ranks."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated

from pydantic import Field

from models.layout import Layout
from models.section import Check, Count, Section

Ranks = Annotated[int, Field(ge=1, le=1 << 20)]


class ParallelConfig(Section):
    """How the model is split over ranks; data parallelism takes the rest of their number."""

    tensor: Ranks = 1
    """Tensor-parallel size: ranks that share every matrix."""
    pipeline: Ranks = 1
    """Pipeline-parallel size: ranks that share the layers."""
    virtual_pipeline: Ranks = 1
    """Model chunks per pipeline rank; more than 1 selects the interleaved schedule."""
    first_stage_layers: Count | None = None
    """Layers of the first pipeline stage, which also has the embedding; null = as many as
    others."""
    last_stage_layers: Count | None = None
    """Layers of the last pipeline stage, which also has the output head; null = as many as
    others."""
    expert: Ranks = 1
    """Expert-parallel size: ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor: Ranks = 1
    """Tensor-parallel size of routed experts, independent of `tensor`."""
    context: Ranks = 1
    """Context-parallel size: ranks that share each sequence."""
    timeout_seconds: Annotated[float, Field(gt=0, le=1e7)] = 600.0
    """Seconds that a collective waits for a rank before the run ends."""
    sequence: bool | None = None
    """Sequence parallelism: split activations outside the matrices over the tensor ranks too;
    null = if tensor > 1."""

    @property
    def sequence_parallel(self) -> bool:
        """`sequence` with its default resolved."""
        return self.tensor > 1 if self.sequence is None else self.sequence

    @property
    def layout(self) -> Layout:
        """The sizes of all axes, and how the pipeline is cut."""
        return Layout(**{axis.name: getattr(self, axis.name) for axis in fields(Layout)})

    @property
    def model_ranks(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def checks(self) -> Iterator[Check]:
        """Check the layout, whatever the model."""
        whole, interleaved = self.pipeline == 1, self.virtual_pipeline > 1
        yield "virtual_pipeline", whole and interleaved, "needs pipeline > 1"
        for key in ("first_stage_layers", "last_stage_layers"):
            given = getattr(self, key) is not None
            yield key, given and whole, "needs pipeline > 1"
            yield key, given and interleaved, "needs virtual_pipeline = 1"
        yield "sequence", self.sequence and self.tensor == 1, "needs tensor > 1"
