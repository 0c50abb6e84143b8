"""Metrics of a run: a JSON line and a console line per logged step.

Names are `train/loss`, `val/<set>/loss`, `val/<set>/ppl`, `val/<set>/bpb`, `val/loss`, `val/bpb`,
`lr/<group>`, `optim/grad_norm` (before clipping), `optim/clip_coef`, `optim/skipped_steps`,
`perf/tokens_per_sec`, `perf/tokens_per_sec_per_gpu`, `perf/step_time_s`, `perf/tflops_per_gpu`,
`perf/mfu` (percent), `moe/max_vio`, `moe/max_vio/<layer>`, `moe/<balancing loss>`,
`progress/tokens`, `progress/pct`, `progress/eta_s`, `sample/<set>/prompt`, `sample/<set>/text`.
"""

import math
import os
from collections.abc import Mapping
from errno import ENOENT
from pathlib import Path
from typing import Any

from training.report.log_lines import LogFile, read_lines


class MetricsWriter(LogFile):
    """Writer of `metrics.jsonl` or `monitors.jsonl` in the run folder, on rank 0."""

    def __init__(self, run_dir: str | Path, name: str = "metrics.jsonl") -> None:
        super().__init__(Path(run_dir) / name)
        self.flush()  # creates the file

    def log(self, metrics: Mapping[str, Any], *, step: int) -> None:
        """Write one line `{"step": step, ...}`, with null for NaN and infinities."""
        self.append({"step": step} | {name: _json_value(value) for name, value in metrics.items()})


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return the readable lines of metrics.jsonl in a run folder, in order.

    Raises FileNotFoundError if the file does not exist.
    """
    path = Path(run_dir) / "metrics.jsonl"
    if not path.exists():
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path))
    return read_lines(path).lines


def performance(
    *, tokens: float, seconds: float, devices: int, flops_per_token: float, peak: float | None
) -> dict[str, float]:
    """Return the `perf/` metrics of one step, or means over several steps.

    tokens           tokens per step over all devices
    seconds          seconds per step
    flops_per_token  FLOPs of the forward and backward passes, without recomputation
    peak             peak FLOP/s of one device; None omits `perf/mfu`
    """
    rate = tokens / seconds
    achieved = rate * flops_per_token / devices
    metrics = {
        "perf/tokens_per_sec": rate,
        "perf/tokens_per_sec_per_gpu": rate / devices,
        "perf/step_time_s": seconds,
        "perf/tflops_per_gpu": achieved / 1e12,
    }
    return metrics if peak is None else metrics | {"perf/mfu": 100 * achieved / peak}


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
