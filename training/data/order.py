"""The order of training samples, and validation data.

Sample k of a phase of a run is a pure function of the seed, of the counts of each set at the start
of the phase, and of k: the weights determine its set, and a permutation per epoch its window of the
set. Nothing depends on the number of steps, the batch size or the number of ranks, so a run can
stop, resume and change its layout at any sample. A change of the mixture begins the next phase.
"""

import copy
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from training.data.documents import CROSSED, Borders
from training.data.manifest import SetEntry
from training.data.phase import Counts, Phase, SetCount
from training.data.shuffle import Permutation
from training.data.token_bytes import decoded_bytes, open_tokenizer
from training.data.token_set import TokenSet
from training.errors import ConfigError, DataError

Windows = tuple[tuple[int, int], ...]
"""[first, end) ranges of samples that a run leaves out."""

OpenSet = Callable[[str, str | Path, int], TokenSet]
"""What makes a set of (name, path without suffix, sequence length)."""

SHARED_MEMORY: Final = "/dev/shm"
AHEAD: Final = 2
"""Batches that a worker reads ahead, as torch's DataLoader has it."""
SPARE_BYTES: Final = 1 << 20
"""Bytes of shared memory for semaphores and what others take."""

BLEND_PERIOD = 1 << 20  # samples after which the interleaving of the sets repeats


@dataclass(frozen=True)
class SetUse:
    """How much of one set the samples of a run use, in all its phases."""

    name: str
    weight: float  # share of the samples of the present phase; those of all sets sum to 1
    windows: int
    samples: int
    tokens: int
    epochs: float

    def __str__(self) -> str:
        return f"{self.name}: {self.weight:.1%} of the samples, {self.total}"

    @property
    def total(self) -> str:
        """What the whole run uses, in words."""
        return (
            f"{self.samples:,} samples, {self.tokens:,} tokens, {self.epochs:.2f} epochs of "
            f"{self.windows:,} windows"
        )


def repeats(epochs: Mapping[str, float]) -> str | None:
    """Say which sets are read more than once, by their epochs; None if none is."""
    often = [f"{name} {count:.2f} times" for name, count in epochs.items() if count > 1]
    return f"read more than once: {', '.join(often)}" if often else None


@dataclass(frozen=True)
class Blend:
    """Interleaving of several sets: a pattern of `BLEND_PERIOD` samples that repeats.

    The samples of each set are evenly spaced: the i-th of q samples is at (i + 1/2) / q of the
    pattern. After any k samples a set with share w has been used w * k times, to within
    (1 + w * sets) / 2.
    """

    quotas: NDArray[np.int64]  # `[sets]`, samples of each set in one period
    choice: NDArray[np.int32]  # `[period]`, set of each sample
    rank: NDArray[np.int32]  # `[period]`, number of earlier samples of the same set

    def locate(self, sample: int) -> tuple[int, int]:
        """Return (set, number of earlier samples of that set) of a sample."""
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

    It is int64 `[sequence_length + 1]`, or with borders what `TokenSet.sample` returns.

    A run whose mixture changes has one of these for each; `at` returns that of a step.

    Args:
        sets: (name, prefix, weight) of each set; their order does not matter. A weight may be 0 if
            a phase has another.
        sequence_length: tokens the model predicts per sample.
        seed: of the order within the sets.
        open_set: what makes a set of its name and prefix; the default reads files.
        phases: steps before each later phase, ascending, and its weights by set.
        borders: what is made of the borders between documents.

    Raises:
        ConfigError: a weight vanishes beside the others.
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
        """Of all phases; `sets` are those of this one."""
        self.sequence_length = sequence_length
        self.seed = seed
        self.borders = borders
        self.phase = Phase()
        self.later: tuple[tuple[int, TrainingData], ...] = ()
        self._mix({name: weight for name, _, weight in ordered})
        self.later = tuple((step, copy.copy(self)._mix(weights)) for step, weights in phases)

    def _mix(self, weights: Mapping[str, float]) -> "TrainingData":
        """Take the sets of these weights, and return the data."""
        self.sets = [each for each in self.all_sets if weights.get(each.name)]
        self.blend = build_blend({each.name: weights[each.name] for each in self.sets})
        return self

    def at(self, step: int) -> "TrainingData":
        """Return the data of the mixture that follows on `step` steps."""
        return next((data for start, data in reversed(self.later) if start <= step), self)

    def since(self, phase: Phase) -> "TrainingData":
        """Return the data of a phase that has these sets and weights; its first sample is
        `data[phase.sample]`."""
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
        """Return what the first `samples` samples of a run, up to this phase, read of each set."""
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
        """Return the phase of these sets from `sample` on, where a run has `read` so much of each.

        A set with other content than the one that was read under its name begins at its start.
        """
        present = {each.name: each.digest for each in self.all_sets}
        same = {n: c for n, c in read.items() if present.get(n, c.content) == c.content}
        return Phase(sample=sample, read=same, mixture=self.fingerprint())

    @property
    def shares(self) -> dict[str, float]:
        """Share of each set in the samples of the phase; all together are 1."""
        shares = (self.blend.quotas / len(self.blend.choice)).tolist()
        return {each.name: share for each, share in zip(self.sets, shares, strict=True)}

    def describe(self, counts: Counts) -> list[SetUse]:
        """Return how much of each set of the run has been used at these counts, by name."""
        uses = []
        for each in self.all_sets:
            count = counts.get(each.name, SetCount(samples=0, tokens=0, content=each.digest))
            epochs = count.tokens / (len(each) * self.sequence_length)
            share = self.shares.get(each.name, 0.0)
            use = SetUse(each.name, share, len(each), count.samples, count.tokens, epochs)
            uses.append(use)
        return uses

    def attended_length(self) -> float:
        """Return the length of equal documents whose tokens would see as many keys as those of the
        mixture do, or of the windows if attention crosses the borders."""
        if not self.borders.mask:
            return float(self.sequence_length)
        lengths = [each.attended_length for each in self.sets]
        return float(np.average(lengths, weights=self.blend.quotas))

    def earlier(self) -> dict[str, int]:
        """Return, by name, the tokens that earlier phases read of sets that the run has no more."""
        present = {each.name for each in self.all_sets}
        return {n: count.tokens for n, count in self.phase.read.items() if n not in present}

    def fingerprint(self) -> str:
        """Return a sha256 of all that determines the samples of a phase beside its counts; paths do
        not."""
        digest = hashlib.sha256(f"order 1, {self.sequence_length}, {self.seed}".encode())
        for each, quota in zip(self.sets, self.blend.quotas, strict=True):
            digest.update(f"\n{each.name!r} {quota} {each.tokens} {each.digest}".encode())
        return digest.hexdigest()


