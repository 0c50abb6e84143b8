"""The order of training samples.

Sample k of a phase is a pure function of k, of the seed, of the weights, and of each set's counts
at the start of the phase. The weights determine the sample's set; a permutation per epoch
determines its window in this set. Nothing depends on the number of steps, the batch size or the
number of ranks, so a run can stop, resume and change its layout at any sample. Every change of the
mixture begins a new phase.

A stored permutation of a trillion-token set would take gigabytes on every rank, and numpy's
permutations may change with its version. `Permutation` computes one element at a time instead:
element i passes through a Feistel network, which permutes [0, p), where p is the next power of
four, for any round function. A result outside [0, size) passes through the network again until it
is inside (cycle walking), at most four times on average.
"""

import copy
import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from training.data.document_index import CROSSED, Borders
from training.data.run_progress import Counts, Phase, SetCount
from training.data.token_set import OpenSet, TokenSet
from training.errors import ConfigError

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


BLEND_PERIOD = 1 << 20  # the interleaving of the sets repeats after this many samples


@dataclass(frozen=True)
class SetUse:
    """Use of one set by the samples of a run, in all its phases."""

    name: str
    weight: float  # share of the present phase's samples; the sum over sets is 1
    windows: int
    samples: int
    tokens: int
    epochs: float

    def __str__(self) -> str:
        return f"{self.name}: {self.weight:.1%} of the samples, {self.total}"

    @property
    def total(self) -> str:
        """The set's use in the whole run, as text."""
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens, {self.epochs:.2f} epochs of "
            f"{self.windows:,} windows"
        )


def repeats(epochs: Mapping[str, float]) -> str | None:
    """Return a sentence about sets that are read more than once, or None if there are none."""
    often = [f"{name} {count:.2f} times" for name, count in epochs.items() if count > 1]
    return f"read more than once: {', '.join(often)}" if often else None


@dataclass(frozen=True)
class Blend:
    """Interleaving of several sets: a pattern of `BLEND_PERIOD` samples that repeats.

    The samples of each set are evenly spaced: the i-th of q samples is at (i + 1/2) / q of the
    pattern. After any k samples the number of samples from a set with share w differs from w * k by
    at most (1 + w * sets) / 2.
    """

    quotas: NDArray[np.int64]  # `[sets]`, samples of each set in one period
    choice: NDArray[np.int32]  # `[period]`, set of each sample
    rank: NDArray[np.int32]  # `[period]`, number of earlier samples of the same set

    def locate(self, sample: int) -> tuple[int, int]:
        """Return a sample's set, and the number of earlier samples from this set."""
        period, place = divmod(sample, len(self.choice))
        chosen = int(self.choice[place])
        return chosen, period * int(self.quotas[chosen]) + int(self.rank[place])

    def used(self, samples: int) -> NDArray[np.int64]:
        """Return how many of the first `samples` samples come from each set, `[sets]`."""
        periods, rest = divmod(samples, len(self.choice))
        partial = np.bincount(self.choice[:rest], minlength=len(self.quotas))
        return periods * self.quotas + partial


def build_blend(weights: Mapping[str, float]) -> Blend:
    """Return the interleaving in which each set has the share weight / (sum of all weights).

    Raises:
        ConfigError: a weight is under a millionth of the sum.
    """
    total = math.fsum(weights.values())
    exact = np.array(list(weights.values()), dtype=np.float64) / total * BLEND_PERIOD
    for (name, weight), samples in zip(weights.items(), exact, strict=True):
        if samples < 1:
            raise ConfigError(
                f"weight of set {name} must be at least 1/{BLEND_PERIOD} of the weights' sum "
                f"{total}, got {weight}"
            )
    quotas = np.floor(exact).astype(np.int64)
    # Samples left over by rounding down go to the sets with the largest remainders.
    leftover = np.argsort(quotas - exact, kind="stable")[: BLEND_PERIOD - quotas.sum()]
    quotas[leftover] += 1
    choice = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)
    rank = np.concatenate([np.arange(quota, dtype=np.int32) for quota in quotas])
    order = np.argsort((rank + 0.5) / quotas[choice], kind="stable")
    return Blend(quotas, choice[order], rank[order])


