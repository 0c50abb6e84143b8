"""Asynchronous saving of the state of model and optimizer, while training continues.

`start_save` copies this rank's part to host memory and forks a process that writes the copy.
Training may then change the state. When all writers are done, all ranks call `PendingSave.gather`
together, and only rank 0 calls `finish`. Only one save runs at a time, so host memory contains one
copy of the part, and the next save reuses this memory.

torch's `async_save` with one process per rank (torch 2.13) is not used. If such a process is
killed, it is never restarted and breaks the processes' group, so all later saves of the run fail.
For two gloo ranks of 50 MB each, `async_save` returned after 0.04 s, completed the save after 4 s,
and needed 150 MB more per process for separate interpreters. `start_save` returns after 0.07 s and
completes the save after 0.4 s.
"""

import contextlib
import hashlib
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from models.engine import no_collection
from parallel.checkpoint.safe_index import PLAIN_FILE
from parallel.checkpoint.state import SCHEMA, StatePart, part_name, sharded_state
from parallel.comm.collectives import named, on_first
from parallel.error_text import described
from parallel.model import ParallelModel
from parallel.optimizer.distributed_optimizer import DistributedOptimizer


class StatePlanner(DefaultSavePlanner):
    """One plan and one set of host buffers for all saves of a run, which differ only in folder and
    values.

    All saves copy to the same host memory, so a save must be complete before the next is staged.
    Planning sends every rank's list of tensors to rank 0 and takes about 0.2 ms of processor time
    per tensor (longer on many ranks). Therefore only the first save is planned.
    """

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.index: Metadata | None = None
        """Index of all tensors, on rank 0, without their positions in files."""
        self._items: list[WriteItem] | None = None
        self._copies: dict[str, Tensor] = {}

    def stage(self, state: Mapping[str, StatePart]) -> SavePlan:
        """Copy the tensors that this rank must save to host memory. Return the rank's save plan.

        All ranks must call this method together, with the same tensors in `state` in every call.
        """
        if self._items is None:
            written = {name: part for name, part in state.items() if part.written}
            self._items = [_item(part) for part in written.values()]
            self._copies = {name: _host_buffer(part.value) for name, part in written.items()}
            plans = on_first(SavePlan(self._items))
            if plans:
                _, self.index = self.create_global_plan(plans)
        for name, copy in self._copies.items():
            value = state[name].value  # the copy may be running if the tensor is on a GPU
            copy.copy_(value.detach(), non_blocking=value.is_cuda)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the host copy of a plan item's tensor."""
        assert write_item.index.offset is not None
        return self._copies[part_name(write_item.index.fqn, write_item.index.offset)]


def _item(part: StatePart) -> WriteItem:
    return WriteItem(
        MetadataIndex(part.key, part.chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            part.chunk, TensorProperties(dtype=part.value.dtype), torch.Size(part.shape)
        ),
    )