@lru_cache(maxsize=64)
def window_order(name: str, windows: int, seed: int, epoch: int) -> Permutation:
    """Return the order of a set's windows in epoch `epoch`."""
    return Permutation(windows, f"{seed}/{epoch}/{name}")


@dataclass(frozen=True, kw_only=True)
class GlobalBatchSampler:
    """Sampler of one data-parallel rank: an endless sequence of micro-batches of sample indices.

    Global batch n starts at sample `consumed + n * global_batch`, or after the samples that are
    left out if it would contain one of them. Rank r takes its r-th part, in order, and splits it
    into micro-batches, so the samples of a global batch depend on neither `data_size` nor
    `micro_batch`. A config has made sure that their product divides `global_batch`.
    """

    consumed: int  # samples used so far, over all ranks
    global_batch: int
    micro_batch: int
    data_rank: int
    data_size: int
    left_out: Windows = ()

    def __iter__(self) -> Iterator[list[int]]:
        share = self.global_batch // self.data_size
        batch = self.consumed
        while True:
            batch = batch_start(batch, self.global_batch, self.left_out)
            start = batch + self.data_rank * share
            for first in range(start, start + share, self.micro_batch):
                yield list(range(first, first + self.micro_batch))
            batch += self.global_batch


def batch_start(sample: int, global_batch: int, left_out: Windows) -> int:
    """Return the first sample, from `sample` on, of a global batch without left-out samples."""
    for first, end in sorted(left_out):
        if sample < end and sample + global_batch > first:
            sample = end
    return sample


def training_loader(
    data: TrainingData, sampler: GlobalBatchSampler, *, workers: int = 0
) -> DataLoader[Tensor]:
    """Return an endless loader of a rank's micro-batches `[micro_batch, sequence_length + 1]`, or
    `[micro_batch, 2, sequence_length + 1]` with borders.

    To resume, build it with a sampler whose `consumed` is the number of samples used so far.

    Args:
        workers: processes that read ahead; 0 reads in this one. It does not change the order.

    Raises:
        ConfigError: there is too little shared memory for what `workers` read ahead.
    """
    if workers:
        rows = sampler.micro_batch * (2 if data.borders.needed else 1)
        _check_shared_memory(workers, rows * (data.sequence_length + 1) * 8)
    return DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
        # A DataLoader draws a seed when it starts: from this generator, not from the run's.
        generator=torch.Generator().manual_seed(0),
    )


