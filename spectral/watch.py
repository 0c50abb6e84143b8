"""Which outputs of a weight a model uses together, seen in one forward pass.

No name and no shape says how many matrices are in a weight: what the model does with its outputs
does. So run the model once. Every product with a weight gives its output a *shadow*, a tensor of
the same shape that has at each place the number of a column: which output of which weight it is.
Shadows follow the numbers:

    view, split, transpose      nothing to do: a shadow belongs to a storage, which views share
    cat, index, pad             the same operation moves the shadow
    silu, softmax, a norm       the shadow stays
    a + b                       each place has the columns of both

until an operation uses columns as one vector. That is a set of columns that belong together:

    a product with a weight     the columns of each input vector
    a product of activations    the columns of each inner product, or, where it sums over tokens,
                                of each entry of the batch: attention's heads
    a * b                       the columns of a, and those of b: the halves of a gated layer

Two outputs of a weight are in one matrix if every set has both or neither. That is the coarsest
division that cuts no set. Columns that no set has are a head's, those that `topk` chooses from a
router's, and a weight that nothing multiplies by is a table.
"""

import random
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import reduce
from itertools import combinations, groupby
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from .division import Division, sizes_of

PRODUCTS = {"addmm": 1, "baddbmm": 1, "addmv": 1, "_grouped_mm": 0}
PRODUCTS |= dict.fromkeys(("mm", "bmm", "mv", "dot", "linalg_solve_triangular"), 0)
"""Operations that multiply one argument by the next, by the place of the first."""
FACTORS = ("mul", "div", "addcmul", "addcdiv")
LOOKUPS = ("embedding", "_embedding_bag", "index", "index_select", "gather")
CHOICES = {"topk": 2, "sort": 1, "argsort": 1, "argmax": 1, "multinomial": 4}
"""Operations that choose among columns, by the place of the axis in their arguments."""
ADDING_MOVES = {"index_add": ("index_select", "index_copy"), "scatter_add": ("gather", "scatter")}
"""Operations that add to some places, with how to read these places and how to write them."""
MOVES = re.compile(
    r"cat|stack|(_unsafe_)?index(_select|_put|_copy)?|gather|take|repeat|roll|flip|rot90|im2col"
    r"|constant_pad_nd|(reflection|replication)_pad\dd|(slice_|select_|masked_)?scatter"
    r"|masked_select|(pixel|channel)_(un)?shuffle|tril|triu|diag_embed|unfold_copy"
)
STAYS = re.compile(
    r"_to_copy|copy|_(log_|safe_)?softmax|(log)?cum(sum|prod|sumexp)|.*(layer|batch|group|rms)_norm.*"
    r"|_weight_norm_interface|native_dropout|leaky_relu|elu|hard\w+|rrelu.*|nan_to_num|masked_fill"
)
"""Operations, beside those that torch calls pointwise, that act on each place or scale it."""
REDUCTIONS = re.compile(
    r"(nan)?sum|mean|prod|a?max|a?min|(var|std)(_mean)?|logsumexp|(linalg_vector_)?norm"
)
CHANNELWISE = re.compile(r".*(pool|upsample|grid_sampler).*")
"""Operations on each channel, the second axis."""
VIEWS = re.compile(r"as_strided|t|transpose|squeeze|unsqueeze|swap(axes|dims)|detach|resize")
"""Operations that change the shape of a tensor in place."""
STREAM = -1
"""In place of a weight, any activation that no weight made: the input of the model, say."""
SHAPES = re.compile(r".*(_like|new_).*")
"""Operations that read the shape of an input alone."""
ENDS = re.compile(r".*(loss|histc|cdist|_like|new_).*")
"""Operations whose results no layer takes."""


class Seen(NamedTuple):
    """What one forward pass showed of a weight."""

    division: Division | None  # None for AdamW
    reason: str
    decays: bool = True


