"""Where a pretended router sends tokens: to all experts alike."""

from torch import Tensor

from models.blocks.dispatcher import Counts, SortedDispatcher
from training.rehearsal.replacement import put
from training.rehearsal.trace import Trace


def install(trace: Trace) -> None:
    """Let mixture-of-experts layers send equally many rows to every expert, for the life of this
    process: how many a real router sends where, only its weights know."""

    def counts_on_host(dispatcher: SortedDispatcher, *counts: Tensor) -> list[Counts]:
        trace.read("rows of each expert")
        order, experts = dispatcher.order, dispatcher.config.num_moe_experts
        assert order is not None and experts is not None
        each = shares(len(order), experts)
        local, parts = dispatcher.local, dispatcher.tp_size
        if dispatcher.ranks == 1:
            return [[each]]
        outgoing = [each[rank // parts * local :][:local] for rank in range(dispatcher.ranks)]
        own = outgoing[dispatcher.tp_ep_group.rank()]
        return [outgoing, [own] * dispatcher.ranks]

    put(SortedDispatcher, "counts_on_host", counts_on_host)


def shares(total: int, parts: int) -> list[int]:
    """`total` in `parts` that differ by at most one."""
    return [total // parts + (i < total % parts) for i in range(parts)]
