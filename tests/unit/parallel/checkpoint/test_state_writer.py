"""The process that writes a rank's parts of the training state."""

import time
from pathlib import Path

import pytest
import torch

from parallel.checkpoint import state_writer
from parallel.checkpoint.state import StatePart, boxes
from parallel.checkpoint.state_writer import (
    STARTS,
    NotFiniteStateError,
    PendingSave,
    StatePlanner,
    WriterError,
)


@pytest.mark.parametrize("element", [7, 10, 16])
def test_an_element_that_is_not_finite_is_named_by_its_place_in_the_whole(element, world, tmp_path):
    """The end of a row, whole rows and the beginning of a row are separate parts."""
    whole = torch.zeros(5, 4)
    whole.view(-1)[element] = torch.nan
    parts = [
        StatePart(
            "weight/a",
            whole[rows.start : rows.stop, cols.start : cols.stop],
            (5, 4),
            (rows.start, cols.start),
        )
        for rows, cols in boxes(7, 17, (5, 4))
    ]
    planner = StatePlanner()
    plan = planner.stage({part.name: part for part in parts})
    assert len(plan.items) == 3
    save = PendingSave(tmp_path, planner, plan)
    assert save.poll(60.0) and isinstance(save.problem, NotFiniteStateError)
    assert str(save.problem) == f"weight/a{[*divmod(element, 4)]} is not finite"


@pytest.mark.parametrize("hanging", [1, STARTS])
def test_a_process_that_hangs_before_it_writes_is_replaced(
    hanging, world, tmp_path, monkeypatch, capsys
):
    def hang_at_first(*arguments: object) -> None:
        tries = len([*tmp_path.glob("try*")])
        Path(tmp_path, f"try{tries}").touch()
        time.sleep(600 if tries < hanging else 0)
        write(*arguments)

    write = state_writer._write_all
    monkeypatch.setattr(state_writer, "_write_all", hang_at_first)
    monkeypatch.setattr(state_writer, "START_SECONDS", 0.5)
    planner, folder = StatePlanner(), tmp_path / "state"
    part = StatePart("weight/a", torch.ones(4, 4), (4, 4), (0, 0))
    folder.mkdir()
    plan = planner.stage({part.name: part})
    save = PendingSave(folder, planner, plan)
    assert save.poll(60.0)
    if hanging == STARTS:
        assert isinstance(save.problem, WriterError) and save.written is None
        assert str(save.problem).endswith("failed: none of 3 processes started within 0.5 s")
    else:
        assert save.problem is None and save.written.files
    warning = "warning: the checkpoint writer of rank 0 did not start within 0.5 s\n"
    assert capsys.readouterr().out == warning * hanging
