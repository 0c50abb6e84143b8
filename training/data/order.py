"""Training sample order, and a run's progress: steps taken, position, data phase.

A phase is a range of consecutive samples drawn from the same mixture of sets. Sample k of a phase
is a pure function of k, the seed, the weights, and the number of tokens read from each set before
the phase. The weights determine the set from which the sample is read, and a per-epoch permutation
determines the window in this set. The order does not depend on the number of steps, the batch size
or the number of ranks, so a run can stop, resume and change its layout at any sample. Changing the
mixture always starts a new phase.

Storing the permutation of a trillion-token set would take gigabytes on every rank, and numpy's
permutations may change between versions. `Permutation` therefore computes elements on the fly: a
Feistel network with any round function is a permutation of [0, p), where p is the next power of
four. Results outside [0, size) go through the network again until they fall inside (cycle walking),
which takes at most four passes per element on average.
"""

import copy
import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from models.section import Whole
from training.data.document_index import CROSSED, Borders
from training.data.token_set import TokenSet
from training.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SetCount:
    """Number of samples and tokens a run has read from a set, including left-out samples.

    tokens   number of target tokens in the samples
    content  digest that distinguishes the set from a different set of the same name
    """

    samples: Whole
    tokens: Whole
    content: str


Counts = Mapping[str, SetCount]
"""Maps the name of each set to the set's counts. Removed sets are included."""

UNREAD: Final = SetCount(samples=0, tokens=0, content="")
"""Counts of a set that has not been read."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Consecutive samples drawn from one mixture, starting at `sample`.

    read     samples and tokens read from each set before the phase
    mixture  fingerprint of the sets and weights; "" in the first phase and in checkpoints written
             by earlier versions
    """

    sample: Whole = 0
    read: dict[str, SetCount] = field(default_factory=dict)
    mixture: str = ""

    def tokens(self, name: str) -> int:
        """Return the number of tokens read from a set before the phase."""
        return self.read.get(name, UNREAD).tokens


Windows = tuple[tuple[int, int], ...]
"""Ranges [first, end) of samples left out of a run."""


@dataclass
class Progress:
    """Progress of a run.

    step        number of optimizer steps taken
    sample      number of samples consumed so far, whether used or left out
    tokens      number of target tokens in the steps taken
    left_out    ranges [first, end) of samples left out by rewinds
    unreported  metrics of the last step, if the run stopped before reporting them
    phase       the current phase
    read        in a checkpoint, samples and tokens read from each set so far; None if the
                checkpoint was saved by an earlier version
    """

    step: Whole = 0
    sample: Whole = 0
    tokens: Whole = 0
    left_out: Windows = ()
    unreported: dict[str, Any] = field(default_factory=dict)
    phase: Phase = field(default_factory=Phase)
    read: dict[str, SetCount] | None = None

    def advance(self, global_batch: int, sequence_length: int) -> tuple[int, int]:
        """Advance by one step and return the sample range [first, end) used by the step."""
        first = batch_start(self.sample, global_batch, self.left_out)
        self.step += 1
        self.sample = first + global_batch
        self.tokens += global_batch * sequence_length
        return first, self.sample


def batch_start(sample: int, global_batch: int, left_out: Windows) -> int:
    """Return the smallest start at or after `sample` for which a global batch contains no left-out
    samples."""
    for first, end in sorted(left_out):
        if sample < end and sample + global_batch > first:
            sample = end
    return sample


_ROUNDS = 8
_MASK64 = (1 << 64) - 1


class Permutation:
    """Permutation of [0, size) that depends only on `key`, not on machine or library versions."""

    def __init__(self, size: int, key: str) -> None:
        self.size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._round_keys = struct.unpack(f"<{_ROUNDS}Q", hashlib.sha512(key.encode()).digest())

    def __getitem__(self, index: int) -> int:
        """Map `index` to its image; both are in [0, size)."""
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
    """Hash a 64-bit integer with the SplitMix64 finalizer (Steele, Lea, Flood 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


BLEND_PERIOD = 1 << 20  # number of samples after which the interleaving of sets repeats


@dataclass(frozen=True)
class SetUse:
    """Use of a set across all phases of a run."""

    name: str
    weight: float  # share of the current phase's samples; sums to 1 over sets
    windows: int
    samples: int
    tokens: int
    epochs: float

    def __str__(self) -> str:
        return f"{self.name}: {self.weight:.1%} of the samples, {self.total}"

    @property
    def total(self) -> str:
        """Description of the set's use over the whole run."""
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens, {self.epochs:.2f} epochs of "
            f"{self.windows:,} windows"
        )


