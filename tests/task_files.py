"""Multiple-choice task files."""

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["a", "matrix", "has", "rows", "columns", "of", "number", "one", "é", "9", "16", "naïve"]


def write_tasks(folder: Path, *, examples: int = 12, window: int = 32) -> dict[str, str]:
    """Write two tasks and return their files by name.

    `words` has two to five choices with several words; contexts may end in spaces, be empty, or be
    longer than `window` tokens. `digits` has single-character choices.
    """
    draw = random.Random(5)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    words: list[dict[str, Any]] = []
    for number in range(examples):
        choices = [text(1, 6) for _ in range(draw.randint(2, 5))]
        long = 2 * window if number % 5 == 0 else 1
        context = text(long, 2 * long + 6) + ("", "", "  ", "\n")[number % 4]
        context = "" if number % 6 == 1 else context
        answer = draw.randrange(len(choices))
        words.append({"context": context, "choices": choices, "answer": answer})
    digits = [
        {"context": f"{text(2, 9)}:", "choices": list("0123"), "answer": draw.randrange(4)}
        for _ in range(examples)
    ]
    files = {}
    for name, rows in (("words", words), ("digits", digits)):
        files[name] = str(folder / f"{name}.jsonl")
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        Path(files[name]).write_text("".join(lines), encoding="utf-8")
    return files


def task_keys(files: dict[str, str], **keys: Any) -> dict[str, Any]:
    """Return overrides that make a tiny config score `files`. `keys` are further overrides."""
    return {f"tasks__files__{name}": path for name, path in files.items()} | keys
