"""The order of training samples, and validation sets."""

import itertools
import math
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.token_files import write_manifest
from tests.unit.training.data.conftest import SIZES, sampler
from training.data import batches
from training.data.batches import training_loader
from training.data.document_index import Borders
from training.data.order import BLEND_PERIOD, Permutation, TrainingData, batch_start, build_blend
from training.data.token_set import TokenSet
from training.data.validation_data import ValidationData
from training.errors import ConfigError, DataError

WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}


def training_data(prefixes: dict[str, Path], *, seed: int = 1, length: int = 8) -> TrainingData:
    sets = [(TokenSet(name, prefix, length), WEIGHTS[name]) for name, prefix in prefixes.items()]
    return TrainingData(sets, seed=seed)


# --- permutation and blend ----------------------------------------------------------------------


@given(size=st.integers(1, 3000), key=st.text(max_size=8))
def test_permutation_hits_every_element_once(size: int, key: str) -> None:
    permutation = Permutation(size, key)
    assert sorted(permutation[i] for i in range(size)) == list(range(size))


def test_order_is_the_same_for_ever() -> None:
    """If the order changed, no existing run could resume correctly."""
    permutation = Permutation(1000, "1234/0/kjv")
    assert [permutation[i] for i in range(8)] == [918, 24, 522, 555, 854, 436, 485, 51]


@pytest.mark.parametrize("weights", [[1.0], [0.6, 0.3, 0.1], [5, 1e-3, 2, 2, 2], [1 / 3] * 3])
def test_blend_follows_the_evenly_spaced_order(weights: list[float]) -> None:
    """The blend equals a slow reference with exact fractions, in which the most overdue set comes
    next."""
    blend = build_blend({str(i): weight for i, weight in enumerate(weights)})
    quotas = [int(quota) for quota in blend.quotas]
    assert sum(quotas) == BLEND_PERIOD
    used = [0] * len(weights)
    for sample in range(3000):
        due = [Fraction(2 * n + 1, 2 * quota) for n, quota in zip(used, quotas, strict=True)]
        expected = due.index(min(due))
        assert blend.locate(sample) == (expected, used[expected])
        used[expected] += 1
        assert blend.used(sample + 1).tolist() == used


@given(
    weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=6),
    samples=st.integers(0, 4 * BLEND_PERIOD),
)
def test_weights_are_honoured_after_any_number_of_samples(weights, samples) -> None:
    used = build_blend({str(i): weight for i, weight in enumerate(weights)}).used(samples)
    shares = np.array(weights) / sum(weights)
    # Blend's bound, plus the rounding of shares to whole samples per period.
    bound = (1 + shares * len(weights)) / 2 + samples / BLEND_PERIOD + 1e-6
    assert used.sum() == samples and (np.abs(used - shares * samples) <= bound).all()


def test_blend_goes_on_across_its_period() -> None:
    blend = build_blend(WEIGHTS)
    used = blend.used(BLEND_PERIOD - 5).tolist()
    for sample in range(BLEND_PERIOD - 5, BLEND_PERIOD + 200):
        chosen, earlier = blend.locate(sample)
        assert earlier == used[chosen]
        used[chosen] += 1
    assert used == blend.used(BLEND_PERIOD + 200).tolist()


def test_samples_left_by_rounding_go_to_the_largest_remainders() -> None:
    # 2^20 / 7 is 149,796.57 and 3 * 2^20 / 7 is 449,389.71: two samples are left.
    assert build_blend({"a": 1, "b": 3, "c": 3}).quotas.tolist() == [149_796, 449_390, 449_390]


def test_a_vanishing_weight_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="the weight of token set b must be at least 1/1048576 of"
    ):
        build_blend({"a": 1.0, "b": 1e-7})


# --- training data ------------------------------------------------------------------------------