def repeats(epochs: Mapping[str, float]) -> str | None:
    """Return a message listing the sets that are read more than once, or None if there are no such
    sets."""
    often = [f"{name} {count:.2f} times" for name, count in epochs.items() if count > 1]
    return f"read more than once: {', '.join(often)}" if often else None


@dataclass(frozen=True)
class Blend:
    """Interleaving of several sets: a repeating pattern of `BLEND_PERIOD` samples.

    Samples from each set are evenly spaced: the i-th of the q samples from a set is placed at the
    fraction (i + 1/2) / q of the pattern. After any k samples, the number of samples from a set
    with share w is within (1 + w * sets) / 2 of w * k.
    """

    quotas: NDArray[np.int64]  # `[sets]`, samples per set in one period
    choice: NDArray[np.int32]  # `[period]`, set from which each sample is drawn
    rank: NDArray[np.int32]  # `[period]`, number of earlier samples from the same set

    def locate(self, sample: int) -> tuple[int, int]:
        """Return the index of the set from which `sample` is drawn, and the number of earlier
        samples from this set."""
        period, offset = divmod(sample, len(self.choice))
        chosen = int(self.choice[offset])
        return chosen, period * int(self.quotas[chosen]) + int(self.rank[offset])

    def used(self, samples: int) -> NDArray[np.int64]:
        """Return how many of the first `samples` samples are drawn from each set, `[sets]`."""
        periods, rest = divmod(samples, len(self.choice))
        partial = np.bincount(self.choice[:rest], minlength=len(self.quotas))
        return periods * self.quotas + partial


def build_blend(weights: Mapping[str, float]) -> Blend:
    """Interleave the sets in proportion to their weights.

    Raises:
        ConfigError: a weight is below 1/`BLEND_PERIOD` of the sum of the weights.
    """
    total = math.fsum(weights.values())
    exact = np.array(list(weights.values()), dtype=np.float64) / total * BLEND_PERIOD
    for (name, weight), samples in zip(weights.items(), exact, strict=True):
        if samples < 1:
            raise ConfigError(
                f"the weight of token set {name} must be at least 1/{BLEND_PERIOD} of the sum of "
                f"all weights ({total}), got {weight}"
            )
    quotas = np.floor(exact).astype(np.int64)
    # The samples left over from rounding down go to the sets with the largest remainders.
    leftover = np.argsort(quotas - exact, kind="stable")[: BLEND_PERIOD - quotas.sum()]
    quotas[leftover] += 1
    choice = np.repeat(np.arange(len(quotas), dtype=np.int32), quotas)
    rank = np.concatenate([np.arange(quota, dtype=np.int32) for quota in quotas])
    order = np.argsort((rank + 0.5) / quotas[choice], kind="stable")
    return Blend(quotas, choice[order], rank[order])


