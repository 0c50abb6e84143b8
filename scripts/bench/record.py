"""The JSON file of a benchmark: its figures with command, date, device and versions."""

import json
import shlex
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
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
