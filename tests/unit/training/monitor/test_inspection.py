"""A budget of memory spreads the inspection of matrices over rounds, and changes no figure."""

import pytest

from tests.live_bytes import peak_bytes
from tests.run_configs import tiny_config
from training.build import build_data, build_trainer
from training.monitor.figures import is_figure

# Short sequences, so that inspection needs more memory than forward and backward.
SMALL = {"train__sequence_length": 16, "train__micro_batch": 1, "train__global_batch": 4}
# Else the buffers of an optimizer's step are larger than what so small a model is monitored with.
FEW_BUFFERS = {"optimizer__distributed__step_groups": 4}
SINGLE = {"monitors__inspection_gib": 1e-9}


def test_a_budget_spreads_inspection_over_rounds(folder, world):
    """Every matrix has the figures that it has if all are inspected together, in less memory."""
    found, peaks = [], []
    for keys in ({}, {"monitors__inspection_gib": 3e-4}, SINGLE):
        config = tiny_config(folder, "muon", monitors__interval=2, **SMALL, **FEW_BUFFERS, **keys)
        trainer = build_trainer(config, world, *build_data(config))
        lines: list[dict] = []
        trainer.record = lambda line, step, lines=lines: lines.append(line["units"])
        peaks.append(peak_bytes(lambda trainer=trainer: [trainer.advance() for _ in range(2)]))
        found.append(lines[0])
    assert peaks[0] > peaks[2]
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, record in other.items():
            for figure, value in found[0][name].items():
                if is_figure(figure, value):  # float64 sums in another order
                    close = pytest.approx(value, rel=1e-9, abs=1e-12)
                    assert record[figure] == close, (name, figure)
