"""Lines of a run's .jsonl files, which a crash or a full disk may have damaged."""

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from training.json_file import parse_json, read_regular


@dataclass(frozen=True)
class LogLines:
    """The readable lines of a .jsonl file.

    lines    what each holds, a mapping with an integer `step`
    raw      the same lines as they are in the file
    numbers  theirs in the file, from 1 on
    damaged  number of complete lines that hold anything else
    """

    lines: list[dict[str, Any]] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    damaged: int = 0


def read_lines(path: Path) -> LogLines:
    """Return the readable lines of a file, none if it does not exist.

    What follows the last newline is being written, or was when the run was killed, and is left out.
    """
    log, damaged = LogLines(), 0
    complete = read_regular(path).split(b"\n")[:-1] if path.exists() else ()
    for number, raw in enumerate(complete, start=1):
        line = _line(raw)
        if line is None:
            damaged += 1
        else:
            log.lines.append(line)
            log.raw.append(raw + b"\n")
            log.numbers.append(number)
    return replace(log, damaged=damaged)


def drop_later_lines(path: Path, step: int) -> int:
    """Remove the lines of steps after `step`, an unfinished last line and damaged lines.

    Returns the number of damaged lines.
    """
    if not path.exists():
        return 0
    log = read_lines(path)
    kept = [raw for line, raw in zip(log.lines, log.raw, strict=True) if line["step"] <= step]
    temporary = path.with_name(f".{path.name}")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)
    return log.damaged


def drop_unfinished_line(path: Path) -> None:
    """Cut what follows the last newline of a file, if it exists."""
    if not path.exists():
        return
    content = path.read_bytes()
    complete = content.rfind(b"\n") + 1
    if complete < len(content):
        os.truncate(path, complete)


def _line(raw: bytes) -> dict[str, Any] | None:
    """What a line holds, None if it is damaged."""
    try:
        content = parse_json(raw)
        json.dumps(content, allow_nan=False)  # NaN is no JSON, and no run writes it
    except ValueError:
        return None
    step = content.get("step") if isinstance(content, dict) else None
    return content if type(step) is int else None
