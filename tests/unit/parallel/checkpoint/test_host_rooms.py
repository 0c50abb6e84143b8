"""Host memory for the copy of a state."""

import io

import pytest
import torch

from parallel.checkpoint import host_rooms as rooms_of
from parallel.checkpoint.host_rooms import host_rooms


def many(count):
    """Small tensors of mixed types and sizes, one of them empty."""
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    return {f"t{i}": torch.randn(i % 7, 3).to(dtypes[i % len(dtypes)]) for i in range(count)} | {
        "counter": torch.tensor([3.0])
    }


def test_a_room_holds_what_its_tensor_holds():
    tensors = many(50)
    rooms = host_rooms(tensors, pinned=False)
    for name, tensor in tensors.items():
        rooms[name].copy_(tensor)
    for name, tensor in tensors.items():
        assert rooms[name].dtype == tensor.dtype
        assert torch.equal(rooms[name], tensor), "rooms do not overlap"


def test_thousands_of_tensors_lie_in_a_few_pieces(monkeypatch):
    """Each piece is pinned at once: what a first save waits for is their number."""
    made = []
    real = torch.empty

    def empty(*arguments, **options):
        made.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(rooms_of.torch, "empty", empty)
    host_rooms(many(3000), pinned=False)
    assert len(made) == 1
    monkeypatch.setattr(rooms_of, "SLAB", 4096)
    made.clear()
    host_rooms({**many(300), "large": torch.zeros(5000)}, pinned=False)
    total = sum(-(-x.nbytes // 64) * 64 for x in many(300).values())
    assert total // 4096 < len(made) <= 2 * total // 4096 + 2


@pytest.mark.parametrize("name", ["t3", "t10", "counter"])
def test_a_file_of_a_room_is_as_small_as_its_tensor(name):
    tensors = many(2000)
    rooms = host_rooms(tensors, pinned=False)
    sizes = []
    for tensor in (rooms[name].copy_(tensors[name]), tensors[name].clone()):
        file = io.BytesIO()
        torch.save(tensor, file)
        sizes.append(len(file.getvalue()))
    assert sizes[0] <= sizes[1] + 64
