"""Training a tokenizer takes bounded time for any text, and long runs of characters change nothing
else."""

import time

import pytest

from scripts.data.text_tokenizer import LONGEST_WORD, in_short_words, train_tokenizer

TEXT = "the quick brown fox jumps over the lazy dog and reads a book of many pages " * 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", ["a" * 300_000, " " * 300_000, "-=" * 150_000, "\n" * 300_000])
def test_a_run_of_one_letter_takes_no_longer_than_other_text(run: str) -> None:
    start = time.process_time()
    trained = train_tokenizer([TEXT, run, TEXT], 280)
    assert time.process_time() - start < 20
    assert trained.vocab_size == 280


def test_only_long_runs_are_cut() -> None:
    word = "x" * LONGEST_WORD
    assert list(in_short_words([TEXT])) == [TEXT]
    assert list(in_short_words([f"a {word}{word}xy b"])) == [f"a {word}", word, "xy b"]
    for text in (f"{TEXT}{word * 3}{TEXT}", " " * 2500, word, ""):
        assert "".join(in_short_words([text])) == text
