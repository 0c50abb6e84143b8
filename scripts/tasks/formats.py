"""Formats of multiple-choice data sets: how a row becomes an example, as lm-eval's tasks say it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

LETTERS: Final = "ABCDE"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Format:
    """The data sets of one format.

    example   function from a row to the values of an `Example`, in order
    sources   where rows are on the hub, with a split that has answers
    """

    example: Callable[[Row], tuple[str, list[str], int]]
    sources: tuple[str, ...] = ()


def _plain(row: Row) -> tuple[str, list[str], int]:
    return row["context"], row["choices"], row["answer"]


def _arc(row: Row) -> tuple[str, list[str], int]:
    return f"Question: {row['question']}\nAnswer:", *_labelled(row)


def _openbookqa(row: Row) -> tuple[str, list[str], int]:
    return row["question_stem"], *_labelled(row)


def _labelled(row: Row) -> tuple[list[str], int]:
    choices = row["choices"]
    return choices["text"], choices["label"].index(row["answerKey"].lstrip())


def _commonsense_qa(row: Row) -> tuple[str, list[str], int]:
    listed = zip(LETTERS, row["choices"]["text"], strict=True)
    lines = [f"{letter}. {text}" for letter, text in listed]
    question = "\n".join([f"Question: {row['question'].strip()}", *lines, "Answer:"])
    return question, list(LETTERS), LETTERS.index(row["answerKey"])


def _piqa(row: Row) -> tuple[str, list[str], int]:
    return f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]], row["label"]


def _boolq(row: Row) -> tuple[str, list[str], int]:
    question = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return question, ["no", "yes"], row["label"]


def _sciq(row: Row) -> tuple[str, list[str], int]:
    wrong = [row[f"distractor{number}"] for number in (1, 2, 3)]
    question = f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:"
    return question, [*wrong, row["correct_answer"]], 3


def _hellaswag(row: Row) -> tuple[str, list[str], int]:
    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    return _cleaned(context), [_cleaned(text) for text in row["endings"]], int(row["label"])


def _cleaned(text: str) -> str:
    """Text of WikiHow without what stands in brackets."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


FORMATS: Final[Mapping[str, Format]] = {
    "plain": Format(_plain),
    "arc": Format(
        _arc, ("hf:allenai/ai2_arc:ARC-Easy:test", "hf:allenai/ai2_arc:ARC-Challenge:test")
    ),
    "boolq": Format(_boolq, ("hf:aps/super_glue:boolq:validation",)),
    "commonsense_qa": Format(_commonsense_qa, ("hf:tau/commonsense_qa::validation",)),
    "hellaswag": Format(_hellaswag, ("hf:Rowan/hellaswag::validation",)),
    "openbookqa": Format(_openbookqa, ("hf:allenai/openbookqa:main:test",)),
    "piqa": Format(_piqa, ("hf:baber/piqa::validation",)),
    "sciq": Format(_sciq, ("hf:allenai/sciq::test",)),
}
"""By name; plain rows are examples already."""
