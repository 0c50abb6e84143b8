"""The JSON file of a benchmark: its figures with command, date, device and versions."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from spectral.kernels import device_name
from training.machine.facts import versions


def record(
    script: str,
    arguments: Sequence[str] | None,
    device: torch.device,
    figures: Mapping[str, Any],
) -> dict[str, Any]:
    """Add to `figures` what is needed to repeat them.

    `script` is a path in the repository and `arguments` what its `main` got; None is the command
    line.
    """
    words = sys.argv[1:] if arguments is None else arguments
    return {
        "command": shlex.join(["python", script, *words]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": versions(),
        **figures,
    }


def write_json(path: Path | None, content: object) -> None:
    """Write `content` to a file, if there is to be one."""
    if path is not None:
        write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file of which others see the old or the new text, and no part of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
