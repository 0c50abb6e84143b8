"""Train a byte-level BPE, or load an existing tokenizer with its EOD token."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data.manifest import TokenizerEntry
from training.data.token_bytes import is_byte_level, open_tokenizer, read_tokenizer_json
from training.errors import DataError
from training.json_file import read_json, real_path

EOD_TOKEN = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # every byte and EOD
TOKENIZER_FILE = "tokenizer.json"
# The other files of a Hugging Face tokenizer, which are needed for export.
COMPANIONS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
LONGEST_WORD = 1000
_LONG_RUN = re.compile(rf"\S{{{LONGEST_WORD}}}|\s{{{LONGEST_WORD}}}")
_CONFIGS = (
    "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json",
)  # fmt: skip


@dataclass(frozen=True)
class PreparedTokenizer:
    """A tokenizer: its manifest entry, and its files in a prepared folder."""

    entry: TokenizerEntry
    files: dict[str, bytes]  # by name, including TOKENIZER_FILE


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-level BPE with `vocab_size` tokens, including EOD. Return its tokenizer.json.

    Training is deterministic.

    Raises:
        DataError: `vocab_size` is too small for all bytes and EOD, or the texts contain too few
            distinct token pairs to fill the vocabulary.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise DataError(
            f"the vocabulary size must be at least {SMALLEST_VOCABULARY}, got {vocab_size}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(in_short_words(documents), trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise DataError(
            f"there is too little text for a vocabulary of {vocab_size} tokens; the largest "
            f"possible vocabulary is {tokenizer.get_vocab_size()}"
        )
    return tokenizer.to_str(pretty=True).encode()


def in_short_words(documents: Iterable[str]) -> Iterator[str]:
    """Yield the documents, split after `LONGEST_WORD` consecutive whitespace or non-whitespace
    characters.

    BPE training treats such a run (a line of dashes or base64 data, for example) as a single word,
    and takes quadratic time in the word length.
    """
    for text in documents:
        start = 0
        for run in _LONG_RUN.finditer(text):
            yield text[start : run.end()]
            start = run.end()
        yield text[start:]


def load_tokenizer(source: Path, eod: str | None) -> PreparedTokenizer:
    """Load a tokenizer from a tokenizer.json or a Hugging Face folder.

    Args:
        source: the file or folder.
        eod: end-of-document token. The default is the end-of-sequence token in the folder's
            configuration files. If none of the files specifies this token, the default is the
            tokenizer's only special token.

    Raises:
        DataError: there is no usable tokenizer.json, or the EOD token is unknown or ambiguous.
    """
    path = source / TOKENIZER_FILE if source.is_dir() else source
    files = own_files(source, (TOKENIZER_FILE, *COMPANIONS)) if source.is_dir() else {}
    content = _content(source, path)
    if content["model"].get("dropout"):
        raise DataError(
            f"{path}: model.dropout must be null, got {content['model']['dropout']!r:.40}: dropout "
            "makes encoding random"
        )
    tokenizer = open_tokenizer(path)
    eod_token = eod if eod is not None else _find_eod(source, content, tokenizer)
    eod_id = tokenizer.token_to_id(eod_token)
    if eod_id is None:
        raise DataError(f"end-of-document token {eod_token!r} is not in the vocabulary of {path}")
    if eod_token not in _special(content):
        raise DataError(
            f"end-of-document token {eod_token!r} of {path} must be a special token, because "
            "documents may contain any other token"
        )
    files = {TOKENIZER_FILE: path.read_bytes(), **files}
    entry = TokenizerEntry(
        file=TOKENIZER_FILE,
        sha256=hashlib.sha256(files[TOKENIZER_FILE]).hexdigest(),
        vocab_size=max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1,
        eod_id=eod_id,
        eod_token=eod_token,
        byte_level=is_byte_level(content),
    )
    return PreparedTokenizer(entry, files)


def _content(source: Path, path: Path) -> dict[str, Any]:
    """Parse a tokenizer.json. If `source` is another file, or a folder without tokenizer.json, the
    error explains how to convert a tokenizer."""
    try:
        return read_tokenizer_json(path)
    except DataError as error:
        if not source.exists() or (path.is_file() and path.name == TOKENIZER_FILE):
            raise
        folder = path.parent
        raise DataError(
            f"{error}; to convert a SentencePiece, tiktoken or slow tokenizer: "
            'python -c "from transformers import AutoTokenizer; '
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}-fast')\", then "
            f"pass --tokenizer {folder}-fast"
        ) from None


def own_files(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files `names` that exist in a tokenizer or model folder.

    A file may be a symlink to a file in the same folder or, in a hub cache snapshot, to a blob in
    the cache. Raises DataError if a symlink points elsewhere.
    """
    files, home = {}, real_path(folder)
    for name in names:
        path = real_path(folder / name)
        if not path.is_file():
            continue
        if not any(path.is_relative_to(parent) for parent in (home, home.parent.parent / "blobs")):
            raise DataError(
                f"{folder / name} must not link outside its folder, but links to {path}"
            )
        files[name] = path.read_bytes()
    return files


def _find_eod(source: Path, content: dict[str, Any], tokenizer: Tokenizer) -> str:
    """Return the end-of-sequence token that the folder specifies. If there is none, return the only
    special token."""
    special = _special(content)
    named = _configured_eos(source, tokenizer) if source.is_dir() else None
    if named is not None:
        return named
    if len(special) == 1:
        return str(special[0])
    if not special:
        raise DataError(f"{source} has no special token to mark the end of documents; add one")
    raise DataError(
        f"the end-of-document token of {source} is ambiguous; pass --eod with one of the tokens "
        f"{', '.join(special)}"
    )


def _special(content: dict[str, Any]) -> list[str]:
    """Return the special tokens of a tokenizer.json."""
    return [token["content"] for token in content["added_tokens"] if token["special"]]


def _configured_eos(folder: Path, tokenizer: Tokenizer) -> str | None:
    """Return the end-of-sequence token from the first configuration file that specifies one."""
    by_id = {id_: token for token, id_ in tokenizer.get_vocab().items()}
    for name in _CONFIGS:
        try:
            config = read_json(folder / name)
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise DataError(f"cannot read {folder / name}: {error}") from None
        if not isinstance(config, dict):
            raise DataError(f"{folder / name} must be an object, got {type(config).__name__}")
        token = config.get("eos_token", config.get("eos_token_id"))
        if isinstance(token, dict):  # a serialized AddedToken
            token = token.get("content")
        if isinstance(token, list):
            names = ", ".join(str(by_id.get(each, each)) for each in token)
            raise DataError(
                f"the end-of-document token is ambiguous: {folder / name} contains {names}; "
                "pass --eod TOKEN"
            )
        if token is not None:
            return token if isinstance(token, str) else by_id.get(token, str(token))
    return None