def test_sample_is_the_window_it_claims_in_any_order_of_access(prefixes: dict[str, Path]) -> None:
    raw = {name: np.fromfile(f"{prefix}.bin", np.uint16) for name, prefix in prefixes.items()}
    data, again = training_data(prefixes), training_data(prefixes)
    samples = [again[k] for k in reversed(range(400))][::-1]
    for k in range(400):
        chosen, window = data.source(k)
        expected = raw[data.sets[chosen].name][8 * window : 8 * window + 9]
        assert data[k].dtype == torch.int64
        assert data[k].tolist() == expected.tolist() == samples[k].tolist()
    assert data[10**12].shape == (9,)  # any sample directly, without the samples before


def test_every_epoch_visits_every_window_once_in_another_order(prefixes) -> None:
    data = training_data(prefixes)
    visits: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for k in range(700):
        chosen, window = data.source(k)
        visits[chosen].append(window)
    for chosen, windows in visits.items():
        size = len(data.sets[chosen])
        epochs = [windows[i : i + size] for i in range(0, len(windows) - size + 1, size)]
        assert len(epochs) >= 2
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert all(one != other for one, other in itertools.combinations(epochs, 2))


def test_order_depends_on_seed_and_set_name(prefixes: dict[str, Path]) -> None:
    def order(name: str, seed: int) -> list[tuple[int, int]]:
        data = TrainingData([(TokenSet(name, prefixes["a"], 8), 1.0)], seed=seed)
        return [data.source(k) for k in range(100)]

    assert order("one", 1) != order("one", 2) and order("one", 1) != order("two", 1)


def test_describe_counts_what_is_used(prefixes: dict[str, Path]) -> None:
    data = training_data(prefixes)
    chosen = Counter(data.sets[data.source(k)[0]].name for k in range(500))
    for use in data.describe(data.read(500)):
        windows = (SIZES[use.name] - 1) // 8
        assert use.samples == chosen[use.name]
        assert (use.tokens, use.windows) == (8 * use.samples, windows)
        assert use.epochs == use.samples / windows
        assert use.weight == pytest.approx(WEIGHTS[use.name], abs=1 / BLEND_PERIOD)
        assert str(use).startswith(f"{use.name}: {use.weight:.1%} of the samples")


def test_fingerprint_tells_what_decides_the_order(prefixes, tmp_path) -> None:
    base = training_data(prefixes).fingerprint()
    moved = tmp_path / "moved"
    moved.mkdir()
    copies = {name: moved / name for name in reversed(prefixes)}
    for name, prefix in prefixes.items():
        for suffix in (".bin", ".idx"):
            (moved / f"{name}{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    assert training_data(copies).fingerprint() == base  # neither path nor order of the sets
    assert training_data(prefixes, seed=2).fingerprint() != base
    assert training_data(prefixes, length=9).fingerprint() != base
    equal = [(TokenSet(name, prefix, 8), 1.0) for name, prefix in prefixes.items()]
    assert TrainingData(equal, seed=1).fingerprint() != base
    changed = bytearray((moved / "b.bin").read_bytes())
    changed[100:104] = b"\x01\x01\x01\x01"
    (moved / "b.bin").write_bytes(changed)
    assert training_data(copies).fingerprint() != base


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
@pytest.mark.parametrize("data_size", [1, 2, 4])
def test_global_batch_does_not_depend_on_the_layout(data_size: int, micro_batch: int) -> None:
    per_rank = 24 // data_size // micro_batch
    for step in range(3):
        found: list[int] = []
        for rank in range(data_size):
            size = {"global_batch": 24, "micro_batch": micro_batch}
            order = sampler(consumed=7, data_rank=rank, data_size=data_size, **size)
            batches = list(itertools.islice(order, 3 * per_rank))
            assert {len(batch) for batch in batches} == {micro_batch}
            found += sum(batches[step * per_rank : (step + 1) * per_rank], [])
        assert found == list(range(7 + 24 * step, 7 + 24 * (step + 1)))


# On machines with one processor.
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_resumes_at_any_sample_and_leaves_the_rng_alone(prefixes, workers) -> None:
    data = training_data(prefixes)

    def batches(consumed: int, count: int) -> list[torch.Tensor]:
        order = sampler(consumed=consumed, data_rank=1, data_size=2)
        return list(itertools.islice(training_loader(data, order, workers=workers), count))

    before = torch.get_rng_state()
    whole, resumed = batches(0, 6), batches(16, 2)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.stack(whole[4:]), torch.stack(resumed))
    expected = [data[k] for k in (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23)]
    assert torch.equal(torch.cat(whole), torch.stack(expected))


