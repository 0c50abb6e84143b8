"""Tokenizer files of an exported model: the run's tokenizer in transformers format."""

import json
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scripts.data.text_tokenizer import TOKENIZER_FILE, PreparedTokenizer, load_tokenizer
from training.checkpoint.stored_checkpoint import CheckpointInfo
from training.config import Config
from training.data.build_data import data_manifest
from training.data.manifest import Manifest
from training.errors import DataError, InputError

SETTINGS_FILE = "tokenizer_config.json"


def find_tokenizer(info: CheckpointInfo, given: Path | None) -> PreparedTokenizer:
    """Return the tokenizer used by the run that wrote a checkpoint.

    The `given` file or folder takes precedence, followed by the tokenizers in an imported
    checkpoint, in the config and in the data manifest. Raises InputError if no tokenizer is found,
    or if the tokenizer is not the run's tokenizer or has more tokens than the model's vocabulary.
    """
    config = info.config
    manifest = _manifest(config)
    source = _found_source(info) if given is None else given
    end = None if manifest is None or source == info.path else manifest.tokenizer.eod_token
    if not source.exists():
        raise InputError(f"the tokenizer {source} does not exist; pass --tokenizer PATH")
    tokenizer = load_tokenizer(source, end)
    end_token = tokenizer.entry.eod_token
    assert end_token is not None  # only manifests of earlier versions have no EOD token
    if end is None and not info.imported:
        print(
            f"note: the data has no manifest, so its end-of-document token is taken from {source}: "
            f"{end_token}",
            file=sys.stderr,
        )
    content = tokenizer.files[TOKENIZER_FILE]
    compare(info, source, content)
    if tokenizer.entry.vocab_size > (config.model.vocab_size or 0):
        raise InputError(
            f"tokenizer {source} must have at most model.vocab_size = {config.model.vocab_size} "
            f"tokens, got {tokenizer.entry.vocab_size}"
        )
    files = dict(tokenizer.files)
    length = config.train.sequence_length
    trained = not info.imported
    if trained:
        files[TOKENIZER_FILE] = as_trained(content)
    existing = files.get(SETTINGS_FILE)
    files[SETTINGS_FILE] = settings_of(existing, end_token, length, trained=trained)
    return replace(tokenizer, files=files)


def compare(info: CheckpointInfo, source: Path, content: bytes) -> None:
    """Raise InputError if `content`, the tokenizer.json of `source`, is not the run's tokenizer.

    Print a note to stderr if the checkpoint does not record the sha256 of its tokenizer.
    """
    recorded, digest = info.tokenizer_sha256, sha256(content)
    if recorded is None:
        print(
            f"note: the tokenizer {source} was not checked, because the checkpoint does not record "
            "the sha256 of the run's tokenizer",
            file=sys.stderr,
        )
    elif digest.hexdigest() != recorded:
        raise InputError(
            f"tokenizer {source} is not the run's tokenizer: its sha256 must be {recorded}, got "
            f"{digest.hexdigest()}"
        )


def as_trained(content: bytes) -> bytes:
    """Remove the post-processor template, which adds tokens such as `<s>`, from a tokenizer.json.

    Data is prepared without these tokens, so the model was not trained on them.
    """
    tokenizer = Tokenizer.from_str(content.decode())
    with_template, without = (tokenizer.encode("a", add_special_tokens=x) for x in (True, False))
    if with_template.ids == without.ids:
        return content
    names = ", ".join(dict.fromkeys(t for t in with_template.tokens if t not in without.tokens))
    print(
        "note: the tokenizer is exported without its post-processor template: the template adds "
        f"{names}, which the training data does not contain",
        file=sys.stderr,
    )
    return json.dumps({**json.loads(content), "post_processor": None}, ensure_ascii=False).encode()


def _manifest(config: Config) -> Manifest | None:
    """Return the manifest of the run's data, or None if the data is not available here."""
    try:
        return data_manifest(config)
    except DataError:
        return None


def tokenizer_source(info: CheckpointInfo) -> Path | None:
    """Return the file or folder of a checkpoint's tokenizer, or None if unknown.

    Checks an imported checkpoint's own folder, the path in the config and the path in the data
    manifest, in this order.
    """
    if (info.path / TOKENIZER_FILE).is_file():
        return info.path
    if info.config.data.tokenizer is not None:
        return Path(info.config.data.tokenizer)
    manifest = _manifest(info.config)
    return None if manifest is None else manifest.folder  # with the tokenizer's settings


def _found_source(info: CheckpointInfo) -> Path:
    """Return `tokenizer_source(info)`. Raises InputError if the tokenizer is unknown."""
    source = tokenizer_source(info)
    if info.imported and source != info.path:
        raise InputError(
            f"{info.path} has no tokenizer, because the imported model had none; pass "
            "--tokenizer PATH, or --no-tokenizer to export without a tokenizer"
        )
    if source is None:
        folder = Path(next(iter(info.config.data.train.values())).path).parent
        raise InputError(
            f"the tokenizer is unknown: data.tokenizer is null and {folder} has no manifest; "
            "pass --tokenizer PATH, or --no-tokenizer to export without a tokenizer"
        )
    return source


def settings_of(
    existing: bytes | None, end_token: str, length: int, *, trained: bool = True
) -> bytes:
    """Return a tokenizer_config.json for transformers 4 and 5.

    `trained` means that the model was trained on the tokens of tokenizer.json. The class must then
    be PreTrainedTokenizerFast, because other classes would change the tokenization.
    """
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    if existing is not None:
        settings |= json.loads(existing)
    # transformers 5 writes TokenizersBackend, which transformers 4 does not support.
    if trained or settings.get("tokenizer_class") in (None, "TokenizersBackend"):
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if trained:
        settings |= {key: False for key in ("add_bos_token", "add_eos_token") if key in settings}
    settings["eos_token"] = end_token
    settings.setdefault("pad_token", end_token)
    settings["model_max_length"] = length
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
