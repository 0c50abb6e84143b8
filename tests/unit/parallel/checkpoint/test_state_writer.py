"""The process that writes a rank's parts of the state."""

import re

import pytest
import torch

from parallel.checkpoint.state import StatePart, boxes
from parallel.checkpoint.state_writer import NotFiniteStateError, PendingSave, StatePlanner


@pytest.mark.parametrize("element", [7, 10, 16])
def test_an_element_that_is_not_finite_is_named_by_its_place_in_the_whole(element, world, tmp_path):
    """Test the end of a row, whole rows, and the beginning of a row, which are separate parts."""
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
    place = re.escape(f"weight/a{[*divmod(element, 4)]} is not finite")
    with pytest.raises(NotFiniteStateError, match=place):
        PendingSave(tmp_path, planner, plan, {}).poll(60.0)
