"""Load tokenizers with transformers and compare them with tokenizer.json."""

from itertools import zip_longest
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scripts.command import warn
from scripts.huggingface.model_folder import offline
from training.errors import InputError

TEXT = """In the beginning God created the heaven and the earth. And the earth was without form, and
void; and darkness was upon the face of the deep. PATIENCE, n. A minor form of despair, disguised as
a virtue. The term "hacker" was originally a person who builds furniture with an axe; since then it
has come to mean one who programs enthusiastically, and who enjoys exploring the details of systems
and how to stretch their capabilities: for (int i = 0; i < 10; i++) { sum += a[i]; }
"""


def checked_tokenizer(folder: Path, *, with_template: bool) -> Any:
    """Return the tokenizer in `folder` as loaded by transformers.

    Raises InputError if the tokenizer encodes or decodes text differently than the folder's
    tokenizer.json. See `check_tokens`.
    """
    from transformers import AutoTokenizer

    with offline():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = stored.get_added_tokens_decoder().values()
    more = {str(token) for token in tokenizer.added_tokens_decoder.values()} - set(map(str, added))
    if more:
        raise InputError(
            f"tokenizer_config.json in {folder} must not add tokens to tokenizer.json, got "
            f"{', '.join(sorted(more)):.80}; remove these tokens, because the training text was "
            "encoded without them"
        )
    check_tokens(tokenizer, stored, with_template=with_template)
    return tokenizer


def check_tokens(loaded: Any, stored: Tokenizer, *, with_template: bool) -> None:
    """Raise InputError if transformers and tokenizer.json encode or decode TEXT differently.

    If `with_template` is True, the tokenizer may use a template that adds tokens to the text. Data
    is prepared without these tokens, but an imported model's tokenizer may add them.
    """
    # verbose=False: no warning about the length, because this text is not fed to a model.
    tokens = loaded(TEXT, add_special_tokens=not with_template, verbose=False)["input_ids"]
    expected = stored.encode(TEXT, add_special_tokens=False).ids
    if tokens != expected:
        first = next(i for i, pair in enumerate(zip_longest(tokens, expected)) if len({*pair}) > 1)
        raise InputError(
            f"transformers' {type(loaded).__name__} must encode text as tokenizer.json does: "
            f"at token {first}, expected {expected[first : first + 4]}, got "
            f"{tokens[first : first + 4]}"
        )
    text, stored_text = loaded.decode(tokens), stored.decode(expected, skip_special_tokens=False)
    if text != stored_text:
        raise InputError(
            f"transformers' {type(loaded).__name__} must decode tokens as tokenizer.json does: "
            f"expected {stored_text[:40]!r}, got {text[:40]!r}"
        )
    if text != TEXT:
        warn(f"the tokenizer is lossy: {TEXT[:20]!r} becomes {text[:20]!r}")
