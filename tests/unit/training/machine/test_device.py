"""Which device a rank trains on, whatever this machine has."""

from pathlib import Path

import pytest

from training.machine.device import DeviceError, Gpus, choose, gpus_here, nvidia_devices

NONE = Gpus(built="13.0", found=(), problem=None, usable=0)
EIGHT = Gpus(built="13.0", found=tuple(f"/dev/nvidia{i}" for i in range(8)), problem=None, usable=8)
OLD_DRIVER = Gpus(
    built="13.0",
    found=("/dev/nvidia0",),
    problem="The NVIDIA driver on your system is too old (found version 12040).",
    usable=0,
)
CONTAINER = Gpus(built="13.0", found=("0000:01:00.0",), problem=None, usable=0)
CPU_BUILD = Gpus(built=None, found=("/dev/nvidia0",), problem=None, usable=0)


@pytest.mark.parametrize(
    ("wanted", "gpus", "rank", "expected"),
    [
        ("auto", EIGHT, 7, "cuda"),
        ("cuda", EIGHT, 0, "cuda"),
        ("cpu", EIGHT, 9, "cpu"),
        ("auto", NONE, 3, "cpu"),
        ("auto", CPU_BUILD, 3, "cpu"),
        ("cpu", OLD_DRIVER, 0, "cpu"),
    ],
)
def test_a_rank_gets_what_there_is(wanted, gpus, rank, expected):
    assert choose(wanted, gpus, rank) == expected


@pytest.mark.parametrize(
    ("wanted", "gpus", "rank", "words"),
    [
        ("auto", OLD_DRIVER, 0, ["/dev/nvidia0", "CUDA 13.0", "driver on your system is too old"]),
        ("auto", CONTAINER, 0, ["0000:01:00.0", "finds none of them"]),
        ("cuda", NONE, 0, ["run.device is cuda", "no NVIDIA device"]),
        ("cuda", CPU_BUILD, 0, ["built without CUDA", "run.device=cpu"]),
        ("auto", EIGHT, 8, ["rank 8", "got 8"]),
    ],
)
def test_a_gpu_that_is_there_but_cannot_be_used_stops_the_run(wanted, gpus, rank, words):
    with pytest.raises(DeviceError) as caught:
        choose(wanted, gpus, rank)
    assert [word for word in words if word not in str(caught.value)] == []


def system(root: Path, *, nodes: int = 0, pci: dict[str, tuple[str, str]] | None = None) -> Path:
    """A file system that shows these devices."""
    (root / "dev").mkdir()
    for i in range(nodes):
        (root / "dev" / f"nvidia{i}").touch()
    (root / "dev" / "nvidiactl").touch()
    for name, (vendor, kind) in (pci or {}).items():
        folder = root / "sys" / "bus" / "pci" / "devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        (folder / "class").write_text(kind + "\n")
    return root


def test_devices_are_those_of_the_driver_or_of_the_bus(tmp_path):
    pci = {
        "0000:01:00.0": ("0x10de", "0x030200"),  # a GPU without a display
        "0000:01:00.1": ("0x10de", "0x040300"),  # its sound
        "0000:02:00.0": ("0x8086", "0x030000"),  # another maker's
    }
    for name in ("driver", "bus", "nothing"):
        (tmp_path / name).mkdir()
    driver = system(tmp_path / "driver", nodes=2, pci=pci)
    assert list(nvidia_devices(driver)) == ["/dev/nvidia0", "/dev/nvidia1"]
    assert list(nvidia_devices(system(tmp_path / "bus", pci=pci))) == ["0000:01:00.0"]
    assert list(nvidia_devices(system(tmp_path / "nothing"))) == []


def test_this_machine_is_looked_at():
    found = gpus_here()
    assert found.usable == 0 or found.built is not None