def _host_buffer(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor like `tensor` in host memory, pinned for a GPU tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


class StateWriter(FileSystemWriter):
    """torch's writer with an index of plain values only, without the path that torch stores."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, per_thread_copy_ahead=0)  # all tensors are in host memory

    def storage_meta(self) -> StorageMeta:
        """Return the writer's entry of the index."""
        return StorageMeta(save_id=self.save_id)


Result = TypeVar("Result")


class WriterError(RuntimeError):
    """Error for a checkpoint writer process that failed or was killed."""


class NotFiniteStateError(WriterError):
    """Error for a state that is not finite, from which no run could continue."""


@dataclass(frozen=True)
class FileFacts:
    """Size and digest of a file, which are compared when the file is read."""

    bytes: int
    sha256: str


@dataclass
class Written:
    """Result of a writer: index entries of its tensors, and facts about its files by name."""

    index: list[Any] = field(default_factory=list)
    files: dict[str, FileFacts] = field(default_factory=dict)


class PendingSave:
    """A running save on this rank. A separate process writes the rank's files, if any."""

    def __init__(
        self, folder: Path, planner: StatePlanner, plan: SavePlan, plain: dict[str, Any]
    ) -> None:
        self.folder = folder
        self.written: Written | None = Written() if not plan.items else None
        self._planner, self._plan, self._plain = planner, plan, plain
        self._process: ForkProcess | None = None
        self._problem: WriterError | None = None
        try:
            if plan.items:
                self._start()
        except OSError as error:  # no process or pipe is available
            self._problem = WriterError(f"{self._name} failed: {described(error)}")

    def _start(self) -> None:
        context = get_context("fork")
        self._receiver, sender = context.Pipe(duplex=False)
        save = self.folder, self._planner, self._plan
        self._process = context.Process(
            target=_write_all, args=(sender, self._receiver, *save), daemon=True
        )
        # The garbage may contain process groups, whose threads do not exist in a forked process.
        with no_collection():
            self._process.start()
        sender.close()

    def again(self, folder: Path) -> "PendingSave":
        """Start to write the same state to another folder, from the existing host copies."""
        return PendingSave(folder, self._planner, self._plan, self._plain)

    def poll(self, timeout: float = 0.0) -> bool:
        """Wait up to `timeout` seconds, and return whether all files are written.

        Raises WriterError if the process failed or was killed, and NotFiniteStateError if the state
        is not finite.
        """
        if self._problem is not None:
            raise self._problem
        if self.written is None and self._receiver.poll(timeout):
            try:
                answer = self._receiver.recv()
            except (EOFError, OSError):  # OSError: in the middle of its answer
                answer = "it was killed"
            process = self._process
            assert process is not None
            process.join()
            if isinstance(answer, NotFiniteStateError):
                raise answer
            if not isinstance(answer, Written):
                code = f" (exit code {process.exitcode})" if process.exitcode else ""
                raise WriterError(f"{self._name} failed: {answer}{code}")
            self.written = answer
        return self.written is not None

    @property
    def _name(self) -> str:
        return f"the checkpoint writer of rank {dist.get_rank()}"

    def kill(self) -> None:
        """Kill the writer process."""
        if self._process is not None and self._process.is_alive():
            self._process.kill()
            self._process.join()

    def gather(self) -> list[Written]:
        """Return the results of all ranks' writers, on rank 0 only.

        All ranks must call this method together, after all writers are done.
        """
        gathered: list[Any] = on_first(self.written)
        return gathered

    def finish(self, written: Sequence[Written]) -> dict[str, FileFacts]:
        """Write the index of all files and the plain values. Call this method only on rank 0.

        Returns the facts of every file in the folder. The caller must sync the new files. Raises
        OSError.
        """
        write_plain(self.folder / PLAIN_FILE, self._plain)
        assert self._planner.index is not None
        StateWriter(self.folder).finish(self._planner.index, [part.index for part in written])
        files = {name: facts for part in written for name, facts in part.files.items()}
        new = (path for path in sorted(self.folder.iterdir()) if path.name not in files)
        return files | {path.name: file_facts(path) for path in new}


def _write_all(
    sender: Connection, receiver: Connection, folder: Path, planner: StatePlanner, plan: SavePlan
) -> None:
    """Write all files in the writer process; send a `Written`, an exception or an error's text."""
    receiver.close()
    # The training process handles the run's signals; only SIGKILL ends the writer process.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    try:
        answer: Written | WriterError | str = _written(folder, planner, plan)
    except NotFiniteStateError as error:
        answer = error
    except Exception as error:
        answer = reason(error, folder)
    with contextlib.suppress(BrokenPipeError):  # without the training process the save is useless
        sender.send(answer)
        sender.close()


def reason(error: BaseException, path: Path) -> str:
    """Return the message of the OSError that caused `error` or, if another exception caused it,
    the last line of `error`.

    torch's own message states only that a file is too short.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError):
            return described(cause, path)
        cause = cause.__cause__ or cause.__context__
    return traceback.format_exception(error)[-1].strip().splitlines()[-1]


def _written(folder: Path, planner: StatePlanner, plan: SavePlan) -> Written:
    """Write a plan's tensors to files and sync them to the disk.

    Raises NotFiniteStateError if a tensor is not finite.
    """
    for item in plan.items:
        tensor = planner.resolve_data(item)
        if not bool(torch.isfinite(tensor).all()):
            first = torch.isfinite(tensor).logical_not().nonzero()[0].tolist()
            place = [a + b for a, b in zip(first, item.index.offset or (), strict=True)]
            raise NotFiniteStateError(f"{item.index.fqn}{place} is not finite")
    storage = StateWriter(folder)
    # torch uses this rank's number, which is the position of its plan, in file names.
    plans = storage.prepare_global_plan([*[SavePlan([])] * dist.get_rank(), plan])
    index = storage.write_data(plans[-1], planner).wait()
    names = sorted({result.storage_data.relative_path for result in index})
    return Written(index, {name: file_facts(folder / name) for name in names})


def file_facts(path: Path) -> FileFacts:
    """Return size and SHA-256 digest of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileFacts(file.tell(), digest)


def write_plain(path: Path, value: object) -> None:
    """Write plain values and tensors for `torch.load` with weights_only.

    Raises OSError on a full disk, for which torch's own writer raises other errors.
    """
    buffer = BytesIO()
    torch.save(value, buffer)
    path.write_bytes(buffer.getbuffer())


def start_save(
    folder: str | Path,
    model: ParallelModel,
    optimizer: DistributedOptimizer,
    extra: Mapping[str, Any],
    planner: StatePlanner,
) -> PendingSave:
    """Start to save the state of model and optimizer to the empty `folder`.

    All ranks must call this function together. On return, this rank's part has been copied. `extra`
    contains other plain values to save, the same on every rank. `planner` is shared by all saves
    of a model. Raises OSError on rank 0 if the folder is not writable.
    """
    model.wait_for_weights()
    plan = planner.stage(sharded_state(model, optimizer))
    plain = {"schema": SCHEMA, "extra": dict(extra)}
    return PendingSave(Path(folder), planner, plan, plain)


def first_rank(call: Callable[[], Result]) -> Result:
    """Run `call` on rank 0 and return its result on every rank.

    An exception of `call` is raised on every rank. An OSError is raised as a WriterError.
    """
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = call()
        except OSError as error:
            answer[1] = WriterError(described(error))
        except Exception as error:
            answer[1] = error
    with named("exchange of plain values"):
        dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
