"""The parameters of one rank that the same ranks hold: units, buffers, gathers under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.units import Unit
from parallel.comm.collectives import Pending, Traffic, all_gather_
from parallel.comm.groups import Domain
from parallel.storage.buffers import Buffers
from parallel.storage.gradients import GradientReducer


@dataclass
class DomainModel:
    """The parameters of one rank that are copied over the same ranks, dense ones or experts.

    stage_units  the units of every tensor-parallel rank of the domain's stage, in forward order
    gathers      per bucket, the all-gather of new weights that may still be under way
    """

    domain: Domain
    stage_units: list[list[Unit]]
    buffers: Buffers
    reducer: GradientReducer
    gathers: dict[int, Pending | None] = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """The units this rank holds, whole or in part, in forward order."""
        return self.stage_units[self.domain.tensor.rank]

    def spread(self) -> None:
        """Round the masters into the parameters, and brings every rank all of them."""
        with torch.no_grad():
            for bucket, flat in enumerate(self.buffers.parameters):
                self.buffers.write_parameters(bucket)
                handle = all_gather_(flat, self.domain.replicas, Traffic())
                if handle is not None:
                    handle.wait()

    def wait(self, buckets: Sequence[int]) -> None:
        """Wait until the weights of `buckets` are those of the last step."""
        for bucket in buckets:
            handle = self.gathers.pop(bucket, None)
            if handle is not None:
                handle.wait()