class TrainingData(Dataset[Tensor]):
    """All samples of a run: `data[k]` is sample k, for any k >= 0.

    A sample is int64 `[sequence_length + 1]`. With document borders, a sample has the shape given
    in `TokenSet.sample`. A run with several mixtures has one object per mixture; `at` returns the
    object for a given step.

    Args:
        sets: each set with its weight, in any order. A weight may be 0 if the weight of the set is
            positive in a later phase.
        seed: seed for the order within each set.
        phases: (number of preceding steps, weights by set) for each later phase, in order.
        borders: how to treat document borders.

    Raises:
        ConfigError: a weight is below 1/`BLEND_PERIOD` of the sum of the weights.
    """

    def __init__(
        self,
        sets: Iterable[tuple[TokenSet, float]],
        *,
        seed: int,
        phases: Sequence[tuple[int, Mapping[str, float]]] = (),
        borders: Borders = CROSSED,
    ) -> None:
        ordered = sorted(sets, key=lambda each: each[0].name)
        self.all_sets = [each for each, _ in ordered]
        """The sets used in any phase; `sets` contains only the sets used in this phase."""
        self.sequence_length = self.all_sets[0].sequence_length
        self.seed = seed
        self.borders = borders
        self.phase = Phase()
        self.later: tuple[tuple[int, TrainingData], ...] = ()
        self._mix({each.name: weight for each, weight in ordered})
        self.later = tuple((step, copy.copy(self)._mix(weights)) for step, weights in phases)

    def _mix(self, weights: Mapping[str, float]) -> "TrainingData":
        """Set the mixture to `weights` and return self."""
        self.sets = [each for each in self.all_sets if weights.get(each.name)]
        self.blend = build_blend({each.name: weights[each.name] for each in self.sets})
        return self

    def at(self, step: int) -> "TrainingData":
        """Return the data object with the mixture in effect after `step` steps."""
        return next((data for start, data in reversed(self.later) if start <= step), self)

    def since(self, phase: Phase) -> "TrainingData":
        """Return a copy of this object for `phase`, with the same sets and weights. The first
        sample of the phase has index `phase.sample`."""
        data = copy.copy(self)
        data.phase = phase
        return data

    def __getitem__(self, sample: int) -> Tensor:
        chosen, window = self.source(sample)
        return torch.from_numpy(self.sets[chosen].sample(window, self.borders))

    def source(self, sample: int) -> tuple[int, int]:
        """Locate a sample of this phase. Return the index of the sample's set in `sets`, and the
        index of the sample's window in the set."""
        chosen, earlier = self.blend.locate(sample - self.phase.sample)
        token_set = self.sets[chosen]
        before = self.phase.tokens(token_set.name) // self.sequence_length
        epoch, index = divmod(before + earlier, len(token_set))
        return chosen, window_order(token_set.name, len(token_set), self.seed, epoch)[index]

    def read(self, samples: int) -> dict[str, SetCount]:
        """Return the number of samples and tokens read from each set in the first `samples` samples
        of a run. The last of these samples must be in this phase."""
        counts = dict(self.phase.read)
        used = self.blend.used(samples - self.phase.sample).tolist()
        for each, new in zip(self.sets, used, strict=True):
            before = self.phase.read.get(each.name, UNREAD)
            counts[each.name] = SetCount(
                samples=before.samples + new,
                tokens=before.tokens + new * self.sequence_length,
                content=each.digest,
            )
        return counts

    def phase_after(self, sample: int, read: Counts) -> Phase:
        """Return a phase that starts at `sample` with the current sets. `read` contains the number
        of samples and tokens read from each set so far.

        A set whose content has changed is read from its start.
        """
        present = {each.name: each.digest for each in self.all_sets}
        same = {n: c for n, c in read.items() if present.get(n, c.content) == c.content}
        return Phase(sample=sample, read=same, mixture=self.fingerprint())

    @property
    def shares(self) -> dict[str, float]:
        """Each set's share of the samples in this phase. The shares sum to 1."""
        shares = (self.blend.quotas / len(self.blend.choice)).tolist()
        return {each.name: share for each, share in zip(self.sets, shares, strict=True)}

    def describe(self, counts: Counts) -> list[SetUse]:
        """Describe the use of each set in a run. `counts` contains the number of samples and tokens
        read from each set. Sets are sorted by name."""
        uses, shares = [], self.shares
        for each in self.all_sets:
            count = counts.get(each.name, UNREAD)
            epochs = count.tokens / (len(each) * self.sequence_length)
            share = shares.get(each.name, 0.0)
            uses.append(SetUse(each.name, share, len(each), count.samples, count.tokens, epochs))
        return uses

    def attended_length(self) -> float:
        """Return the attended length L of this mixture. On average, a token attends to as many keys
        as if all documents had length L.

        If attention crosses document borders, L is the window length.
        """
        if not self.borders.mask:
            return float(self.sequence_length)
        lengths = [each.attended_length for each in self.sets]
        return float(np.average(lengths, weights=self.blend.quotas))

    def earlier(self) -> dict[str, int]:
        """Map each removed set to the number of tokens read from it in earlier phases."""
        present = {each.name for each in self.all_sets}
        return {n: count.tokens for n, count in self.phase.read.items() if n not in present}

    def fingerprint(self) -> str:
        """Return a SHA-256 digest of everything that determines a phase's samples, except the
        number of tokens read from each set before the phase. The digest does not depend on
        paths."""
        digest = hashlib.sha256(f"order 1, {self.sequence_length}, {self.seed}".encode())
        for each, quota in zip(self.sets, self.blend.quotas, strict=True):
            digest.update(f"\n{each.name!r} {quota} {each.tokens} {each.digest}".encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def window_order(name: str, windows: int, seed: int, epoch: int) -> Permutation:
    """Return the order of a set's windows in epoch `epoch`."""
    return Permutation(windows, f"{seed}/{epoch}/{name}")
