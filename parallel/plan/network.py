"""Where the ranks of a process group lie in nodes, and how fast they reach each other."""

from dataclasses import dataclass

from parallel.plan.devices import Device


@dataclass(frozen=True)
class Links:
    """The links of a group of `size` ranks, each `stride` ranks from the next.

    per_node   ranks of the group in one node
    """

    size: int
    stride: int
    device: Device

    @property
    def per_node(self) -> int:
        """Ranks of the group in one node, at least 1."""
        return max(1, min(self.size, self.device.node_size // self.stride))

    @property
    def ring_across(self) -> float:
        """Share of a ring's bytes that leave a node: one rank of each node sends to the next."""
        return 0.0 if self.per_node >= self.size else 1 / self.per_node

    @property
    def all_to_all_across(self) -> float:
        """Share of an all-to-all's bytes that leave a node, if every rank gets equally many."""
        return (self.size - self.per_node) / (self.size - 1) if self.size > 1 else 0.0

    def seconds(self, size: float, across: float, calls: float = 1.0) -> float:
        """Seconds of `calls` collectives in which a rank sends `size` bytes in all.

        A share `across` of them leaves the node, through this rank's own network adapter.
        """
        if self.size == 1 or size == 0:
            return 0.0
        slowest = max(
            size * (1 - across) / self.device.node_rate, size * across / self.device.network_rate
        )
        return slowest + calls * self.device.latency_seconds
