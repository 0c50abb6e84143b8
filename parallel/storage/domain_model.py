"""The parameters of one domain on one rank: units, buffers, all-gathers under way."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from models.units import Unit
from parallel.comm.collectives import CommVolume, Pending, all_gather_
from parallel.comm.groups import Domain
from parallel.storage.buffers import Buffers
from parallel.storage.gradients import GradientReducer


@dataclass
class DomainModel:
    """The dense parameters of one rank, or its experts.

    stage_units   the units of every tensor-parallel rank of the domain's stage, in forward order
    comm_volume   where sent bytes are counted
    gathers       by bucket, the all-gather of new weights that may still be under way
    """

    domain: Domain
    stage_units: list[list[Unit]]
    buffers: Buffers
    reducer: GradientReducer
    comm_volume: CommVolume
    gathers: dict[int, Pending | None] = field(default_factory=dict)

    @property
    def units(self) -> list[Unit]:
        """Units that this rank holds, whole or in part, in forward order."""
        return self.stage_units[self.domain.tensor.rank]

    @torch.no_grad()
    def start_gathers(self, buckets: Sequence[int], comm_volume: CommVolume) -> None:
        """Round the masters of `buckets` into the parameters, and start to all-gather those."""
        self.buffers.write_parameters(buckets)
        for bucket in buckets:
            flat = self.buffers.parameters[bucket]
            self.gathers[bucket] = all_gather_(flat, self.domain.replicas, comm_volume)

    def all_gather_weights(self) -> None:
        """Round the masters into the parameters and all-gather those, waiting for the result.

        This is no part of a step, so that its bytes are not counted.
        """
        buckets = range(len(self.buffers.parameters))
        self.start_gathers(buckets, CommVolume())
        self.wait(buckets)

    def wait(self, buckets: Sequence[int]) -> None:
        """Wait for the all-gathers of `buckets` that are under way."""
        for bucket in buckets:
            handle = self.gathers.pop(bucket, None)
            if handle is not None:
                handle.wait()
