"""Turn a run's own validation sets into lm-eval tasks that work offline.

Validation during training evaluates windows of the token stream. A task contains the text of the
trainer's validation windows, starting at the stream's second token. Each document of a task
consists of consecutive windows, so lm-eval splits the text at the same tokens as the trainer. Bits
per byte therefore agree, except for the first token of each document. The standard error is
computed over documents. With `data.document_mask`, a task's documents are the documents of the
validation set, split at window boundaries as in the trainer.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from scripts.evaluation import process_results
from training.config import Config
from training.data.manifest import check_one_tokenizer, manifest_of
from training.data.token_bytes import token_byte_lengths
from training.data.token_set import TokenSet
from training.data.validation_data import ValidationData
from training.errors import InputError

PREFIX = "local_"
PROCESSING = "local_text.py"
DOCUMENTS = 32
"""Number of documents per task. The standard error over 32 documents is accurate to one eighth.
More documents would make bits per byte less exact, because the first token of each document is
scored differently."""

MAX_DIFFERENT = 16
"""Maximum number of tokens that may change when a text is decoded and encoded again. Words cut off
at either end of the text may be encoded differently."""


def write_tasks(
    folder: Path, config: Config, tokenizer_file: Path, saved: Mapping[str, Any]
) -> list[str]:
    """Write a task for each validation set in a run's config to `folder` and return the task names.

    `saved` is the `data` entry of a checkpoint's identity. Raises InputError if there is no
    validation set, or if a set has a different tokenizer or has changed since the checkpoint.
    """
    if not config.data.validation:
        raise InputError("data.validation must contain a set to evaluate on, got none")
    check_one_tokenizer((name, each.path) for name, each in config.data.validation.items())
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    for name, each in config.data.validation.items():
        manifest = manifest_of(each.path)
        file = tokenizer_file if manifest is None else manifest.tokenizer_path
        if file.is_file() and Tokenizer.from_file(str(file)).get_vocab() != tokenizer.get_vocab():
            raise InputError(
                f"validation set {name} must be tokenized with {tokenizer_file}, got {file}"
            )
    lengths = token_byte_lengths(tokenizer_file)
    shutil.copyfile(process_results.__file__, folder / PROCESSING)
    tasks = []
    for name, each in config.data.validation.items():
        data = ValidationData(
            TokenSet(name, each.path, config.train.sequence_length),
            samples=config.validation.samples,
            token_bytes=lengths,
            tokenizer=tokenizer_file,
        )
        before, now = saved.get(f"validation.{name}.content"), data.set.digest
        if before not in (None, now):
            raise InputError(
                f"validation set {name} ({each.path}) has changed since the checkpoint: its hash "
                f"must be {before:.12}, got {now:.12}"
            )
        if data.target_bytes is None:
            raise InputError(f"validation set {name}: its text size in bytes is unknown")
        tokens = data.set.read(1, data.target_tokens).astype(np.int64)
        documents = []
        masked = config.data.document_mask
        borders = data.set.starts(2, data.target_tokens + 1) - 1 if masked else None
        for part in parts(tokens, config.train.sequence_length, borders):
            mean = len(part) * data.target_bytes / data.target_tokens
            size = mean if lengths is None else float(lengths[part].sum())
            documents.append({"text": text_of(part, tokenizer, name), "bytes": size})
        _write_task(folder, PREFIX + name, documents)
        tasks.append(PREFIX + name)
    return tasks


def parts(
    tokens: NDArray[np.int64], window: int, starts: NDArray[np.int64] | None = None
) -> list[NDArray[np.int64]]:
    """Split a set's tokens into the documents of a task.

    Documents begin at the positions `starts`. By default, consecutive windows are grouped into
    documents of nearly equal length.
    """
    if starts is not None:
        return np.split(tokens, starts)
    windows = np.arange(0, len(tokens), window)
    groups = np.array_split(windows, min(DOCUMENTS, len(windows)))
    return np.split(tokens, [int(group[0]) for group in groups[1:]])


def _write_task(folder: Path, name: str, documents: Sequence[dict[str, Any]]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in documents), encoding="utf-8")
    content = (
        Path(__file__)
        .with_name("local_text_task.yaml")
        .read_text(encoding="utf-8")
        .format(name=name, file=file.resolve())
    )
    (folder / f"{name}.yaml").write_text(content, encoding="utf-8")


def text_of(tokens: NDArray[np.int64], tokenizer: Tokenizer, name: str) -> str:
    """Decode tokens to text.

    Raises InputError if the text does not encode to the same tokens, because lm-eval would then
    split it at different positions.
    """
    text: str = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    again = tokenizer.encode(text, add_special_tokens=False).ids
    same = min(len(again), len(tokens))
    different = len(tokens) - int((np.array(again[:same]) == tokens[:same]).sum())
    if different > MAX_DIFFERENT:
        raise InputError(
            f"validation set {name} must be encoded with the model's tokenizer, but {different} of "
            f"{len(tokens)} tokens differ after decoding and re-encoding"
        )
    return text
