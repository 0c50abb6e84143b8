"""What is said of a machine on which Triton's kernels cannot be compiled or do not start."""

from pathlib import Path

import pytest
import torch

from spectral.kernels import dispatch
from training.machine.device import DeviceError
from training.machine.kernels import check_kernels


@pytest.fixture
def as_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A table of kernels that has this device."""
    monkeypatch.setattr(dispatch, "TABLE", tmp_path / "table.json")
    dispatch.TABLE.write_text('{"devices": {"cpu": {"measured": null, "entries": []}}}')
    dispatch.forget()
    yield
    monkeypatch.undo()
    dispatch.forget()


def test_a_run_ends_before_its_data_is_read(as_listed, monkeypatch, tmp_path):
    device = torch.device("cpu")
    assert dispatch.device_name(device) == "cpu"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError, match="lacks a C compiler"):
        check_kernels(device)
