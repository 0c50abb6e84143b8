"""The choice of a rank's device, and errors about devices on which kernels do not start."""

from dataclasses import replace

import pytest
import torch

from spectral.kernels import dispatch
from training.machine.backends import check_kernels
from training.machine.device import DeviceError, Gpus, choose, driver, gpus_here

NONE = Gpus(built="13.0", devices=(), problem=None, usable=0)
EIGHT = replace(NONE, devices=tuple(f"/dev/nvidia{i}" for i in range(8)), usable=8)
OLD_DRIVER = Gpus(
    built="13.0",
    devices=("/dev/nvidia0",),
    problem="The NVIDIA driver on your system is too old (found version 12040).",
    usable=0,
)
CONTAINER = replace(NONE, devices=("0000:01:00.0",))
CPU_BUILD = Gpus(built=None, devices=("/dev/nvidia0",), problem=None, usable=0)


@pytest.mark.parametrize(
    ("wanted", "gpus", "rank", "expected"),
    [
        ("auto", EIGHT, 7, "cuda"),
        ("cuda", EIGHT, 0, "cuda"),
        ("auto", NONE, 3, "cpu"),
        ("auto", CPU_BUILD, 3, "cpu"),
    ],
)
def test_a_rank_gets_what_there_is(wanted, gpus, rank, expected):
    assert choose(wanted, gpus, rank) == expected


@pytest.mark.parametrize(
    ("wanted", "gpus", "rank", "words"),
    [
        ("auto", OLD_DRIVER, 0, ["/dev/nvidia0", "CUDA 13.0", "driver on your system is too old"]),
        ("auto", CONTAINER, 0, ["0000:01:00.0", "detects no device"]),
        ("cuda", NONE, 0, ["run.device is cuda", "no NVIDIA device"]),
        ("cuda", CPU_BUILD, 0, ["built without CUDA", "run.device=cpu"]),
        ("auto", EIGHT, 8, ["rank 8", "usable GPUs on this machine is 8"]),
    ],
)
def test_a_gpu_that_is_there_but_cannot_be_used_stops_the_run(wanted, gpus, rank, words):
    with pytest.raises(DeviceError) as caught:
        choose(wanted, gpus, rank)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("with_nodes", [True, False])
def test_gpus_that_cannot_be_used_are_found(with_nodes, tmp_path, monkeypatch):
    """Otherwise, run.device=auto would silently train on the CPU."""
    nodes, bus = tmp_path / "dev", tmp_path / "sys" / "bus" / "pci" / "devices"
    nodes.mkdir()
    for name in ("nvidia1", "nvidia0", "nvidiactl") if with_nodes else ():
        (nodes / name).touch()
    facts = {"02": ("0x10de", "0x030200"), "03": ("0x10de", "0x040300"), "04": ("0x8086", "0x0300")}
    for name, content in facts.items():
        (bus / name).mkdir(parents=True)
        for file, text in zip(("vendor", "class"), content, strict=True):
            (bus / name / file).write_text(f"{text}\n")
    (bus / "05").mkdir()
    monkeypatch.setattr("training.machine.device.Path", lambda path: tmp_path / path.lstrip("/"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def refuse() -> None:
        raise RuntimeError("The driver\nis too old")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    there = (f"{nodes}/nvidia0", f"{nodes}/nvidia1") if with_nodes else ("02",)
    assert gpus_here() == Gpus("13.0", there, "The driver is too old", 0)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("", None),
        ("\nNVRM version: 550.54\n", None),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue\nGCC 12.3\n", "550.54.15"),
    ],
)
def test_the_drivers_version_is_read_from_its_first_line(text, version, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr("training.machine.device.DRIVER", tmp_path / "version")
    assert driver() == version


@pytest.fixture
def as_listed(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    """Use a kernel table that contains this device."""
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
    with pytest.raises(DeviceError, match="without a C compiler"):
        check_kernels(device)
