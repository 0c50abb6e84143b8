"""Compare collectives across all ranks. A run hangs if collectives or their order differ between
ranks.

Within a group, the calls of all ranks must have the same operation, dtype and size, in the same
order. In an all-to-all, the number of elements that rank a expects from rank b must match the
number that b sends to a. In each batch of point-to-point calls between two ranks, every send must
match a receive in the same batch on the other rank, and vice versa. All calls must be able to
complete under NCCL's rules: a group runs one call at a time, and a call waits until its peers have
started the same call.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product, zip_longest

from spectral.batching import grouped
from training.rehearsal.trace import Call

OTHER_SIDE = {"send": "receive", "receive": "send"}


def mismatches(calls: Mapping[int, Sequence[Call]]) -> list[str]:
    """Return messages about the first mismatch in each group and between each pair of ranks. If
    there are no mismatches, return messages about deadlocks."""
    sentences: list[str] = []
    for channel, members in channels(calls).items():
        sentences += _of_group(channel, members, calls)
        sentences += _of_pairs(channel, members, calls)
    return sentences or list(hangs(calls))


Event = tuple[int, int, str]
"""An event is (rank, call number, kind). Kind "stream" means that the current stream reaches the
call, and kind "call" means that the call runs. All calls of a batch have the number of the batch's
first call."""


def hangs(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Yield a message for each rank with a call that never starts. `calls` must not contain
    mismatches.

    A group runs its calls in sequence. A call starts after the work that the current stream has
    waited for. The call completes once all of its peers have started the same call.
    """
    needs: dict[Event, set[Event]] = {}
    peers: dict[Event, set[Event]] = defaultdict(set)
    meetings: dict[object, list[Event]] = defaultdict(list)
    for rank, calls_of_rank in calls.items():
        for event, before, meeting in _events(rank, calls_of_rank):
            needs.setdefault(event, before)
            if meeting is not None:
                meetings[meeting].append(event)
    for events in meetings.values():
        for event in events:
            peers[event] |= set(events)
    begun: set[Event] = set()
    done: set[Event] = set()
    waiting = dict(needs)
    while True:
        new = {event for event, before in waiting.items() if before <= done}
        begun |= new
        ended = {event for event in begun - done if peers[event] <= begun}
        done |= ended
        waiting = {event: before for event, before in waiting.items() if event not in new}
        if not new and not ended:
            break
    for rank in calls:
        stuck = min((i for r, i, what in waiting if r == rank and what == "call"), default=None)
        if stuck is not None:
            call = calls[rank][stuck]
            yield f"{call.kind} at {call.place} on rank {rank} never starts: the ranks deadlock"


def _events(rank: int, calls: Sequence[Call]) -> Iterator[tuple[Event, set[Event], object | None]]:
    """Yield an (event, preceding events, key) triple for each event of a rank. Matching events of
    peers have the same key; events without peers have the key None."""
    first: dict[object, int] = {}  # first call of each batch
    last: dict[str, Event] = {}  # last event of each group
    counts: dict[object, int] = defaultdict(int)
    events: list[Event] = []
    stream: set[Event] = set()
    for i, call in enumerate(calls):
        number = first.setdefault(call.batch or -i - 1, i)
        event, reached = (rank, number, "call"), (rank, i, "stream")
        yield reached, stream | {events[k] for k in call.after}, None
        key: object = call.channel
        if call.peer is not None:
            key = call.channel, *((rank, call.peer) if call.kind == "send" else (call.peer, rank))
        before = {last[call.channel]} if last.get(call.channel, event) != event else set()
        yield event, before | {reached}, (key, counts[key])
        counts[key] += 1
        last[call.channel] = event
        events.append(event)
        stream = {reached, event} if call.waits else {reached}


def channels(calls: Mapping[int, Sequence[Call]]) -> dict[str, tuple[int, ...]]:
    """Map the name of each group in use to the ranks of the group. Ranks that are not in `calls`
    are omitted."""
    groups = {call.channel: call.group for of_rank in calls.values() for call in of_rank}
    return {name: tuple(r for r in group if r in calls) for name, group in groups.items()}


def _of_group(
    channel: str, members: Sequence[int], calls: Mapping[int, Sequence[Call]]
) -> Iterator[str]:
    """Describe a group's first collective that differs between the ranks of the group."""
    first = members[0]
    sequences = {
        rank: [c for c in calls[rank] if c.channel == channel and c.peer is None]
        for rank in members
    }
    for number, together in enumerate(zip_longest(*sequences.values())):
        texts = {r: _described(call) for r, call in zip(sequences, together, strict=True)}
        other = next((r for r in texts if texts[r] != texts[first]), None)
        if other is not None:
            shown = ", ".join(map(str, members[:8]))
            more = f" and {len(members) - 8} more" if len(members) > 8 else ""
            yield (
                f"collective {number} of group {channel} (ranks {shown}{more}) is "
                f"{_placed(together[0])} on rank {first} and "
                f"{_placed(together[members.index(other)])} on rank {other}"
            )
            return
        if (problem := _of_all_to_all(dict(zip(members, together, strict=True)))) is not None:
            yield f"collective {number} of group {channel}: {problem}"
            return


def _of_all_to_all(calls: Mapping[int, Call]) -> str | None:
    """Describe the first pair of ranks in an all-to-all for which the sizes sent and expected
    differ."""
    if next(iter(calls.values())).kind != "all_to_all":
        return None
    for (source, sent), (target, received) in product(calls.items(), repeat=2):
        rows = sent.out[sent.group.index(target)]
        expected = received.into[sent.group.index(source)]
        if rows != expected:
            return (
                f"rank {source} sends {rows} elements to rank {target}, which expects {expected} "
                f"(at {sent.place})"
            )
    return None


def _of_pairs(
    channel: str, members: Sequence[int], calls: Mapping[int, Sequence[Call]]
) -> Iterator[str]:
    """For each pair of ranks, describe the first batch whose sends and receives do not match."""
    nothing: list[Call] = []
    for one, other in combinations(members, 2):
        sides = _batches(calls[one], channel, other), _batches(calls[other], channel, one)
        for number, (mine, its) in enumerate(zip_longest(*sides, fillvalue=nothing)):
            meeting = [replace(call, kind=OTHER_SIDE[call.kind]) for call in its]
            if sorted(map(_described, mine)) != sorted(map(_described, meeting)):
                yield (
                    f"P2P batch {number} between ranks {one} and {other} of group {channel}: "
                    f"{_kinds(mine)} on rank {one}, {_kinds(its)} on rank {other} "
                    f"(at {(mine or its)[0].place})"
                )
                break


def _batches(calls: Sequence[Call], channel: str, peer: int) -> list[list[Call]]:
    """Return the sends to a peer and the receives from it, grouped by batch."""
    exchanged = enumerate(c for c in calls if c.channel == channel and c.peer == peer)
    batches = grouped(exchanged, lambda numbered: numbered[1].batch or -1 - numbered[0])
    return [[call for _, call in batch] for batch in batches.values()]


def _described(call: Call | None) -> str:
    """Format the fields of a call that must be equal on all ranks."""
    if call is None:
        return "nothing"
    return " ".join(filter(None, (f"{call.kind} of {call.numel} {call.dtype}", call.detail)))


def _placed(call: Call | None) -> str:
    return _described(call) + (f" at {call.place}" if call is not None else "")


def _kinds(batch: Sequence[Call]) -> str:
    return " and ".join(map(_described, batch)) or "nothing"
