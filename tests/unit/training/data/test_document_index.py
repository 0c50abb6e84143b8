"""Document starts in a window, rejected sets, and the loss of first tokens."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from training.data import document_index, token_set
from training.data.document_index import Borders, DocumentIndex
from training.data.mock_tokens import MockTokens
from training.data.order import TrainingData
from training.data.token_set import TokenSet
from training.data.validation_data import ValidationData
from training.errors import DataError

LENGTH = 8
MASKED = Borders(mask=True)
UNCOUNTED = Borders(first_token_loss=False)


def write(prefix, documents: list[list[int]]):
    """Write documents that consist of sequences with the given lengths. Token k of the stream is k
    modulo 200."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    first = 0
    for lengths in documents:
        tokens = np.arange(first, first + sum(lengths)) % 200
        builder.add_document(torch.from_numpy(tokens), lengths)
        first += sum(lengths)
    builder.finalize(f"{prefix}.idx")
    return prefix


def expected_firsts(documents: list[list[int]], window: int) -> list[int]:
    """For each token, return the position in the window at which its document starts, or 0 if it
    starts before the window."""
    document_of = [i for i, lengths in enumerate(documents) for _ in range(sum(lengths))]
    begin = window * LENGTH
    found = []
    for place in range(begin, begin + LENGTH + 1):
        first = place
        while first > begin and document_of[first - 1] == document_of[place]:
            first -= 1
        found.append(first - begin)
    return found


SETS = {
    "one token among others": [[5], [1], [30]],
    "longer than a window": [[3], [40], [7]],
    "up to the end of a window": [[8], [8], [9], [25]],
    "one token each": [[1]] * 40,
    "of several sequences": [[2, 3], [1, 1, 1], [20, 9]],
    "empty ones": [[0], [4], [0], [0], [33], [0]],
    "empty sequences": [[0, 4, 0], [5], [0, 0, 30]],
}


@pytest.mark.parametrize("name", SETS)
def test_borders_of_a_window_are_those_of_the_index(name: str, tmp_path) -> None:
    documents = SETS[name]
    tokens = TokenSet("set", write(tmp_path / "set", documents), LENGTH)
    tokens.check_documents(MASKED)
    for window in range(len(tokens)):
        sample = tokens.sample(window, MASKED)
        assert sample[0].tolist() == tokens.window(window).tolist()
        assert sample[1].tolist() == expected_firsts(documents, window)


