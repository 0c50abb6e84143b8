"""Random tokens instead of files."""

import numpy as np
import pytest

from tests.run_configs import tiny_config
from training.config import load_config
from training.data.build_data import build_data, with_vocabulary
from training.data.mock_tokens import MockTokens
from training.data.token_set import check_vocabulary


def test_a_window_depends_on_name_and_index_alone() -> None:
    one, again = (MockTokens("a", "nowhere", 3000, vocabulary=100) for _ in range(2))
    assert one.window(7).shape == (3001,)
    np.testing.assert_array_equal(one.window(7), again.window(7))
    assert one.window(7)[-1] == one.window(8)[0], "windows follow each other in one stream"
    assert (one.window(7) != one.window(8)).any()
    assert (one.window(7) != MockTokens("b", "nowhere", 3000, vocabulary=100).window(7)).any()


@pytest.mark.parametrize("vocabulary", [1, 2, 1000])
def test_tokens_are_of_the_vocabulary_and_as_frequent_as_said(vocabulary: int) -> None:
    tokens = MockTokens("a", "nowhere", 20_000, vocabulary=vocabulary)
    check_vocabulary([tokens], vocabulary)
    window = tokens.window(0)
    assert 0 <= window.min() <= window.max() < vocabulary
    shares = np.bincount(window, minlength=vocabulary) / len(window)
    # The most frequent token's share in 20,000 draws, to five standard deviations.
    expected = np.log(2) / np.log(vocabulary + 1)
    assert shares[0] == pytest.approx(expected, abs=5 * np.sqrt(0.25 / len(window)))
    assert tokens.unigram_entropy() <= np.log(vocabulary) + 1e-9


def test_a_run_keeps_the_names_of_its_sets(tmp_path) -> None:
    config = tiny_config(str(tmp_path), data__mock=True)  # there is no token file
    train, validation = build_data(config)
    assert [each.name for each in train.sets] == ["walk"]
    assert [(each.name, each.samples) for each in validation] == [("walk", 5)]
    assert train[0].shape == (33,) and validation[0].bits_per_byte(1.0) is None


def test_without_sets_there_is_one(tmp_path) -> None:
    tiny_config(str(tmp_path))
    sets = ["data.train=null", "data.validation=null", "validation.samples=null"]
    overrides = ["data.mock=true", *sets]
    config = load_config(tmp_path / "config.yaml", [*overrides, "model.vocab_size=null"])
    config = with_vocabulary(config)
    train, validation = build_data(config)
    assert [each.name for each in (*train.sets, *validation)] == ["mock", "mock"]
    assert train.sets[0].token_range == (0, config.model.vocab_size - 1)