def _check_shared_memory(workers: int, batch_bytes: int) -> None:
    """Check that the batches which the workers of this machine read ahead fit into /dev/shm."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = ranks * workers * (AHEAD + 1) * batch_bytes + SPARE_BYTES
    free = shutil.disk_usage(SHARED_MEMORY).free if os.path.isdir(SHARED_MEMORY) else needed
    if free < needed:
        raise ConfigError(
            f"data.workers = {workers} needs {needed / 2**20:.1f} MiB of {SHARED_MEMORY}, where "
            f"{free / 2**20:.1f} are free: give a container more (--shm-size), or set it to 0"
        )


class ValidationData:
    """The first windows of a validation set, each counted exactly once on any layout.

    Args:
        name: of the set, as in the config.
        prefix: path of the .bin/.idx pair without its suffix.
        sequence_length: tokens the model predicts per window. The tokens after the last full
            window are left out.
        samples: largest number of windows; None means the whole set.
        token_bytes: int32 `[vocab]` from `token_byte_lengths`, for a byte-level tokenizer.
        tokenizer: the tokenizer.json that made the tokens, with which they are decoded without
            `token_bytes`. Without both, the bytes are estimated from the manifest's mean bytes
            per token, and unknown if there is no manifest.
        open_set: what makes the set of its name and prefix; the default reads files.
        borders: what is made of the borders between documents.

    Raises:
        DataError: the set cannot be used, or a token id has no entry in `token_bytes`.
    """

    def __init__(
        self,
        name: str,
        prefix: str | Path,
        *,
        sequence_length: int,
        samples: int | None = None,
        token_bytes: Tensor | None = None,
        tokenizer: Path | None = None,
        open_set: OpenSet = TokenSet,
        borders: Borders = CROSSED,
    ) -> None:
        self.name = name
        self.set = open_set(name, prefix, sequence_length)
        self.borders = borders
        self.samples = min(len(self.set), samples or len(self.set))
        self.target_tokens = self.samples * sequence_length
        left_out: list[int] = []
        if not borders.first_token_loss:
            left_out = self.set.starts(1, self.target_tokens + 1).tolist()
        self.counted_tokens = self.target_tokens - len(left_out)
        self.target_bytes = self._target_bytes(token_bytes, tokenizer)
        if self.target_bytes is not None and left_out:
            self.target_bytes -= self._bytes_of(left_out, token_bytes)

    def _target_bytes(self, token_bytes: Tensor | None, tokenizer: Path | None) -> float | None:
        """Bytes of text of all targets, tokens 1 to `target_tokens` of the stream."""
        if token_bytes is None:
            entry = self.set.entry
            if tokenizer is not None:
                return float(self._decoded_bytes(open_tokenizer(tokenizer), entry))
            return None if entry is None else self.target_tokens * entry.bytes / entry.tokens
        if self.set.max_token() >= len(token_bytes):
            raise DataError(
                f"set {self.name} holds token id {self.set.max_token()}, "
                f"but the tokenizer has only {len(token_bytes)} tokens"
            )
        lengths = token_bytes.numpy()
        blocks = self.set.blocks(1, self.target_tokens + 1)
        return float(sum(int(lengths[block].sum(dtype=np.int64)) for block in blocks))

    def _bytes_of(self, places: Sequence[int], token_bytes: Tensor | None) -> float:
        """Bytes of text of the tokens at these places: without `token_bytes` as many as of others
        in the mean."""
        tokens = [int(self.set.read(place, 1)[0]) for place in places]
        if token_bytes is None:
            assert self.target_bytes is not None
            return len(tokens) * self.target_bytes / self.target_tokens
        return float(token_bytes[tokens].sum())

    def _decoded_bytes(self, tokenizer: Tokenizer, entry: SetEntry | None) -> int:
        """As `_target_bytes`, by decoding the targets, or the rest of a set of known size."""
        end, size = self.target_tokens + 1, self.set.tokens
        if entry is None or end - 1 < size - end:
            return decoded_bytes(tokenizer, self.set.document_parts(1, end))
        rest = [*self.set.document_parts(0, 1), *self.set.document_parts(end, size)]
        return entry.bytes - decoded_bytes(tokenizer, rest)

    def bits_per_byte(self, loss: float) -> float | None:
        """Return a mean loss, in nats per token, as bits per byte, None if bytes are unknown."""
        if not self.target_bytes:
            return None
        return loss * self.counted_tokens / (math.log(2) * self.target_bytes)

    def micro_batches(self, *, micro_batch: int, data_size: int) -> int:
        """Return the number of micro-batches on each rank."""
        return -(-self.samples // (micro_batch * data_size))

    def batches(
        self, *, micro_batch: int, data_rank: int, data_size: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one rank's micro-batches: tokens `[micro_batch, sequence_length + 1]` and weights.

        With borders the first are what `TokenSet.sample` returns, `[micro_batch, 2, ...]`.
        Weights, float32 `[micro_batch]`, are 1 for windows that count and 0 for repetitions of the
        last window that fill up the batch. Over all ranks every window counts once.
        """
        for batch in range(self.micro_batches(micro_batch=micro_batch, data_size=data_size)):
            first = (batch * data_size + data_rank) * micro_batch
            indices = range(first, first + micro_batch)
            last = self.samples - 1
            windows = [self.set.sample(min(index, last), self.borders) for index in indices]
            counted = [float(index < self.samples) for index in indices]
            yield torch.from_numpy(np.stack(windows)), torch.tensor(counted)