class TrainingData(Dataset[Tensor]):
    """All samples of a run: `data[k]` is sample k, for any k >= 0.

    A sample is int64 `[sequence_length + 1]`, or has borders as in `TokenSet.sample`. A run with
    several mixtures has one object per mixture; `at` returns the object for a step.

    Args:
        sets: (name, prefix, weight) of each set; their order does not matter. A weight may be 0 if
            it is positive in a phase.
        sequence_length: tokens the model predicts per sample.
        seed: seed of the order within the sets.
        open_set: opens a set by name and prefix; the default reads files.
        phases: steps before each later phase, ascending, and its weights by set.
        borders: treatment of the borders between documents.

    Raises:
        ConfigError: a weight is under a millionth of the weights' sum.
        DataError: a set cannot be used (see `TokenSet`).
    """

    def __init__(
        self,
        sets: Sequence[tuple[str, str | Path, float]],
        *,
        sequence_length: int,
        seed: int,
        open_set: OpenSet = TokenSet,
        phases: Sequence[tuple[int, Mapping[str, float]]] = (),
        borders: Borders = CROSSED,
    ) -> None:
        ordered = sorted(sets, key=lambda each: each[0])
        self.all_sets = [open_set(name, prefix, sequence_length) for name, prefix, _ in ordered]
        """The sets of all phases; `sets` are the sets of this phase."""
        self.sequence_length = sequence_length
        self.seed = seed
        self.borders = borders
        self.phase = Phase()
        self.later: tuple[tuple[int, TrainingData], ...] = ()
        self._mix({name: weight for name, _, weight in ordered})
        self.later = tuple((step, copy.copy(self)._mix(weights)) for step, weights in phases)

    def _mix(self, weights: Mapping[str, float]) -> "TrainingData":
        """Switch to the sets with these weights, and return the data."""
        self.sets = [each for each in self.all_sets if weights.get(each.name)]
        self.blend = build_blend({each.name: weights[each.name] for each in self.sets})
        return self

    def at(self, step: int) -> "TrainingData":
        """Return the data of the mixture after `step` steps."""
        return next((data for start, data in reversed(self.later) if start <= step), self)

    def since(self, phase: Phase) -> "TrainingData":
        """Return the data of `phase` with the present sets and weights, from `data[phase.sample]`
        on."""
        data = copy.copy(self)
        data.phase = phase
        return data

    def __getitem__(self, sample: int) -> Tensor:
        chosen, window = self.source(sample)
        return torch.from_numpy(self.sets[chosen].sample(window, self.borders))

    def source(self, sample: int) -> tuple[int, int]:
        """Return (index in `sets`, window) of a sample of the phase."""
        chosen, earlier = self.blend.locate(sample - self.phase.sample)
        token_set = self.sets[chosen]
        before = self.phase.tokens(token_set.name) // self.sequence_length
        epoch, place = divmod(before + earlier, len(token_set))
        return chosen, window_order(token_set.name, len(token_set), self.seed, epoch)[place]

    def read(self, samples: int) -> dict[str, SetCount]:
        """Return each set's counts in the first `samples` samples of a run, which end in this
        phase."""
        counts = dict(self.phase.read)
        used = self.blend.used(samples - self.phase.sample).tolist()
        for each, new in zip(self.sets, used, strict=True):
            counts[each.name] = SetCount(
                samples=self.phase.samples(each.name) + new,
                tokens=self.phase.tokens(each.name) + new * self.sequence_length,
                content=each.digest,
            )
        return counts

    def phase_after(self, sample: int, read: Counts) -> Phase:
        """Return the phase that begins at `sample` with the present sets, after a run has `read`
        these counts.

        A set whose content differs from the set read under the same name begins at its start.
        """
        present = {each.name: each.digest for each in self.all_sets}
        same = {n: c for n, c in read.items() if present.get(n, c.content) == c.content}
        return Phase(sample=sample, read=same, mixture=self.fingerprint())

    @property
    def shares(self) -> dict[str, float]:
        """Share of each set in the samples of the phase; the sum is 1."""
        shares = (self.blend.quotas / len(self.blend.choice)).tolist()
        return {each.name: share for each, share in zip(self.sets, shares, strict=True)}

    def describe(self, counts: Counts) -> list[SetUse]:
        """Return the use of each set of the run, in the order of names, when the run has read
        `counts`."""
        uses = []
        for each in self.all_sets:
            count = counts.get(each.name, SetCount(samples=0, tokens=0, content=each.digest))
            epochs = count.tokens / (len(each) * self.sequence_length)
            share = self.shares.get(each.name, 0.0)
            use = SetUse(each.name, share, len(each), count.samples, count.tokens, epochs)
            uses.append(use)
        return uses

    def attended_length(self) -> float:
        """Return the length of equal documents in which a token would attend to as many keys, on
        average, as in the mixture.

        This is the window length if attention crosses borders.
        """
        if not self.borders.mask:
            return float(self.sequence_length)
        lengths = [each.attended_length for each in self.sets]
        return float(np.average(lengths, weights=self.blend.quotas))

    def earlier(self) -> dict[str, int]:
        """Return, by name, the number of tokens that earlier phases read from sets removed
        since."""
        present = {each.name for each in self.all_sets}
        return {n: count.tokens for n, count in self.phase.read.items() if n not in present}

    def fingerprint(self) -> str:
        """Return a sha256 of everything that determines the samples of a phase, except its counts.
        Paths are not part of it."""
        digest = hashlib.sha256(f"order 1, {self.sequence_length}, {self.seed}".encode())
        for each, quota in zip(self.sets, self.blend.quotas, strict=True):
            digest.update(f"\n{each.name!r} {quota} {each.tokens} {each.digest}".encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def window_order(name: str, windows: int, seed: int, epoch: int) -> Permutation:
    """Return the order of a set's windows in epoch `epoch`."""
    return Permutation(windows, f"{seed}/{epoch}/{name}")
