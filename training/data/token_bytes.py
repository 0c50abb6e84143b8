"""Text bytes per token for byte-level tokenizers.

A byte-level BPE maps every byte to a printable character (GPT-2's byte alphabet), so a token has as
many characters as bytes. The token lengths of a document add up to the length of its UTF-8 text,
which makes bits per byte exact.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, pre_tokenizers
from torch import Tensor

from training.errors import DataError
from training.json_file import read_json

BYTE_ALPHABET: Final = frozenset(pre_tokenizers.ByteLevel.alphabet())
AFFIXES: Final = ("continuing_subword_prefix", "end_of_word_suffix")
"""BPE settings that make tokens longer than the text they stand for."""
CUTS: Final = ("ByteLevel", "Digits", "Punctuation", "Split")
"""Pre-tokenizers that split text and drop no characters (unless their `behavior` is Removed)."""
LARGEST_ID: Final = 1 << 24


def token_byte_lengths(source: str | Path) -> Tensor | None:
    """Return the number of text bytes per token id, int32 `[vocab]`, with 0 for special tokens.

    Returns None if the tokenizer is not byte-level. The tokens of such a tokenizer have no fixed
    number of bytes, so `ValidationData` decodes them.

    Args:
        source: a tokenizer.json, or the folder containing it.

    Raises:
        DataError: the tokenizer file is missing or is not a tokenizer.json.
    """
    content = read_tokenizer_json(tokenizer_file(source))
    if not is_byte_level(content):
        return None
    lengths = {id_: len(token) for token, id_ in content["model"]["vocab"].items()}
    for token in content["added_tokens"]:  # stored as plain text, not in the byte alphabet
        lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    result = torch.zeros(max(lengths) + 1, dtype=torch.int32)
    result[list(lengths)] = torch.tensor(list(lengths.values()), dtype=torch.int32)
    return result


def vocabulary_size(source: str | Path) -> int:
    """Return 1 + the largest token id in a tokenizer.json. `source` is the file or its folder.

    Raises the DataError of `read_tokenizer_json`.
    """
    content = read_tokenizer_json(tokenizer_file(source))
    vocab = content["model"].get("vocab") or {}
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    return max([*ids, *(token["id"] for token in content["added_tokens"])], default=-1) + 1


def tokenizer_file(source: str | Path) -> Path:
    """Return the path of a tokenizer.json. `source` is the file or its folder."""
    path = Path(source)
    return path / "tokenizer.json" if path.is_dir() else path


def is_byte_level(content: dict[str, Any]) -> bool:
    """Return whether a parsed tokenizer.json maps text to tokens byte for byte.

    The tokenizer must be a BPE whose vocabulary uses the byte alphabet and includes all 256 bytes.
    The byte-level pre-tokenizer must not prepend a space to the text. No step may change, add or
    remove characters: there must be no normalizer, other pre-tokenizers must only split, and added
    tokens must not strip adjacent spaces.
    """
    model, steps = content["model"], _steps(content.get("pre_tokenizer"), "pretokenizers")
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    if model.get("type") != "BPE" or len(levels) != 1 or levels[0].get("add_prefix_space", True):
        return False
    normalizers = _steps(content.get("normalizer"), "normalizers")
    changed = bool(normalizers) or any(model.get(name) for name in AFFIXES)
    only_cuts = all(s["type"] in CUTS and s.get("behavior") != "Removed" for s in steps)
    # Special tokens that occur in a text are encoded as plain text.
    changed |= any(
        not token["special"] and (token.get("lstrip") or token.get("rstrip"))
        for token in content["added_tokens"]
    )
    if changed or not only_cuts:
        return False
    added = {token["content"] for token in content["added_tokens"]}
    vocab = model["vocab"].keys()
    return vocab >= BYTE_ALPHABET and all(
        token in added or BYTE_ALPHABET.issuperset(token) for token in vocab
    )


def _steps(section: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Flatten the steps of a section into a list; [] if the section is None."""
    if section is None:
        return []
    if section.get("type") == "Sequence":
        return [step for part in section[key] for step in _steps(part, key)]
    return [section]


def decoded_bytes(
    tokenizer: Tokenizer, documents: Iterable[tuple[NDArray[np.integer], int]]
) -> int:
    """Count the text bytes of document tokens by decoding them, for any tokenizer.

    Args:
        tokenizer: the tokenizer that produced the tokens.
        documents: a (tokens, skipped) pair per document: the first tokens of the document, and the
            number of leading tokens that are not counted.
    """
    size = 0
    for tokens, before in documents:
        for part, sign in ((tokens, 1), (tokens[:before], -1)):
            size += sign * len(tokenizer.decode(part.tolist()).encode())
    return size


def open_tokenizer(path: Path) -> Tokenizer:
    """Load a tokenizer.json, ignoring its truncation and padding settings. Raise DataError if the
    package `tokenizers` cannot read the file."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise DataError(f"cannot read tokenizer {path}: {error}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_tokenizer_json(path: Path) -> dict[str, Any]:
    """Parse a tokenizer.json; the result always contains `model` and `added_tokens`.

    Raises:
        DataError: the file is missing, is not a tokenizer.json, or has invalid token ids.
    """
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise DataError(f"tokenizer file {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read tokenizer {path}: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise DataError(f"{path} is not a tokenizer.json: section 'model' is missing")
    content = {"added_tokens": [], **content}
    vocab = content["model"].get("vocab")
    ids = list(vocab.values()) if isinstance(vocab, dict) else []  # unigram models have a list
    for id_ in [*ids, *(token.get("id") for token in content["added_tokens"])]:
        if type(id_) is not int or not 0 <= id_ <= LARGEST_ID:
            raise DataError(f"{path}: token ids must be integers in [0, 2^24], got {id_!r:.40}")
    twice = len(ids) - len(set(ids))
    if twice:
        raise DataError(f"{path}: token ids must be unique, got {twice} duplicates")
    return content
