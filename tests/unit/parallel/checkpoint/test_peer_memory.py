"""Files of checkpoints in memory: whose they are, and which stay."""

import pytest
import torch

from parallel.checkpoint.peer_memory import MemoryFullError, PeerMemory
from parallel.comm.groups import Groups


@pytest.fixture
def memory(world: Groups, tmp_path) -> PeerMemory:
    return PeerMemory(tmp_path / "memory", 1, world.host)


def part(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((3,), value)}


def test_only_the_newest_step_stays(memory):
    assert memory.newest() is None
    for step in (2, 4):
        memory.keep(step, part(step))
    assert memory.newest() == 4 and len(list(memory.folder.iterdir())) == 1
    assert torch.load(memory.fetch(4))["x"].tolist() == [4, 4, 4]
    memory.clear()
    assert memory.newest() is None and not memory.folder.exists()


def test_what_an_attempt_left_unfinished_does_not_meet_the_next(memory):
    memory.keep(4, part(4))
    left = memory.folder / "step_00000006"
    left.mkdir()
    (left / "rank_7").write_bytes(b"of a larger world")
    (left / "rank_0.new").write_bytes(b"half")
    assert memory.newest() == 4
    memory.fetch(4)
    assert not left.exists()


def test_no_other_user_reads_it(memory):
    memory.keep(1, part(1))
    assert memory.folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", ["link", "open"])
def test_what_another_user_could_have_made_is_not_used(memory, tmp_path, kind):
    memory.keep(1, part(1))
    if kind == "link":
        memory.folder.rename(tmp_path / "elsewhere")
        memory.folder.symlink_to(tmp_path / "elsewhere")
    else:
        memory.folder.chmod(0o777)
    assert memory.newest() is None
    with pytest.raises(MemoryFullError, match="rank 0: is not a folder of this user alone"):
        memory.keep(2, part(2))


def test_no_room_is_an_error_and_leaves_the_step_before(memory):
    memory.keep(1, part(1))
    (memory.folder / "step_00000002").write_text("in the way")
    with pytest.raises(MemoryFullError, match="step_00000002"):
        memory.keep(2, part(2))
    assert memory.newest() == 1