@dataclass
class Use:
    """What became of the outputs of a weight. Its element i, counted by rows, is `start + i`."""

    name: str
    shape: tuple[int, ...]
    start: int
    used: bool = False
    looked_up: bool = False
    joined: set[int] = field(default_factory=set)  # weights, by `start`, that it was added to
    ended: bool = False  # its outputs are the model's, or in its loss
    hidden: str = ""  # the operation that hides what becomes of its outputs
    groups: int = 1  # of a transposed convolution
    inputs: set[tuple[int, ...]] = field(default_factory=set)  # axes that products sum over
    outputs: set[int] = field(default_factory=set)  # axes that number outputs
    sets: dict[str, set[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(set))

    def places(self, number: int) -> list[int]:
        """Return the place of an element on each axis."""
        rest = number - self.start
        return [rest // step % size for step, size in zip(self.steps, self.shape, strict=True)]

    @property
    def steps(self) -> list[int]:
        """How far numbers are apart on each axis."""
        return [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]


class Sums(NamedTuple):
    """Columns that are sums of two columns, numbered from `start` on."""

    start: int
    pairs: list[tuple[int, int]]
    beneath: frozenset[int]  # the weights of these columns, by `start`


class Layout(NamedTuple):
    """Which number stands at each element of a storage, by its place in one tensor `[*sizes]`.

    It is `values[place]`, where an axis of length 1 is one along which nothing changes, or `start`
    and a step for each place on each axis, which takes no memory.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    values: Tensor | None = None
    start: int = 0
    steps: tuple[int, ...] = ()

    @classmethod
    def of(cls, tensor: Tensor, **numbers: Any) -> "Layout":
        """Return the layout of a tensor; a complex number counts as two."""
        if tensor.is_complex():
            strides = *(2 * stride for stride in tensor.stride()), 1
            return cls(2 * int(tensor.storage_offset()), (*tensor.shape, 2), strides, **numbers)
        return cls(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), **numbers)

    def number(self, place: int) -> int:
        """Return the number at an element of the storage."""
        steps = zip(self.strides, self.sizes, strict=True)
        places = [(place - self.offset) // stride % size for stride, size in steps]
        if self.values is not None:
            return int(
                self.values[
                    tuple(min(p, n - 1) for p, n in zip(places, self.values.shape, strict=True))
                ]
            )
        return self.start + sum(p * step for p, step in zip(places, self.steps, strict=True))

    def moving(self) -> list[int]:
        """Return the axes along which numbers change."""
        changes = self.steps if self.values is None else [n > 1 for n in self.values.shape]
        return [a for a, n in enumerate(self.sizes) if n > 1 and changes[a]]

    def still(self, view: "Layout", axis: int) -> bool:
        """Whether nothing changes along an axis of a view of the storage."""
        step, start = view.strides[axis], view.offset - self.offset
        for a in self.moving():
            stride = self.strides[a]
            below = sum(
                (n - 1) * s for n, s in zip(view.sizes, view.strides, strict=True) if s < stride
            )
            within = step < stride and start % stride + below < stride
            if step % (stride * self.sizes[a]) and not within:
                return False
        return True

    def read(self, tensor: Tensor) -> Tensor:
        """Return the numbers of a view of the storage, of length 1 on axes without change."""
        view = Layout.of(tensor)
        ndim, device = len(view.sizes), tensor.device
        index = torch.full([1] * ndim, view.offset - self.offset, device=device)
        for axis, (size, stride) in enumerate(zip(view.sizes, view.strides, strict=True)):
            if size > 1 and not self.still(view, axis):
                along = torch.arange(0, size * stride, stride, device=device)
                index = index + along.view(-1, *[1] * (ndim - 1 - axis))
        places = {a: index // self.strides[a] % self.sizes[a] for a in self.moving()}
        if self.values is None:
            numbers = torch.full_like(index, self.start)
            for axis, place in places.items():
                numbers = numbers + place * self.steps[axis]
            return numbers
        origin = torch.zeros_like(index)
        return self.values[tuple(places.get(a, origin) for a in range(self.values.ndim))]


class Watch(TorchDispatchMode):
    """Follows the outputs of weights through the operations of a forward pass."""

    def __init__(
        self, weights: Mapping[str, Tensor], parameters: Iterable[Tensor], inputs: Iterable[Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False
        self.records: list[Use | Sums] = []
        self.starts: list[int] = []
        self.end = 0
        self.settled: set[tuple[str, tuple[int, ...]]] = set()
        self.sums: dict[tuple[tuple[int, int], ...], int] = {}
        self.read: dict[Any, tuple[Tensor | None, Tensor]] = {}
        # Storages that depend on parameters or on the example, and not on positions alone.
        self.live: WeakKeyDictionary[Any, None] = WeakKeyDictionary()
        # By storage: of activations the numbers of columns, of weights those of elements.
        self.shadows: WeakKeyDictionary[Any, Layout] = WeakKeyDictionary()
        self.weights: WeakKeyDictionary[Any, Layout] = WeakKeyDictionary()
        for name, weight in weights.items():
            use = Use(name, tuple(weight.shape), self.end)
            if weight.untyped_storage() in self.weights:
                raise ValueError(f"{name} shares its storage with another weight")
            self._add(use, weight.numel())
            layout = Layout.of(weight, start=use.start, steps=tuple(use.steps))
            self.weights[weight.untyped_storage()] = layout
        self.parameters = WeakKeyDictionary((p.untyped_storage(), None) for p in parameters)
        self.live.update((t.untyped_storage(), None) for t in inputs if t.is_floating_point())
        self.live.update(self.parameters)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and move the shadows as it moves numbers."""
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and not self.paused:
            with self:  # there, operations made of others arrive whole
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not self.paused:
            with torch.inference_mode(False):
                self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        operands = [*_tensors((args, kwargs))]
        name = func.overloadpacket.__name__
        if not SHAPES.match(name) and any(t.untyped_storage() in self.live for t in operands):
            self.live.update((t.untyped_storage(), None) for t in _tensors(result))
        weights = [t for t in operands if t.untyped_storage() in self.weights]
        tracked = [t for t in operands if t.numel() and t.untyped_storage() in self.shadows]
        if not weights and not tracked:
            return
        in_place = name.endswith("_") and not name.endswith("__")
        name = name.removesuffix("_") if in_place else name
        for weight in weights:
            use = self._use(weight)
            use.used = True
            use.looked_up |= name in LOOKUPS and weight.ndim == 2
        inputs = {id(t.untyped_storage()) for t in operands}
        fresh = [
            t
            for t in _tensors(result)
            if t.numel()
            and (t.is_floating_point() or t.is_complex())
            and (in_place or id(t.untyped_storage()) not in inputs)
        ]
        if name in CHOICES and tracked:
            self._choose(args, result, CHOICES[name])
        elif not fresh:
            return  # a view, or nothing that has columns
        elif in_place and VIEWS.fullmatch(name):
            return
        elif name in PRODUCTS:
            first = PRODUCTS[name]
            self._multiply(args[first], args[first + 1], fresh[0])
        elif name == "convolution":
            self._convolve(fresh[0], *args)
        elif name == "glu":
            self._stay("mul", args[0].chunk(2, *(args[1:] or (-1,))), fresh[0])
        elif name in ADDING_MOVES or MOVES.fullmatch(name):
            self._move(name, args, kwargs, fresh[0])
        elif STAYS.fullmatch(name) or torch.Tag.pointwise in func.tags:
            for out in fresh:
                self._stay(name, operands[name == "copy" :], out)
        elif tracked and REDUCTIONS.fullmatch(name):
            self._reduce(args[0], args[1:] or [*kwargs.values()], fresh[0])
        elif tracked and CHANNELWISE.match(name):
            self._channelwise(str(func), args[0], fresh[0])
        elif tracked and ENDS.match(name):
            self.end_with(tracked)
        elif name not in LOOKUPS and max(t.numel() for t in fresh) > 1:
            self._hide(operands, str(func))

    # Numbers, and the weights that they belong to.

    def _add(self, record: Use | Sums, size: int) -> None:
        self.records.append(record)
        self.starts.append(record.start)
        self.end += size

    def _parts(self, numbers: Iterable[int]) -> Iterator[tuple[Any, list[int]]]:
        """Yield the records that numbers belong to, with the numbers of each."""
        for after, own in groupby(numbers, lambda n: bisect_right(self.starts, n)):
            yield self.records[after - 1], [*own]

    def _beneath(self, columns: Tensor) -> frozenset[int]:
        each = [
            r.beneath if isinstance(r, Sums) else {r.start}
            for r, _ in self._parts(_sorted(columns))
        ]
        return frozenset().union(*each)

    def _at(self, start: int) -> Any:
        return self.records[bisect_right(self.starts, start) - 1]

    def _use(self, tensor: Tensor) -> Use:
        layout = self.weights[tensor.untyped_storage()]
        use = self._at(layout.start if layout.values is None else int(layout.values.max()))
        assert isinstance(use, Use)
        return use

    def _hide(self, operands: Iterable[Tensor], operation: str) -> None:
        for t in operands:
            if (columns := self._columns(t)) is not None:
                uses = [self._at(start) for start in self._beneath(columns)]
            else:
                uses = [self._use(t)] if t.untyped_storage() in self.weights else []
            for use in uses:
                use.hidden = use.hidden or operation

    def _columns(self, tensor: Tensor) -> Tensor | None:
        """Return the number of the column at each place of an activation, -1 for none.

        Its length is 1 on axes along which columns do not change.
        """
        layout, view = self.shadows.get(tensor.untyped_storage()), Layout.of(tensor)
        if layout is None:
            return None
        key = (
            id(layout.values),
            *layout[1:3],
            *layout[4:],
            view.offset - layout.offset,
            *view[1:3],
        )
        if key not in self.read:
            self.read[key] = layout.values, _condensed(layout.read(tensor))
        return self.read[key][1]

    def end_with(self, tensors: Iterable[Tensor]) -> None:
        """Note tensors that a model returns, or whose sum it does."""
        for t in tensors:
            if (columns := self._columns(t)) is not None:
                for start in self._beneath(columns):
                    self._at(start).ended = True

    def copied(self, copy: Tensor, weight: Tensor) -> None:
        """Note that a tensor is computed from a weight, each element from that at its place."""
        layout = self.weights[weight.untyped_storage()]
        if copy.stride() == weight.stride():
            offset = layout.offset + Layout.of(copy).offset - Layout.of(weight).offset
            self.weights[copy.untyped_storage()] = layout._replace(offset=offset)
        else:
            self._write(self.weights, copy, layout.read(weight))

    def _write(self, shadows: Any, tensor: Tensor, numbers: Tensor) -> None:
        """Put numbers, which broadcast to the tensor, into its storage."""
        storage, view = tensor.untyped_storage(), Layout.of(tensor)
        size = storage.nbytes() // tensor.element_size() * (1 + tensor.is_complex())
        numbers = numbers.view(*[1] * (len(view.sizes) - numbers.ndim), *numbers.shape)
        if prod(view.sizes) < size:  # a part of it: the others stay
            whole = torch.full((size,), -1, device=tensor.device)
            if storage in shadows:
                whole.copy_(shadows[storage].read(tensor.as_strided((size,), (1,), 0)))
            whole.as_strided(view.sizes, view.strides, view.offset).copy_(numbers)
            numbers, view = whole, Layout(0, (size,), (1,))
        shadows[storage] = view._replace(values=numbers)

    # What operations do with columns.

    def _settle(self, columns: list[int], kind: str) -> None:
        """Note that an operation uses columns, which are sorted, as one vector."""
        key = (kind, tuple(columns))
        if key in self.settled:
            return
        self.settled.add(key)
        parts = [*self._parts(columns)]
        sums = [(r, n) for r, numbers in parts if isinstance(r, Sums) for n in numbers]
        rest = {column for r, n in sums for column in r.pairs[n - r.start]}
        beneath = frozenset().union(*(r.beneath for r, _ in parts if isinstance(r, Sums)))
        for record, numbers in parts:
            if record.start in beneath:
                rest.update(numbers)
            elif isinstance(record, Use):
                record.sets[kind].add(tuple(numbers))
        if rest:
            self._settle(sorted(rest), kind)

    def _consume(self, columns: Tensor, axis: int, kind: str) -> None:
        """Note the columns of every vector along an axis."""
        rows = columns.movedim(axis, -1).reshape(-1, columns.shape[axis])
        if len(rows) > 64:  # one of each set, which a sum of scrambled numbers tells
            scrambled = ((rows * 0x2545F4914F6CDD1) ^ ((rows * 0x9E3779B97F4A7C1) >> 21)).sum(-1)
            _, inverse = scrambled.unique(return_inverse=True)
            first = torch.zeros_like(inverse)
            first[inverse] = torch.arange(len(rows), device=rows.device)
            rows = rows[first[: int(inverse.max()) + 1]]
        for row in rows.tolist():
            self._settle(sorted({n for n in row if n >= 0}), kind)

    def _joined(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the numbers of places that have the columns of both."""
        low, high = torch.minimum(first, second), torch.maximum(first, second)
        both = (low >= 0) & (low != high)
        if not bool(both.any()):
            return high
        pairs, inverse = torch.stack([low[both], high[both]]).unique(dim=1, return_inverse=True)
        key = tuple((a, b) for a, b in pairs.T.tolist())
        if key not in self.sums:
            self.sums[key] = self.end
            sides = [self._beneath(side) for side in pairs]
            self._add(Sums(self.end, [*key], sides[0] | sides[1]), len(key))
            for own, other in (sides, sides[::-1]):
                for start in own - other:
                    self._at(start).joined |= other
        numbers = high.clone()
        numbers[both] = self.sums[key] + inverse
        return numbers

    def _stay(self, name: str, operands: Iterable[Tensor], out: Tensor) -> None:
        """An operation on each place: what its operands have there, the result has."""
        operands = [t for t in operands if _fits(t, out)]
        tracked = [t for t in operands if t.untyped_storage() in self.shadows]
        same = [t for t in operands if t.shape == out.shape]
        if not tracked:
            if weights := [t for t in same if t.untyped_storage() in self.weights]:
                self.copied(out, weights[0])
            return
        source, storage = tracked[0], out.untyped_storage()
        added = name in ("add", "sub") and len(same) > 1
        # Positions and gains scale columns; an activation of every column makes products of them.
        factor = name in FACTORS and any(
            t.untyped_storage() in self.live and t.numel() > 1 and not isinstance(t, nn.Parameter)
            for t in same
            if t is not source
        )
        if (
            len(tracked) == 1
            and not factor
            and source.stride() == out.stride()
            and source.dtype == out.dtype
        ):
            if added:  # to the input of the model, say
                self._join(self._columns(source), [STREAM])
            layout = self.shadows[source.untyped_storage()]
            moved = layout.offset + Layout.of(out).offset - Layout.of(source).offset
            self.shadows[storage] = layout._replace(offset=moved)
            return
        shadows: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether they broadcast
        for t in tracked:
            columns = self._columns(t)
            if columns is None or bool((columns < 0).all()):
                continue
            if out.is_complex() != t.is_complex():
                columns = columns[..., None] if out.is_complex() else columns[..., :1].squeeze(-1)
            if not any(_equal(columns, other) for others in shadows.values() for other in others):
                shadows[t.shape != out.shape].append(columns)
        distinct = [*shadows[False], *shadows[True]]
        if factor and len(tracked) == 1 or name in FACTORS and len(distinct) > 1:
            for columns in distinct:
                self._settle(_sorted(columns), "a product")
            distinct = shadows[False] or distinct
        if not distinct:
            return
        if added and len(distinct) == 1:
            self._join(distinct[0], [STREAM])
        self._write(self.shadows, out, reduce(self._joined, distinct))

    def _join(self, columns: Tensor | None, others: Iterable[int]) -> None:
        for start in self._beneath(columns) if columns is not None else ():
            self._at(start).joined.update(others)

    def _move(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        """An operation that moves numbers moves their columns, or the elements of a weight."""
        operands = [*_tensors(args)]
        tracked = any(t.untyped_storage() in self.shadows for t in operands)
        shadows = self.shadows if tracked else self.weights

        def numbers(t: Any) -> Any:
            if isinstance(t, (list, tuple)):
                return [numbers(each) for each in t]
            if isinstance(t, float):
                return -1
            if not isinstance(t, Tensor) or not t.is_floating_point():
                return t
            if t.untyped_storage() not in shadows:
                return torch.full((), -1, device=t.device).expand(t.shape)
            return _condensed(shadows[t.untyped_storage()].read(t)).expand(t.shape)

        if any(t.is_complex() for t in operands):
            return self._hide(operands, name)
        moved = [numbers(a) for a in args]
        if name in ADDING_MOVES:
            read, name = ADDING_MOVES[name]
            target, axis, index, source = moved[:4]
            there = getattr(torch.ops.aten, read)(target, axis, index)
            moved = [target, axis, index, self._joined(there, source.expand(there.shape))]
        elif name in ("constant_pad_nd", "index_put"):
            moved = [*moved[:2], *moved[2:3]] if name == "index_put" else [*moved[:2], -1]
        move = getattr(torch.ops.aten, name)
        try:
            result = move(*moved, **kwargs)
        except NotImplementedError:  # for integers
            doubles = [m.double() if torch.is_tensor(m) else m for m in moved]
            result = move(*doubles, **kwargs).long()
        self._write(shadows, out, _condensed(result))

    def _reduce(self, source: Tensor, options: Any, out: Tensor) -> None:
        """What is the same column along the reduced axes stays that column."""
        columns = self._columns(source)
        if columns is None or source.is_complex():
            return
        if out.numel() == 1:
            return self.end_with([source])
        named = next((o for o in options if isinstance(o, (int, list, tuple))), ())
        axes = {a % columns.ndim for a in ([named] if isinstance(named, int) else named)}
        if all(columns.shape[a] == 1 for a in axes):
            kept = [n for a, n in enumerate(columns.shape) if a not in axes]
            sizes = kept if out.ndim < columns.ndim else columns.shape
            self._write(self.shadows, out, columns.view(sizes))
        else:  # a sum over experts, or in a loss
            self._join(columns, self._beneath(columns))
            self.end_with([source])

    def _choose(self, args: Any, result: Any, place: int) -> None:
        """What chooses among columns is the end of a router, what chooses among tokens is not."""
        columns = self._columns(args[0])
        axis = next((a for a in args[place:] if type(a) is int), -1)
        if columns is None or not columns.ndim:
            return
        if columns.shape[axis] > 1:
            self._settle(_sorted(columns), "choice")
        if isinstance(result, (tuple, list)) and len(result) == 2:
            chosen = columns.expand(args[0].shape).gather(axis, result[1])
            self._write(self.shadows, result[0], _condensed(chosen))

    def _channelwise(self, operation: str, source: Tensor, out: Tensor) -> None:
        """An operation on each channel leaves it its column."""
        columns = self._columns(source)
        if columns is None:
            return
        first = columns.shape[:2]
        if out.shape[:2] == source.shape[:2] and columns.numel() == prod(first):
            self._write(self.shadows, out, columns.view(*first, *[1] * (out.ndim - 2)))
        else:
            self._hide([source], operation)

    def _multiply(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """A product of `[..., rows, n]` and `[..., n, columns]`, or of a vector `[n]`."""
        summed = (left.ndim - 1, max(right.ndim - 2, 0))
        sides = (left, right)
        # Of two weights, the second one: the first is then a table of inputs.
        weight = next((i for i in (1, 0) if sides[i].untyped_storage() in self.weights), None)
        layer = weight is not None or any(t.untyped_storage() in self.parameters for t in sides)
        for i, axis in enumerate(summed):
            columns = self._columns(sides[i])
            if columns is None or i == weight:
                continue
            kind = "a layer" if layer else "attention"
            if columns.ndim > 1 and columns.shape[axis] == 1:  # the sum is over tokens
                self._consume(columns, 2 * columns.ndim - 3 - axis, kind)
                if weight is None and out.ndim == columns.ndim:
                    self._write(self.shadows, out, columns)
            else:
                self._consume(columns, axis, kind)
        if weight is not None and sides[weight].ndim > 1:
            axis = summed[weight]
            made = self._outputs(sides[weight], [axis], 2 * sides[weight].ndim - 3 - axis)
            self._made(out, made, out.ndim - 2 if weight == 0 and out.ndim > 1 else out.ndim - 1)

    def _outputs(self, weight: Tensor, summed: Iterable[int], kept: int) -> list[int]:
        """Return the numbers of the columns of a product that keeps one axis of a weight."""
        layout, view = self.weights[weight.untyped_storage()], Layout.of(weight)

        def along(axis: int, places: Iterable[int]) -> list[int]:
            return [layout.number(view.offset + i * view.strides[axis]) for i in places]

        lines = [along(a, {0, min(1, n := view.sizes[a] - 1), n}) for a in summed]
        inputs = {a for line in lines for use, own in self._parts(line) for a in _axes(use, own)}
        columns = []
        for use, own in self._parts(along(kept, range(view.sizes[kept]))):
            outputs = [a for a in _axes(use, own) if a not in inputs]
            use.inputs.add(tuple(sorted(inputs)))
            use.outputs.update(outputs)
            for number in own:
                places = use.places(number)
                columns.append(use.start + sum(places[a] * use.steps[a] for a in outputs))
        return columns

    def _convolve(self, out: Tensor, source: Tensor, weight: Tensor, *options: Any) -> None:
        """A convolution; its options are bias, stride, ..., transposed, padding, groups."""
        transposed, groups = options[4], options[6]
        # One weight a channel only scales it and mixes its neighbours.
        depthwise = groups > 1 and groups == source.shape[1] == out.shape[1]
        columns = self._columns(source)
        if depthwise and columns is not None:
            self._channelwise("convolution", source, out)
        elif columns is not None:
            self._consume(columns, 1, "a layer")
        if weight.untyped_storage() not in self.weights:
            return
        kept, use = int(transposed), self._use(weight)
        numbers = self._outputs(weight, [a for a in range(weight.ndim) if a != kept], kept)
        if transposed:
            use.groups = groups
            each = weight.shape[0] // groups * use.steps[0]
            numbers = [group * each + n for group in range(groups) for n in numbers]
        if groups > 1:
            size = len(numbers) // groups
            for start in range(0, len(numbers), size):
                self._settle(numbers[start : start + size], "a group")
        if not depthwise:
            self._made(out, numbers, 1)

    def _made(self, out: Tensor, columns: list[int], axis: int) -> None:
        """Note the columns that a product makes along an axis of its result."""
        start, step = columns[0], columns[-1] - columns[-2] if len(columns) > 1 else 0
        if columns == [start + i * step for i in range(len(columns))]:
            steps = tuple(step * (a == axis) for a in range(out.ndim))
            self.shadows[out.untyped_storage()] = Layout.of(out, start=start, steps=steps)
        else:
            numbers = torch.tensor(columns, device=out.device)
            self._write(self.shadows, out, numbers.view(-1, *[1] * (out.ndim - 1 - axis)))


def _tensors(values: Any) -> Iterator[Tensor]:
    if is_dataclass(values) and not isinstance(values, (type, Mapping)):
        values = vars(values)
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple, Mapping)):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _tensors(value)


def _fits(tensor: Tensor, out: Tensor) -> bool:
    """Whether each place of the result has one of the tensor."""
    wanted = out.shape[out.ndim - tensor.ndim :]
    return tensor.ndim <= out.ndim and all(
        n in (1, m) for n, m in zip(tensor.shape, wanted, strict=True)
    )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two broadcast to the same places and are equal there."""
    return bool((first == second).all())


def _sorted(numbers: Tensor) -> list[int]:
    return sorted({n for n in numbers.flatten().tolist() if n >= 0})


def _condensed(numbers: Tensor) -> Tensor:
    """Return one place of every axis along which no column changes; padding has none."""
    for axis in range(numbers.ndim if numbers.numel() > 1 else 0):
        if numbers.shape[axis] > 1:
            last = numbers.amax(axis, keepdim=True)
            if bool(((numbers == last) | (numbers < 0)).all()):
                numbers = last
    return numbers


def _axes(use: Use, numbers: Iterable[int]) -> list[int]:
    """Return the axes of a weight along which some elements differ."""
    places = zip(*map(use.places, numbers), strict=True)
    return [axis for axis, along in enumerate(places) if len({*along}) > 1]


# From sets of columns to a division.


def _verdict(use: Use, taken: set[int]) -> Seen:
    """Return what became of a weight; raises ValueError for what no division expresses."""
    if use.looked_up:
        return Seen(None, "its rows are looked up: a table", decays=False)
    if not use.inputs:
        return Seen(None, "no product uses it: a table", decays=False)
    if "choice" in use.sets:
        return Seen(None, "an operation chooses among its columns: a router")
    windows = [set(s) for s in use.sets["attention"]] if "attention" in use.sets else []
    if any(a & b and a - b and b - a for a, b in combinations(windows, 2)):
        return Seen(None, "windows of its outputs overlap: a table of positions", decays=False)
    division = _division(use) if use.outputs else Division()
    sides = [sizes_of(box)[int(division.stacked) :] for box in division.boxes(use.shape)]
    outputs = int(division.transposed)
    alone = use.start in taken and all(len(s) == 1 for kind in use.sets.values() for s in kind)
    if alone:
        return Seen(None, "its columns are taken one at a time: scalars")
    if not use.outputs or all(s[outputs] in (1, prod(s)) for s in sides):
        return Seen(None, "its matrices have a side of 1: vectors", decays=False)
    if not taken & {use.start, *use.joined}:
        if not use.ended:
            raise ValueError("nothing took its outputs, and the pass did not return them")
        return Seen(None, "its outputs reach no further layer: a head")
    return Seen(division, _reason(use))


def _division(use: Use) -> Division:
    axis, inputs = max(use.outputs), set().union(*use.inputs)
    stacked = axis > 0 and 0 not in inputs
    transposed = any(a < axis for a in inputs)
    allowed = {axis, 0} if stacked else {axis}
    others = {a for a, size in enumerate(use.shape) if size > 1} - inputs - allowed
    if len(use.inputs) > 1 or others or axis != stacked + transposed or axis in inputs:
        sums = " and ".join(map(str, sorted(use.inputs)))
        raise ValueError(f"products sum over its axes {sums} of shape {use.shape}")
    groups = use.groups if transposed else 1
    parts = use.shape[0] if stacked and 0 in use.outputs else groups
    each = use.shape[0] // parts
    size, rows = use.shape[axis], []
    for columns in set().union(*use.sets.values()):
        places = [use.places(column) for column in columns]
        rows.append({p[axis] + size * (p[0] // each if parts > 1 else 0) for p in places})
    # A column that is used alone may be in a matrix with others, unless it is a group's.
    joint = (r for r in rows if len(r) > 1 or "a group" in use.sets)
    labels, finest = (_labels(sets, parts * size) for sets in (joint, rows))
    pattern = _pattern(labels, finest, parts)
    if pattern is None:
        found = [[i for i, x in enumerate(labels) if x == label] for label in dict.fromkeys(labels)]
        shown = "; ".join(_ranges(indices) for indices in found[:4])
        raise ValueError(f"the outputs used together are no rows at a stride: {shown}")
    stride, lengths = pattern
    return Division(
        rows=lengths, transposed=transposed, stacked=stacked, stride=stride, groups=groups
    )


def _labels(sets: Iterable[set[int]], size: int) -> list[int]:
    """Return for each output the first one that every set has or lacks as well."""
    members: list[list[int]] = [[] for _ in range(size)]
    for i, indices in enumerate(sets):
        for index in indices:
            members[index].append(i)
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(m), i) for i, m in enumerate(members)]


def _pattern(
    labels: list[int], finest: list[int], parts: int
) -> tuple[int, tuple[int, ...]] | None:
    """Return the stride and the rows of matrices with these labels, None if there are none."""
    size = len(labels) // parts
    for stride in (n for n in range(1, size + 1) if size % n == 0):
        runs, rows = [], set()
        for start in (p * size + j for p in range(parts) for j in range(stride)):
            strided = range(start, (start // size + 1) * size, stride)
            own = [[*run] for _, run in groupby(strided, lambda i: labels[i])]
            rows.add(tuple(map(len, own)))
            runs += [{finest[i] for i in run} for run in own]
        if len(rows) > 1:
            continue
        (lengths,) = rows
        counts = Counter(label for run in runs for label in run)
        whole = [all(counts[label] == 1 for label in run) for run in runs]
        # Where heads lie one after another, what all of them have of another vector is cut too.
        period = _period([*zip(lengths, whole, strict=False)])
        if all(whole) or (stride == 1 and period < len(lengths) and any(whole[:period])):
            return stride, lengths[: _period(lengths)] if len(lengths) > 1 else ()
    return None


def _period(values: Any) -> int:
    """Return after how many values they repeat."""
    count = len(values)
    periods = (n for n in range(1, count) if count % n == 0)
    return next((n for n in periods if values == values[:n] * (count // n)), count)


def _ranges(indices: list[int]) -> str:
    """Return indices as `0-3, 8-11`."""
    spans: list[list[int]] = []
    for i in indices:
        if spans and i == spans[-1][1] + 1:
            spans[-1][1] = i
        else:
            spans.append([i, i])
    shown = ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans[:6])
    return shown + ", ..." * (len(spans) > 6)


def _reason(use: Use) -> str:
    outputs = prod(use.shape[a] for a in use.outputs) * use.groups
    taken = {kind: sorted({len(s) for s in sets}) for kind, sets in use.sets.items()}
    finest_first = sorted(taken.items(), key=lambda item: item[1])
    shown = {k: "all" if n == [outputs] else " and ".join(map(str, n[:4])) for k, n in finest_first}
    phrases = [f"{k} takes {n} columns at a time" for k, n in shown.items() if n != "all"]
    whole = [k for k, n in shown.items() if n == "all"]
    if not phrases:
        return f"{whole[0]} takes all columns" if whole else "its outputs end the model in a sum"
    return ", ".join([*phrases, *(f"{k} all" for k in whole[:1])])


# The pass.


def watch(model: nn.Module, weights: Mapping[str, Tensor], example: Any) -> dict[str, Seen]:
    """Return what one forward pass of an example shows of weights.

    Args:
        model: the model, whose buffers, modes and attributes are afterwards as they were.
        weights: some of its parameters of two dimensions or more.
        example: the arguments of the pass, a tensor, a tuple or a mapping, or a function that runs
            it.

    Raises:
        ValueError: weights that the pass did not use, that it cannot be seen through, or that no
            `Division` describes.
    """
    from .local_part import is_dtensor

    for name, weight in weights.items():
        if is_dtensor(weight) or weight.is_meta or nn.parameter.is_lazy(weight):
            kind = "sharded" if is_dtensor(weight) else "on the meta device or not yet initialised"
            raise ValueError(
                f"example needs a model that runs, and {name} is {kind}: split before sharding and "
                "give the sharded model the units that it shows, or leave out example"
            )
    watched = Watch(weights, model.parameters(), _tensors(example))
    with ExitStack() as stack:
        stack.enter_context(_undisturbed(model))
        for module in model.modules():
            if isinstance(module, parametrize.ParametrizationList):
                _skip(watched, module)
        model.register_forward_hook(lambda _, __, out: watched.end_with(_tensors(out)))
        stack.enter_context(watched)
        result = _run(model, example)
    watched.end_with(_tensors(result))
    seen, problems = {}, []
    uses = [record for record in watched.records if isinstance(record, Use)]
    kinds = {"attention", "a layer", "a product"}
    taken = {STREAM, *(use.start for use in uses if use.sets.keys() & kinds)}
    for use in uses:
        try:
            if not use.used:
                raise ValueError("the pass did not use it")
            if use.hidden:
                raise ValueError(f"{use.hidden} hides what becomes of its outputs")
            seen[use.name] = _verdict(use, taken)
        except ValueError as error:
            problems.append(f"{use.name}: {error}")
    if problems:
        raise ValueError(
            "\n".join(problems)
            + "\nsay how they are divided by units={name: {'rows': [n]}}, or {} "
            "for one matrix, give their modules as elementwise, or give an example that uses them"
        )
    return seen


def _run(model: nn.Module, example: Any) -> Any:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # of which every product is seen
        if isinstance(example, Mapping):
            return model(**example)
        elif isinstance(example, (tuple, list)):
            return model(*example)
        return example() if callable(example) else model(example)


def _skip(watched: Watch, computed: parametrize.ParametrizationList) -> None:
    """Take a computed weight for the parameter of its shape, and do not watch how it is made."""
    originals = [p for n, p in computed.named_parameters(recurse=False) if n.startswith("original")]

    def before(*_: Any) -> None:
        watched.paused = True

    def after(_: Any, __: Any, weight: Tensor) -> None:
        watched.paused = False
        for original in originals:
            if original.untyped_storage() in watched.weights and original.shape == weight.shape:
                watched.copied(weight, original)

    computed.register_forward_pre_hook(before)
    computed.register_forward_hook(after)


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Put back what a forward pass changes: attributes, buffers, random numbers, backends."""
    spaces = [vars(module) for module in model.modules()]
    attributes = [dict(space) for space in spaces]
    values = [value for space in attributes for value in space.values()]
    boxes = [v for v in values if isinstance(v, (dict, list, set))]
    contents = [box.copy() for box in boxes]
    tensors = [*model.buffers(), *(v for v in values if isinstance(v, Tensor))]
    copies = [t.detach().clone() for t in tensors]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    fast_path, state = torch.backends.mha.get_fastpath_enabled(), random.getstate()
    torch.backends.mha.set_fastpath_enabled(False)  # one operation for a whole layer
    try:
        with torch.random.fork_rng(devices), ExitStack() as stack:
            if "torch._dynamo" in sys.modules:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        random.setstate(state)
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for space, saved in zip(spaces, attributes, strict=True):
            space.clear()
            space.update(saved)
        for box, content in zip(boxes, contents, strict=True):
            box.clear()
            box.extend(content) if isinstance(box, list) else box.update(content)
        for tensor, copy in zip(tensors, copies, strict=True):
            if not torch.equal(tensor, copy):
                with torch.no_grad():
                    tensor.copy_(copy)