def test_without_borders_a_sample_is_the_window(tmp_path) -> None:
    tokens = TokenSet("set", write(tmp_path / "set", [[20], [20]]), LENGTH)
    assert tokens.sample(1, Borders()).tolist() == tokens.window(1).tolist()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), min_size=1),
    step=st.sampled_from([1, 2, 5, document_index.STEP]),
)
def test_documents_are_counted_and_found_anywhere(lengths: list[list[int]], step: int) -> None:
    flat = np.array([n for document in lengths for n in document])
    ends = np.cumsum(flat)
    places = (ends - flat) * 2
    borders = np.concatenate([[0], np.cumsum([len(document) for document in lengths])])
    index = DocumentIndex(flat, places, borders, np.dtype(np.uint16))
    sizes = [sum(document) for document in lengths]
    starts = [sum(sizes[:i]) for i, size in enumerate(sizes) if size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(document_index, "STEP", step)
        assert index.count() == len(starts)
    for first in range(int(ends[-1])):
        found = index.starts(first, int(ends[-1])).tolist()
        assert found == [start for start in starts if start >= first]


def test_the_attended_length_is_that_of_equal_documents(tmp_path, monkeypatch) -> None:
    documents = SETS["longer than a window"]
    tokens = TokenSet("set", write(tmp_path / "set", documents), LENGTH)
    pairs = 0
    for window in range(len(tokens)):
        firsts = expected_firsts(documents, window)[:-1]
        pairs += sum(firsts.count(first) ** 2 for first in set(firsts))
    assert tokens.attended_length == pytest.approx(pairs / (len(tokens) * LENGTH))
    equal = TokenSet("set", write(tmp_path / "equal", [[4]] * 10), LENGTH)
    assert equal.attended_length == 4
    other = TokenSet("b", write(tmp_path / "b", [[8]] * 9), LENGTH)
    sets = [(equal, 3.0), (other, 1.0)]
    mixed = TrainingData(sets, seed=1, borders=MASKED)
    assert mixed.attended_length() == pytest.approx(0.75 * 4 + 0.25 * 8, rel=1e-5)
    crossed = TrainingData(sets, seed=1)
    assert crossed.attended_length() == LENGTH
    monkeypatch.setattr(token_set, "SPREAD_WINDOWS", 2)
    assert TokenSet("equal", tmp_path / "equal", LENGTH).attended_length == 4


def test_a_mixture_gives_the_documents_of_each_set(tmp_path) -> None:
    sets = {"a": [[3]] * 20, "b": [[5]] * 20}
    given = [
        (TokenSet(name, write(tmp_path / name, documents), LENGTH), 1.0)
        for name, documents in sets.items()
    ]
    data = TrainingData(given, seed=1, borders=MASKED)
    seen = set()
    for sample in range(12):
        chosen, window = data.source(sample)
        name = data.sets[chosen].name
        seen.add(name)
        assert data[sample][1].tolist() == expected_firsts(sets[name], window)
    assert seen == {"a", "b"}


def test_sets_without_documents_are_refused(tmp_path) -> None:
    one = TokenSet("one", write(tmp_path / "one", [[30, 30], [0]]), LENGTH)
    with pytest.raises(
        DataError, match="token set one: .*one.idx must contain at least two documents"
    ):
        one.check_documents(MASKED)
    single = TokenSet("single", write(tmp_path / "single", [[1]] * 30), LENGTH)
    single.check_documents(MASKED)
    with pytest.raises(
        DataError, match="token set single: at least one document in .* must have two"
    ):
        single.check_documents(UNCOUNTED)


def test_documents_out_of_order_are_refused(tmp_path) -> None:
    prefix = write(tmp_path / "set", [[10], [10], [10]])
    content = bytearray((tmp_path / "set.idx").read_bytes())
    content[-16:-8] = (0).to_bytes(8, "little")  # the third document begins before the second
    (tmp_path / "set.idx").write_bytes(content)
    with pytest.raises(
        DataError, match="set.idx is corrupt: documents must be listed in the order"
    ):
        TokenSet("set", prefix, LENGTH).check_documents(MASKED)


@pytest.mark.parametrize("name", SETS)
def test_bits_per_byte_leave_out_first_tokens_and_their_bytes(name: str, tmp_path) -> None:
    """Test every number of windows, because the last target may be a document's first token."""
    tokens = TokenSet("set", write(tmp_path / "set", SETS[name]), LENGTH)
    document_of = [i for i, lengths in enumerate(SETS[name]) for _ in range(sum(lengths))]
    lengths = torch.arange(200, dtype=torch.int32)
    for samples in range(1, (len(document_of) - 1) // LENGTH + 1):
        data = ValidationData(tokens, samples=samples, token_bytes=lengths, borders=UNCOUNTED)
        targets = range(1, samples * LENGTH + 1)
        counted = [k for k in targets if document_of[k] == document_of[k - 1]]
        assert (data.counted_tokens, data.target_bytes) == (len(counted), sum(counted))
        if counted:
            expected = 2.0 * len(counted) / (math.log(2) * sum(counted))
            assert data.bits_per_byte(2.0) == pytest.approx(expected, rel=1e-12)


def test_made_tokens_have_documents() -> None:
    tokens = MockTokens("a", "nowhere", 4096, vocabulary=10)
    starts = tokens.starts(0, 1 << 20)
    assert np.diff(starts).min() > 0 and len(starts) == pytest.approx(1024, rel=0.01)
    found = [tokens.starts(first, first + 5000).tolist() for first in (0, 3000, 12345)]
    for first, part in zip((0, 3000, 12345), found, strict=True):
        assert part == [s for s in starts.tolist() if first <= s < first + 5000]
