"""lm-eval tasks over a run's own validation sets, which need no network.

The training loop evaluates windows of the token stream. A task holds the text of the same windows
as one document, from the stream's second token on: lm-eval then splits it where the loop does, and
bits per byte agree except for the first window's first token.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.config import Config
from training.data.order import ValidationData
from training.data.token_bytes import token_byte_lengths
from training.errors import InputError

PREFIX = "local_"
PROCESSING = "local_text.py"
MAX_DIFFERENT = 16
"""Tokens that may differ at the two ends, where a word is cut."""

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
process_results: !function local_text.process_results
metric_list:
  - {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
  - {{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
metadata: {{version: 1.0}}
"""
PROCESS = '''"""Bytes are those of the text alone, without the tokens that end documents."""


def process_results(doc, results):
    """Sums of log-likelihoods and bytes of text."""
    (likelihood,) = results
    return {
        "bits_per_byte": (likelihood, doc["bytes"]),
        "byte_perplexity": (likelihood, doc["bytes"]),
    }
'''


@dataclass(frozen=True)
class LocalTask:
    """A written task: its name in lm-eval and its set."""

    name: str
    set_name: str
    tokens: int
    bytes: float


def write_tasks(folder: Path, config: Config, tokenizer_file: Path) -> list[LocalTask]:
    """Write a task per validation set of a run's config to `folder`.

    Raises InputError if there is no set, or its tokens are not those of the tokenizer.
    """
    if not config.data.validation:
        raise InputError("the run has no validation sets to evaluate on")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    lengths = token_byte_lengths(tokenizer_file)
    (folder / PROCESSING).write_text(PROCESS)
    tasks = []
    for name, each in config.data.validation.items():
        data = ValidationData(
            name,
            each.path,
            sequence_length=config.train.sequence_length,
            samples=config.validation.samples,
            token_bytes=lengths,
        )
        if data.target_bytes is None:
            raise InputError(f"validation set {name}: the number of bytes of its text is unknown")
        tokens = data.set.read(1, data.target_tokens).astype(np.int64)
        task = LocalTask(PREFIX + name, name, data.target_tokens, data.target_bytes)
        _write_task(folder, task, text_of(tokens, tokenizer, name))
        tasks.append(task)
    return tasks


def _write_task(folder: Path, task: LocalTask, text: str) -> None:
    file = folder / f"{task.name}.jsonl"
    file.write_text(json.dumps({"text": text, "bytes": task.bytes}) + "\n", encoding="utf-8")
    content = TASK.format(name=task.name, file=file.resolve())
    (folder / f"{task.name}.yaml").write_text(content, encoding="utf-8")


def text_of(tokens: NDArray[np.int64], tokenizer: Tokenizer, name: str) -> str:
    """The text whose tokens are `tokens`.

    Raises InputError if the text has other tokens, as lm-eval would then split it elsewhere.
    """
    text: str = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    again = tokenizer.encode(text, add_special_tokens=False).ids
    same = min(len(again), len(tokens))
    different = len(tokens) - int((np.array(again[:same]) == tokens[:same]).sum())
    if different > MAX_DIFFERENT:
        raise InputError(
            f"validation set {name}: its text encodes to other tokens in {different} of "
            f"{len(tokens)} places; was it made with this tokenizer?"
        )
    return text
