"""Every line of metrics.jsonl is JSON, and the console line contains the known values."""

import json
import math
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.lifecycle.pace import performance
from training.report.console import console_line
from training.report.log_lines import MetricsWriter


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


@given(st.lists(st.dictionaries(st.text().filter(lambda n: n != "step"), st.floats())))
def test_every_line_is_json_and_floats_come_back_exactly(tmp_path_factory, rows) -> None:
    rows = [*rows, {"units": {"q": {"quantiles": [1.0, math.nan, -math.inf]}}}]
    with closing(MetricsWriter(tmp_path_factory.mktemp("run"))) as writer:
        for step, row in enumerate(rows):
            writer.log(row, step=step)
    as_json = map(json.dumps, rows)  # with NaN and Infinity
    read = (json.loads(row, parse_constant=lambda _: None) for row in as_json)
    expected = [{"step": i} | row for i, row in enumerate(read)]
    # Split only at newlines: JSON escapes them, but not Unicode's other line separators.
    lines = writer.path.read_text(encoding="utf-8").split("\n")[:-1]
    assert [json.loads(line, parse_constant=refuse) for line in lines] == expected


def test_performance_of_a_known_case() -> None:
    """Test a 1B model (6 FLOPs per parameter and token) at 40% of the peak of 8 H100s."""
    figures = {"devices": 8, "flops_per_token": 6e9, "peak": 989e12}
    rate = 0.4 * 8 * 989e12 / 6e9
    metrics = performance(tokens=1000, seconds=1000 / rate, **figures)
    assert metrics == pytest.approx(
        {
            "perf/tokens_per_sec": rate,
            "perf/tokens_per_sec_per_gpu": rate / 8,
            "perf/step_time_s": 1000 / rate,
            "perf/tflops_per_gpu": 0.4 * 989,
            "perf/mfu": 40.0,
        }
    )
    assert "perf/mfu" not in performance(tokens=1, seconds=1.0, **figures | {"peak": None})


def test_the_console_states_every_figure_in_its_unit() -> None:
    figures = {
        "train/loss": 4.26062, "lr/matrix": 2e-3, "optim/grad_norm": 0.8612,
        "perf/tokens_per_sec": 12430.4, "perf/step_time_s": 0.3304, "perf/mfu": 41.26,
        "progress/eta_s": 3725.0, "optim/skipped_steps": 2,
    }  # fmt: skip
    assert console_line(figures, step=30, total_steps=300) == (
        "step  30/300 | loss 4.2606 | lr 2.00e-03 | grad 0.861 | 12,430 tok/s | 330 ms | "
        "mfu 41.3% | eta 1:02:05 | skipped 2"
    )
