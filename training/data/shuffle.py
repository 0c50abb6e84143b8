"""A keyed permutation of [0, size), computed one element at a time.

A stored permutation of a trillion-token set would take gigabytes on every rank, and those that
numpy draws may change with its version. Here element i passes a Feistel network, which is a
permutation of the next power of four whatever its round function; a value outside [0, size) passes
it again until it is inside (cycle walking), at most four times on average.
"""

import hashlib
import struct

_ROUNDS = 8
_MASK64 = (1 << 64) - 1


class Permutation:
    """Permutation of [0, size) for a key, the same on every machine and in every version."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._round_keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.sha512(key.encode()).digest())

    def __getitem__(self, index: int) -> int:
        """Return the image of `index`; both are in [0, size)."""
        value = self._network(index)
        while value >= self.size:
            value = self._network(value)
        return value

    def _network(self, value: int) -> int:
        bits = self._half_bits
        left, right = value >> bits, value & ((1 << bits) - 1)
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) >> (64 - bits))
        return left << bits | right


def _mix(value: int) -> int:
    """Return a 64-bit hash: the finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)
