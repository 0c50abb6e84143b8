"""Multiple-choice tasks: task files, and the token sequences to score.

Each line of a file is an example: a context, candidate continuations (choices), and the index of
the correct choice. Contexts and choices are tokenized as in lm-eval to make scores comparable.
Context and choice are joined by a space, and trailing spaces of the context are moved to the
choice. If the context alone has n tokens, the choice is everything after the first n tokens of the
full text.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from training.data.hashes import file_sha256
from training.errors import DataError
from training.json_file import check_regular, parse_json

KEYS: Final = ("context", "choices", "answer")
DELIMITER: Final = " "
"""Separator between context and choice."""
MOCK_EXAMPLES: Final = 8
MOCK_CHOICES: Final = 4
"""Number of choices per example in a random task."""


@dataclass(frozen=True)
class Example:
    """A context, two or more choices, and the index of the correct choice."""

    context: str
    choices: list[str]
    answer: int

    def line(self) -> str:
        """Format the example as a line of a task file."""
        return json.dumps(vars(self), ensure_ascii=False) + "\n"


@dataclass(frozen=True)
class Request:
    """Tokens of a context, followed by the `scored` tokens of a choice."""

    tokens: list[int]
    scored: int


@dataclass(frozen=True)
class Task:
    """Tokenized examples from a task file.

    requests   one request per choice, example by example
    answers    index of the correct choice for each example
    sizes      number of characters in each choice, per example
    cut        number of examples with a request truncated from the left to fit the window
    sha256     hash of the file, or None for a random task
    spaced     number of examples with white space at the end of the context, or at the start or end
               of a choice
    """

    name: str
    requests: list[Request]
    answers: list[int]
    sizes: list[list[int]]
    cut: int
    sha256: str | None
    spaced: int = 0

    def __str__(self) -> str:
        """Return the task description that is printed at the start of a run."""
        made = "" if self.sha256 is not None else ", of random tokens, because data.mock is true"
        cut = f"; {self.cut:,} examples exceed the sequence length and are truncated from the left"
        requests = iter(self.requests)
        choices = [[tuple(next(requests).tokens) for _ in sizes] for sizes in self.sizes]
        repeated = sum(len({*tokens}) < len(tokens) for tokens in choices)
        equal = f"; {repeated:,} examples have identical choices (ties go to the first choice)"
        extra = (
            f"; {self.spaced:,} examples have extra white space around a choice (context and "
            "choice are already joined by a space)"
        )
        chance = sum(1 / len(sizes) for sizes in self.sizes) / len(self.sizes)
        tokens = sum(len(request.tokens) for request in self.requests)
        return (
            f"task {self.name}: {len(self.answers):,} examples, {len(self.requests):,} choices, "
            f"{tokens:,} tokens, chance accuracy {chance:.3f}{made}{cut if self.cut else ''}"
            f"{equal if repeated else ''}{extra if self.spaced else ''}"
        )


def read_examples(path: Path, count: int | None = None) -> list[Example]:
    """Read the first `count` examples from a file, or all of them if `count` is None.

    Raises DataError if the file cannot be read or a line is not a valid example.
    """
    examples: list[Example] = []
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if count is not None and len(examples) == count:
                    break
                if line.strip():
                    examples.append(_example(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read task file {path}: {error}") from None
    if not examples:
        raise DataError(f"task file {path} must contain at least one example, got none")
    return examples


def _example(line: str, where: str) -> Example:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: invalid JSON: {error}") from None
    return example_of(row, where)


def example_of(row: Any, where: str) -> Example:
    """Convert `row` to an example. If the row is invalid, raise a DataError whose message starts
    with `where`."""
    if not isinstance(row, dict) or set(row) != set(KEYS):
        keys = sorted(row) if isinstance(row, dict) else row
        raise DataError(f"{where}: keys must be {', '.join(KEYS)}, got {keys!r:.80}")
    context, choices, answer = (row[key] for key in KEYS)
    if not isinstance(context, str) or (context and not context.strip()):
        raise DataError(f"{where}: context must be a non-blank string or '', got {context!r:.60}")
    texts = isinstance(choices, list) and all(isinstance(x, str) and x for x in choices)
    if not texts or len(choices) < 2:
        raise DataError(f"{where}: choices must be at least two strings, got {choices!r:.60}")
    if type(answer) is not int or not 0 <= answer < len(choices):
        problem = f"answer must be the index of one of {len(choices)} choices, got {answer!r:.60}"
        raise DataError(f"{where}: {problem}")
    for text in (context, *choices):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise DataError(f"{where}: text must be valid UTF-8, got {text!r:.60}")
    return Example(context, choices, answer)


def read_task(
    name: str,
    path: Path,
    tokenizer: Tokenizer,
    *,
    window: int,
    vocab_size: int,
    end_token: int | None,
    count: int | None = None,
) -> Task:
    """Read and tokenize the first `count` examples from a file, or all of them if `count` is None.

    Args:
        window: sequence length, i.e. the maximum number of input tokens.
        vocab_size: vocabulary size without padding.
        end_token: end-of-document token, used as the context of examples with an empty context.

    Raises DataError if the file is not a task file or a choice cannot be scored.
    """
    examples = read_examples(path, count)
    requests, cut = [], 0
    for number, example in enumerate(examples, start=1):
        where = f"task {name}, example {number}"
        whole = list(_requests(example, tokenizer, end_token, where))
        cut += any(len(each.tokens) > window + 1 for each in whole)
        for each in whole:
            if each.scored > window:
                raise DataError(
                    f"{where}: a choice must have at most train.sequence_length = {window} "
                    f"tokens, got {each.scored}"
                )
            if max(each.tokens) >= vocab_size:
                raise DataError(
                    f"{where}: token {max(each.tokens)} must be below model.vocab_size = "
                    f"{vocab_size}; data.tokenizer is probably not the model's tokenizer"
                )
            requests.append(Request(each.tokens[-(window + 1) :], each.scored))
    return Task(
        name,
        requests,
        [example.answer for example in examples],
        [[len(choice) for choice in example.choices] for example in examples],
        cut,
        file_sha256(path),
        spaced=sum(map(_spaced, examples)),
    )


def _spaced(example: Example) -> bool:
    """Return whether an example has white space next to a choice, besides the delimiter."""
    texts = [example.context.lstrip(), *example.choices]
    return any(text != text.strip() for text in texts)


def _requests(
    example: Example, tokenizer: Tokenizer, end_token: int | None, where: str
) -> Iterator[Request]:
    """Yield one untruncated request per choice. Context and choice are separated as in lm-eval's
    `loglikelihood`."""
    context = example.context.rstrip()
    spaces = example.context[len(context) :]
    texts = [spaces + DELIMITER + choice for choice in example.choices]
    encoded = tokenizer.encode_batch(
        [context, *(context + text for text in texts)], add_special_tokens=False
    )
    before, *wholes = (each.ids for each in encoded)
    if not example.context:
        if end_token is None:
            raise DataError(
                f"{where}: an empty context requires an end-of-document token, but the data has no "
                "manifest that defines this token"
            )
        # A choice that starts with the end token provides its own context.
        wholes = [ids if ids[:1] == [end_token] else [end_token, *ids] for ids in wholes]
        before = [end_token]
    for ids in wholes:
        if len(ids) <= len(before) or not before:
            raise DataError(f"{where}: context and choice must have at least one token each")
        yield Request(ids, len(ids) - len(before))


def made_task(name: str, *, window: int, vocab_size: int) -> Task:
    """Generate a task of random tokens, identical on all ranks, with sequences of up to `window` +
    1 tokens."""
    generator = np.random.default_rng(0)
    lengths = np.linspace(2, window + 1, MOCK_EXAMPLES * MOCK_CHOICES).astype(int)
    requests = [
        Request(generator.integers(vocab_size, size=length).tolist(), 1) for length in lengths
    ]
    answers = generator.integers(MOCK_CHOICES, size=MOCK_EXAMPLES).tolist()
    sizes = [[1] * MOCK_CHOICES] * MOCK_EXAMPLES
    return Task(name, requests, answers, sizes, cut=0, sha256=None)


def accuracies(task: Task, likelihoods: Sequence[float]) -> tuple[float, float]:
    """Compute lm-eval's `acc` and `acc_norm` for a task from the log-likelihood of each request.

    The prediction is the first choice with the highest log-likelihood. For `acc_norm`, each
    log-likelihood is divided by the number of characters in the choice. Both metrics are NaN if any
    log-likelihood is NaN (lm-eval would pick the first NaN).
    """
    if np.isnan(likelihoods).any():
        return math.nan, math.nan
    start, right, right_by_character = 0, 0, 0
    for answer, sizes in zip(task.answers, task.sizes, strict=True):
        scores = np.array(likelihoods[start : start + len(sizes)])
        right += int(scores.argmax()) == answer
        right_by_character += int((scores / np.array(sizes)).argmax()) == answer
        start += len(sizes)
    return right / len(task.answers), right_by_character / len(task.answers)
