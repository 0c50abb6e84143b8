"""Process groups of any size, without peers. Collectives are recorded and complete immediately.

Ranks exchange plain values when a run starts and when a checkpoint is saved. A rehearsed rank
receives copies of its own values. `install` replaces functions that would fail if all ranks had the
same values.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

from parallel.checkpoint import state_writer
from parallel.checkpoint.state import check_fits
from parallel.checkpoint.state_writer import StatePlanner
from training.monitor import matrix_figures as figures
from training.rehearsal.program import call_site, put, replace_everywhere
from training.rehearsal.trace import Call, Trace

ProcessGroup: Any = dist.ProcessGroup
"""Typed as `Any`, because the annotations of `ProcessGroup` describe overloads that
`torch.distributed` does not call."""


class BackendError(RuntimeError):
    """Raised when a tensor is on a device that the collective's backend does not support."""


class NoBackend:
    """A backend class that is never instantiated."""


class Work(dist.Work):
    """A collective in flight, whose tensors are kept alive until `wait` is called."""

    def __init__(self, done: Callable[[], None], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._done = done
        self._tensors = list(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait for the collective."""
        self._done()
        self._tensors.clear()
        return True


class RehearsedGroup(ProcessGroup):
    """A process group of any size in which only this rank exists.

    Collectives of NCCL groups require device tensors. Asynchronous collectives run on the group's
    stream; all other collectives run on the current stream. Collectives of gloo groups require host
    tensors, and their results are computed as if all ranks had the same values.
    """

    def __init__(self, rank: int, ranks: Sequence[int], trace: Trace, name: str) -> None:
        super().__init__(rank, len(ranks))
        self.ranks = tuple(ranks)
        self.trace = trace
        self.channel = name
        self.stream = next(trace.numbers)

    def new_group(self, ranks: Sequence[int], *, group_name: str, **_: Any) -> Any:
        """Create the group of `ranks` for `torch.distributed.new_group`. Returns None if this rank
        is not in `ranks`."""
        this_rank = self.ranks[self.rank()]
        if this_rank not in ranks:
            return None
        return RehearsedGroup(list(ranks).index(this_rank), ranks, self.trace, group_name)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        size = 2 * tensor.nbytes * (self.size() - 1) // self.size()
        detail = operation(opts.reduceOp)
        return self._run(
            "all_reduce", [], tensors, opts, numel=tensor.numel(), size=size, detail=detail
        )

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        (parts,), (piece,) = outputs, inputs
        for part in parts:
            if not part.is_cuda:  # as if all ranks had the same values
                part.copy_(piece)
        return self._gather(piece, parts, sum(part.numel() for part in parts), opts)

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any) -> Work:
        writes = [output]
        shared = output.untyped_storage()._cdata == piece.untyped_storage()._cdata
        if shared and output.is_contiguous():  # `piece` is a slice of `output`
            flat = output.view(-1)
            first = piece.storage_offset() - output.storage_offset()
            writes = [flat[:first], flat[first + piece.numel() :]]
        return self._gather(piece, writes, output.numel(), opts)

    def _gather(self, piece: Tensor, writes: Sequence[Tensor], numel: int, opts: Any) -> Work:
        size = piece.nbytes * (self.size() - 1)
        return self._run("all_gather", [piece], writes, opts, numel=numel, size=size)

    def reduce_scatter_single(self, piece: Tensor, whole: Tensor, opts: Any) -> Work:
        return self._run(
            "reduce_scatter",
            [whole],
            [piece],
            opts,
            numel=whole.numel(),
            size=piece.nbytes * (self.size() - 1),
            detail=operation(opts.reduceOp),
        )

    def all_to_all_single(
        self, output: Tensor, source: Tensor, into: Sequence[int], out: Sequence[int], opts: Any
    ) -> Work:
        out, into = self._elements(source, out), self._elements(output, into)
        size = (sum(out) - out[self.rank()]) * source.element_size()
        rows = {"out": tuple(out), "into": tuple(into)}
        return self._run("all_to_all", [source], [output], opts, numel=0, size=size, **rows)

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        to = {"peer": self.ranks[peer], "numel": tensor.numel(), "size": tensor.nbytes}
        return self._run("send", tensors, [], None, **to)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Work:
        source = {"peer": self.ranks[peer], "numel": tensors[0].numel(), "size": 0}
        return self._run("receive", [], tensors, None, **source)

    def _elements(self, tensor: Tensor, rows: Sequence[int]) -> list[int]:
        """Return the number of elements of `tensor` that are sent to or received from each rank.
        `rows` is the number of rows of `tensor` for each rank; if `rows` is empty, elements are
        split evenly."""
        if not rows:
            return [tensor.numel() // self.size()] * self.size()
        if sum(rows) != tensor.shape[0]:
            raise RuntimeError(
                f"split sizes must sum to the tensor's {tensor.shape[0]} rows, got {list(rows)}"
            )
        return [count * tensor[:1].numel() for count in rows]

    def _run(
        self, kind: str, reads: Sequence[Tensor], writes: Sequence[Tensor], opts: Any, **call: Any
    ) -> Work:
        """Record a collective. `call` contains the remaining fields of the `Call`."""
        backend, tensors = dist.get_backend(self), [*reads, *writes]
        on_device = backend == "nccl"
        for tensor in tensors:
            if tensor.is_cuda != on_device:
                raise BackendError(
                    f"{kind} over {backend} does not support tensors on {tensor.device}"
                )
        noted = Call(
            group=self.ranks,
            channel=self.channel,
            kind=kind,
            dtype=str(tensors[0].dtype),
            on_device=on_device,
            batch=self.trace.batch if "peer" in call else None,
            place=call_site(),
            step=self.trace.step,
            phase=self.trace.phase,
            **call,
        )
        if not on_device:
            self.trace.call(noted, [], [], 0)
            return Work(lambda: None, tensors)
        asynchronous = opts is None or opts.asyncOp
        if not asynchronous:
            self.trace.call(noted, reads, writes, self.trace.stream)
            return Work(lambda: None, [])
        return self._asynchronous(noted, reads, writes)

    def _asynchronous(self, call: Call, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Work:
        """Run the collective on the group's stream, after all work on the current stream."""
        order = self.trace.order
        began, ended = next(self.trace.numbers), next(self.trace.numbers)
        order.record(began, self.trace.stream)
        order.wait(began, self.stream)
        self.trace.call(call, reads, writes, self.stream)
        order.record(ended, self.stream)
        number = len(self.trace.calls) - 1

        def done() -> None:
            order.wait(ended, self.trace.stream)
            self.trace.waited.append(number)

        return Work(done, [*reads, *writes])


def operation(reduction: Any) -> str:
    """Return the name of a reduction operation."""
    kinds = dist.ReduceOp.RedOpType.__members__.items()
    return next(name for name, kind in kinds if reduction == kind)


def install(trace: Trace, world: int) -> None:
    """Make `torch.distributed` create rehearsed groups until this process exits."""

    def init_process_group(backend: str = "nccl", **_: Any) -> None:
        group = RehearsedGroup(trace.rank, range(world), trace, "world")
        c10d._register_pg_in_world(
            group,
            backend_name=backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            group_name=c10d.GroupName("world"),
            backend_config=str(c10d.BackendConfig(c10d.Backend(backend))),
            rank_mapping={rank: rank for rank in range(world)},
        )
        c10d._update_default_pg(group)

    real_batch = dist.batch_isend_irecv

    def batch_isend_irecv(operations: list[Any]) -> list[dist.Work]:
        trace.batch = next(trace.numbers)
        try:
            return real_batch(operations)
        finally:
            trace.batch = None

    for module in (dist, c10d):
        put(module, "init_process_group", init_process_group)
        put(module, "batch_isend_irecv", batch_isend_irecv)
        put(module, "is_nccl_available", lambda: True)
    # Code that aborts groups checks for this class, which does not exist in builds without CUDA.
    vars(c10d).setdefault("ProcessGroupNCCL", NoBackend)
    _install_exchanges(trace)


def _install_exchanges(trace: Trace) -> None:
    """Replace exchanges of plain values until this process exits."""

    def note(name: str, group: Any = None) -> None:
        """Record an exchange. Over NCCL, values are sent from the device, and the host waits for
        their sizes."""
        group = group or c10d._get_default_group()
        on_device = dist.get_backend(group) == "nccl"
        if on_device:
            trace.synchronize(name)
        trace.calls.append(
            Call(group.ranks, group.channel, name, "", 0, 0, on_device, place=call_site())
        )

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        note("all_gather_object", group)
        values[:] = [value] * len(values)

    def gather_object(
        value: Any, values: list[Any] | None = None, dst: int | None = None, group: Any = None,
        group_dst: int | None = None,
    ) -> None:  # fmt: skip
        note("gather_object", group)
        if values is not None:
            values[:] = [value] * len(values)

    def broadcast_object_list(values: list[Any], *_: Any, group: Any = None, **__: Any) -> None:
        note("broadcast_object_list", group)

    def first_rank(call: Callable[[], Any]) -> Any:
        """Return the result of `call`: every rehearsed rank acts as the first rank."""
        note("broadcast_object_list")
        return call()

    real_stage = StatePlanner.stage

    def stage(planner: StatePlanner, *arguments: Any) -> SavePlan:
        """Copy the state, but return an empty plan, so that no writer process is started."""
        real_stage(planner, *arguments)
        planner.index = Metadata({})  # every rehearsed rank writes the file
        return SavePlan([])

    for module in (dist, c10d):
        for function in (all_gather_object, gather_object, broadcast_object_list):
            put(module, function.__name__, function)
    replace_everywhere(state_writer.first_rank, first_rank)
    # Skip the check that the ranks together write all tensors.
    put(StatePlanner, "create_global_plan", lambda self, plans: (plans, None))
    put(StatePlanner, "stage", stage)
    # Skip the check that the ranks together request all tensors of a checkpoint.
    replace_everywhere(check_fits, lambda *_, **__: None)
    # Skip metrics that combine matrices inspected on different ranks.
    put(figures, "pair", lambda units: None)