def test_workers_without_shared_memory_are_refused(prefixes, monkeypatch) -> None:
    monkeypatch.setattr(batches, "SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match="data.workers = 1 needs 1099511627776.0 MiB in /dev/shm"):
        training_loader(training_data(prefixes), sampler(), workers=1)


# --- validation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [None, 1, 5, 1000])
@pytest.mark.parametrize("data_size", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_every_validation_window_counts_once(prefixes, samples, data_size, micro_batch) -> None:
    data = ValidationData(TokenSet("b", prefixes["b"], 8), samples=samples)
    layout = {"micro_batch": micro_batch, "data_size": data_size}
    counted: Counter[tuple[int, ...]] = Counter()
    for rank in range(data_size):
        batches = list(data.batches(data_rank=rank, **layout))
        assert len(batches) == data.micro_batches(**layout)
        for tokens, weights in batches:
            assert tokens.shape == (micro_batch, 9) and tokens.dtype == torch.int64
            assert weights.dtype == torch.float32
            for window, weight in zip(tokens.tolist(), weights.tolist(), strict=True):
                counted[tuple(window)] += int(weight)
    whole = TokenSet("b", prefixes["b"], 8)
    windows = [tuple(whole.window(i).tolist()) for i in range(min(50, samples or 50))]
    assert +counted == Counter(windows) and data.samples == len(windows)


def test_bits_per_byte_counts_the_bytes_of_the_targets(prefixes: dict[str, Path]) -> None:
    lengths = torch.arange(500, dtype=torch.int32)
    data = ValidationData(TokenSet("b", prefixes["b"], 8), samples=9, token_bytes=lengths)
    ((windows, _),) = data.batches(micro_batch=9, data_rank=0, data_size=1)
    size = windows[:, 1:].sum().item()
    assert data.target_bytes == size
    # 9 windows of 8 targets at 2 nats each
    assert data.bits_per_byte(2.0) == pytest.approx(9 * 8 * 2.0 / math.log(2) / size, rel=1e-12)
    with pytest.raises(DataError, match="must be below the tokenizer's size of 300"):
        ValidationData(TokenSet("b", prefixes["b"], 8), token_bytes=lengths[:300])


def test_bytes_are_estimated_from_the_manifest_or_unknown(prefixes, tmp_path) -> None:
    unknown = ValidationData(TokenSet("a", prefixes["a"], 8), samples=2)
    assert unknown.target_bytes is None and unknown.bits_per_byte(1.0) is None
    write_manifest(tmp_path)
    estimated = ValidationData(TokenSet("a", prefixes["a"], 8), samples=2)
    assert estimated.target_bytes == 2 * 8 * 4000 / 1000
    # One of three documents begins within 400 targets.
    borders = Borders(first_token_loss=False)
    part = ValidationData(TokenSet("a", prefixes["a"], 8), samples=50, borders=borders)
    assert part.target_bytes == pytest.approx(399 * 4000 / 1000)


def test_windows_left_out_in_any_order_are_all_left_out() -> None:
    """The first window moves the batch into the second window."""
    assert batch_start(0, 4, ((4, 8), (0, 4))) == 8
    assert batch_start(0, 4, ((8, 12), (4, 8))) == 0


def test_a_batch_begins_at_the_first_sample_from_which_none_is_left_out() -> None:
    """Batches and windows of any length may overlap partially, as after a change of batch size."""
    spans = itertools.combinations(range(7), 2)
    for windows in itertools.product(spans, repeat=2):
        gone = {sample for window in windows for sample in range(*window)}
        for sample, batch in itertools.product(range(7), range(1, 5)):
            starts = (k for k in range(sample, 99) if gone.isdisjoint(range(k, k + batch)))
            assert batch_start(sample, batch, windows) == next(starts), (sample, batch, windows)
