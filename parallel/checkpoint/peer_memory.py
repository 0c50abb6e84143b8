"""Each rank's part of a checkpoint in the memory of its node and of the next one.

A file of a memory file system outlives the process that wrote it, so a job that starts its ranks
again finds there what they had, and what lay on a node that was lost is on the next one too:

    FOLDER/step_00000100/rank_3     on the node of rank 3, and on that of its partner

Ranks may be on other nodes than before, but only the layout that wrote a part can use it.
"""

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.comm.collectives import from_all, named
from parallel.errors import described

PIECE: Final = 1 << 30
"""Bytes that are sent at once."""

Parts = dict[int, dict[int, int]]
"""Bytes of each part on a node, by step and rank."""


class MemoryFullError(RuntimeError):
    """Parts that could not be kept on every node. Those of earlier steps are unchanged."""


class PeerMemory:
    """The parts of one run that lie on this node. All ranks call its methods together."""

    def __init__(self, folder: str | Path, local_size: int, group: dist.ProcessGroup) -> None:
        """Nothing is read or written yet.

        Args:
            folder: lies in memory, and is the same for all ranks of a node.
            local_size: number of ranks on each node.
            group: all ranks, for tensors of the host.
        """
        self.folder = Path(folder)
        self.group = group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shift = local_size % self.size  # 0 on one node

    def keep(self, step: int, part: Mapping[str, Any]) -> None:
        """Keep this rank's part of `step`, on two nodes if there are two, and drop earlier steps.

        `part` has plain values and tensors of the host. Raises MemoryFullError on every rank if any
        could not keep what it should.
        """
        mine = self._path(step, self.rank)
        self._on_all(step, lambda: self._write(mine, part))
        if self.shift:
            before, after = ((self.rank + way) % self.size for way in (-self.shift, self.shift))
            sizes = from_all(mine.stat().st_size)
            theirs = self._path(step, before)
            self._on_all(step, lambda: self._reserve(unfinished(theirs), sizes[before]))
            self._exchange([(after, mine)], [(before, unfinished(theirs))])
            unfinished(theirs).rename(theirs)
            from_all(None)  # before any node drops what another may still need
        self._drop_others(step)

    def newest(self) -> int | None:
        """Return the last step of which the part of every rank lies on some node."""
        nodes = from_all(self._here())
        whole = [
            step
            for step in {step for parts in nodes for step in parts}
            if {rank for parts in nodes for rank in parts.get(step, ())} == set(range(self.size))
        ]
        return max(whole, default=None)

    def fetch(self, step: int) -> Path:
        """Return where this rank's part of `step` lies, which `newest` has returned.

        It comes from another node if it is not on this one. Other steps are dropped: parts of one
        that is not whole must never meet those of a later attempt. Raises MemoryFullError on every
        rank if it does not fit on the node of any.
        """
        mine = self._path(step, self.rank)
        nodes = [parts.get(step, {}) for parts in from_all(self._here())]
        moved = {
            rank: next(holder for holder, there in enumerate(nodes) if rank in there)
            for rank, parts in enumerate(nodes)
            if rank not in parts
        }
        holder = moved.get(self.rank)
        size = nodes[holder][self.rank] if holder is not None else 0
        self._on_all(step, lambda: self._reserve(unfinished(mine), size) if size else None)
        self._drop_others(step)
        self._exchange(
            [(rank, self._path(step, rank)) for rank, each in moved.items() if each == self.rank],
            [(holder, unfinished(mine))] if holder is not None else [],
        )
        if holder is not None:
            unfinished(mine).rename(mine)
        return mine

    def clear(self) -> None:
        """Drop everything, on all nodes."""
        from_all(None)  # nobody reads any more
        shutil.rmtree(self.folder, ignore_errors=True)

    def _here(self) -> Parts:
        """What lies on this node."""
        found: Parts = {}
        if not is_private(self.folder):
            return found
        for path in self.folder.glob("step_*/rank_*"):
            if re.fullmatch(r"step_\d+/rank_\d+", f"{path.parent.name}/{path.name}"):
                step, rank = int(path.parent.name[5:]), int(path.name[5:])
                found.setdefault(step, {})[rank] = path.stat().st_size
        return found

    def _write(self, path: Path, part: Mapping[str, Any]) -> None:
        """Write a part, under its name only once it is whole."""
        self._make_folder_of(path)
        torch.save(part, unfinished(path))
        unfinished(path).rename(path)

    def _reserve(self, path: Path, size: int) -> None:
        """Make a file with `size` bytes of memory, without which a write to it would end the
        process. Raises OSError if there are not as many."""
        self._make_folder_of(path)
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def _make_folder_of(self, path: Path) -> None:
        make_private(self.folder)
        path.parent.mkdir(exist_ok=True)

    def _drop_others(self, step: int) -> None:
        """Drop all steps but one on this node."""
        for folder in self.folder.glob("step_*"):
            if folder != self._folder(step):
                shutil.rmtree(folder, ignore_errors=True)

    def _folder(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _path(self, step: int, rank: int) -> Path:
        return self._folder(step) / f"rank_{rank}"

    def _on_all(self, step: int, write: Callable[[], None]) -> None:
        """Write something; if any rank cannot, drop `step` on all and raise MemoryFullError."""
        problem = ""
        try:
            write()
        except OSError as error:
            problem = described(error)
        except RuntimeError as error:  # what torch.save makes of it
            problem = str(error).splitlines()[0]
        problems = [f"rank {rank}: {text}" for rank, text in enumerate(from_all(problem)) if text]
        if problems:
            shutil.rmtree(self._folder(step), ignore_errors=True)
            raise MemoryFullError("; ".join(problems))

    def _exchange(
        self, sends: Iterable[tuple[int, Path]], receives: Iterable[tuple[int, Path]]
    ) -> None:
        """Send files to ranks, and fill files with what comes from ranks."""
        with named("exchange of checkpoints in memory"):
            under_way = [
                *(dist.isend(p, rank, self.group) for rank, path in sends for p in pieces(path)),
                *(dist.irecv(p, rank, self.group) for rank, path in receives for p in pieces(path)),
            ]
            for work in under_way:
                assert work is not None
                work.wait()


def make_private(folder: Path) -> None:
    """Make a folder, if it is not there, that no other user can read or has made.

    Raises OSError if another user has made it, or if it is a link.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not is_private(folder):
        raise PermissionError(errno.EPERM, "is not a folder of this user alone", str(folder))


def is_private(folder: Path) -> bool:
    """Return whether a folder is there, is no link, and is this user's alone."""
    try:
        found = folder.lstat()
    except FileNotFoundError:
        return False
    mine = found.st_uid == os.getuid() and not found.st_mode & 0o077
    return stat.S_ISDIR(found.st_mode) and mine


def unfinished(path: Path) -> Path:
    """Return where a part lies until it is whole."""
    return path.with_name(f"{path.name}.new")


def pieces(path: Path) -> Sequence[Tensor]:
    """Return a file as tensors that are its memory."""
    whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
    return whole.split(PIECE)
