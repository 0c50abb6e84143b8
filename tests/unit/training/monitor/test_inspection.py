"""A budget of memory spreads the inspection of matrices over rounds, and changes no figure."""

import pytest

from parallel.comm.groups import chunk_specs
from parallel.optimizer.inspection import inspection_rounds
from parallel.storage.bucket_layout import BucketPlanner
from parallel.storage.stage_units import declare_stage_units
from tests.families import tiny_model
from tests.live_bytes import peak_bytes
from tests.run_configs import tiny_config
from tests.token_files import write_token_set
from training.build import build_data, build_trainer
from training.monitor.figures import is_figure

# Short sequences, so that inspection needs more memory than forward and backward.
SMALL = {"train__sequence_length": 16, "train__micro_batch": 1, "train__global_batch": 4}
# Else the buffers of an optimizer's step are larger than what so small a model is monitored with.
FEW_BUFFERS = {"optimizer__distributed__step_groups": 4}
SINGLE = {"monitors__inspection_gib": 1e-9}


@pytest.fixture
def folder(tmp_path):
    """A folder with a token set."""
    write_token_set(tmp_path / "tokens", tokens=8_000, vocab=120, seed=0)
    return str(tmp_path)


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


def test_rounds_hold_what_a_rank_has_room_for():
    model = tiny_model("llama", layers=3)
    units = declare_stage_units(model, chunk_specs(3, rank=0, size=1), tensor_size=2)
    layout = BucketPlanner(ranks=2, elementwise=lambda unit: False, tensor_size=2).layout(units[0])
    sizes = {unit.name: unit.numel for members in units for unit in members if unit.is_matrix}
    for elements in (1, 3000, 10**9):
        rounds = inspection_rounds(units, layout, 4, elements)
        assert sorted(name for each in rounds for name in each) == sorted(sizes)
        for each in rounds:
            for rank in range(4):
                mine = [sizes[name] for name, place in each.items() if place == rank]
                assert len(mine) <= 1 or sum(mine) <= elements
    assert len(inspection_rounds(units, layout, 4, 10**9)) == len(layout.buckets)
