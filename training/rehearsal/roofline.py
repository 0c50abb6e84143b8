"""The time of a step by a roofline: a model, for comparing one program with another.

A launch takes as long as its bytes at the device's copy rate, its FLOPs at a share of the peak, or
the least time of a launch, whichever is longest; a collective as long as its bytes at the rate of
the slowest link that it crosses, and a latency. The time of a step is the sum over all launches and
collectives, as if none ran beside another."""

from collections.abc import Sequence

from parallel.plan.devices import Device


def launch_seconds(
    device: Device,
    size: float,
    flops: float,
    operands: str,
    *,
    kernels: int = 1,
    in_graph: bool = False,
) -> float:
    """Seconds of an operation of `kernels` launches that moves `size` bytes and does `flops` on
    `operands` (a key of `Device.peak`)."""
    least = kernels * (device.graph_seconds if in_graph else device.launch_seconds)
    product = flops / (device.efficiency * device.peak[operands]) if flops else 0.0
    return max(size / device.copy_rate, product, least)


def collective_seconds(device: Device, size: float, ranks: Sequence[int]) -> float:
    """Seconds of a collective in which this rank sends `size` bytes to others of `ranks`."""
    inside = len({rank // device.node_size for rank in ranks}) == 1
    return size / (device.node_rate if inside else device.network_rate) + device.latency_seconds
