"""The length of the words on which a tokenizer is trained is limited, which limits the training
time. Other text is kept."""

from scripts.data.text_tokenizer import LONGEST_WORD, in_short_words

TEXT = "the quick brown fox jumps over the lazy dog and reads a book of many pages " * 20


def test_only_long_runs_are_cut() -> None:
    word = "x" * LONGEST_WORD
    assert list(in_short_words([TEXT])) == [TEXT]
    assert list(in_short_words([f"a {word}{word}xy b"])) == [f"a {word}", word, "xy b"]
    for text in (f"{TEXT}{word * 3}{TEXT}", " " * 2500, word, ""):
        assert "".join(in_short_words([text])) == text
