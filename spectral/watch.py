"""Detects the matrices in weights from one forward pass.

A weight's name and shape do not reveal its matrices, but the use of its outputs does. The model is
therefore run once. The result of each matmul with a weight has a *shadow* (`shadow.py`): for each
element, the number of a column (an output of the weight). Operations propagate shadows:

    view, split, transpose      nothing to do: a shadow belongs to a storage, which views share
    cat, index, pad             the same operation moves the shadow
    silu, softmax, a norm       the result has the operand's shadow
    a + b, a sum, a vector norm each element has the columns of all terms

until an operation uses columns as one vector. These columns are then recorded as a set:

    a product with a weight     the columns of each input vector
    a product of activations    the columns of each inner product or, if it sums over tokens, of
                                each entry of the batch: attention's heads
    a * b, a ** b, min(a, b)    the columns of a, and the columns of b: a gated layer's halves
    a vector of a + b           the columns of a, and the columns of b, unless they share columns

A weight is an output head if its columns are in no set, a router if `topk` or a comparison with the
maximum chooses among its columns, and a table if it is not used in any product.

Start with `watch`, which runs the pass, and continue with `Watch`. The methods of `Watch` follow
operations in the order above and record sets of columns (`columns.py`). `Use.verdict`
(`weight_use.py`) converts the sets into a division.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial, reduce
from itertools import chain, permutations
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from .columns import Columns, Sums
from .local_part import is_dtensor
from .model_weights import Weight, listed
from .shadow import NONE, Shadows, condensed, is_strided, tensors_in
from .undisturbed import copied, undisturbed
from .weight_use import CHOICE, GROUP, INNER, LAYER, PRODUCT, Seen, Use

PRODUCTS = {"addmm": 1, "baddbmm": 1, "addmv": 1, "_grouped_mm": 0}
PRODUCTS |= dict.fromkeys(("mm", "bmm", "mv", "dot", "linalg_solve_triangular"), 0)
"""Maps operations that multiply two consecutive arguments to the position of the first argument."""
FILLS = ("where", "copy", "masked_fill")
ADDITIONS = ("add", "sub", "rsub", *FILLS)
"""Operations that combine activations without multiplying them."""
COPIES = ("clone", "_to_copy", "copy", "mul", "div")
"""Operations that copy or scale a weight if they have no second tensor operand."""
VECTORS = ("_cdist_forward", "_euclidean_dist", "_trilinear")
"""Operations that use the last axis of each operand as one vector."""
LOOKUPS = ("embedding", "_embedding_bag", "index", "index_select", "gather")
CHOICES = {"topk": 2, "multinomial": 4}
CHOICES |= dict.fromkeys(("sort", "argsort", "argmax", "argmin", "max", "min"), 1)
"""Maps operations that choose among columns to the position of their axis argument."""
COMPARISONS = ("eq", "ne", "ge", "gt", "le", "lt")
"""Operations that choose among columns if one operand is the maximum or minimum of the columns."""
ADDING_MOVES = {"index_add": "index_copy", "scatter_add": "scatter", "scatter_reduce": "scatter"}
"""Maps operations that combine values with elements to operations that overwrite the elements."""
MOVES = re.compile(
    r"cat|stack|(_unsafe_)?index(_select|_put|_copy|_add)?|gather|take|repeat|roll|flip|rot90"
    r"|im2col|constant_pad_nd|(reflection|replication)_pad\dd|(slice_|select_|masked_)?scatter"
    r"|scatter_(add|reduce)|masked_select|diagonal_copy|(pixel|channel)_(un)?shuffle|tril|triu|diag_embed|unfold_copy"
)
STAYS = re.compile(
    r"_to_copy|copy|_(log_|safe_)?softmax|(log)?cum(sum|prod|sumexp)|.*(layer|batch|group|rms)_norm.*"
    r"|_weight_norm_interface|native_dropout|leaky_relu|_prelu_kernel|log_sigmoid_forward|elu|hard\w+|rrelu.*|nan_to_num|masked_fill|fill|zero|fake_quantize_per_.*"
)
"""Operations that act on each element, or scale it, but lack torch's pointwise tag."""
EXTREMES = re.compile(r"a?(max|min)|prod|logsumexp")
"""Reductions other than sums. Reducing only some columns hides how all columns are used."""
REDUCTIONS = re.compile(
    r"(nan)?sum|mean|prod|a?max|a?min|(var|std)(_mean)?|logsumexp|(linalg_vector_)?norm"
)
NORMS = re.compile(r"(linalg_vector_)?norm|(var|std)(_mean)?|a?(max|min)")
"""Reductions that measure the size of a weight, and therefore only scale it."""
CHANNELWISE = re.compile(r".*(pool|upsample|grid_sampler).*")
"""Operations that act on each channel (the second axis)."""
SHAPES = re.compile(r".*(_like|new_).*")
"""Operations that only read the shape of an input."""
WAVES = ("sin", "cos", "polar")
"""Operations that turn positions in the example, but not activations, into rotations."""
ENDS = re.compile(r".*(loss|entropy|histc).*")
"""Operations whose results do not enter a layer."""


def watch(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    vectors: Mapping[str, Tensor],
    example: Any,
) -> Callable[[Weight], Seen]:
    """Run a forward pass. Return a function that returns the division of a weight.

    Args:
        model: the model. Parameters, gradients, buffers, modes and attributes (including lists,
            mappings and generators) are restored afterwards.
        weights: parameters with at least two dimensions.
        vectors: parameters that must not be used as matrices in a matmul.
        example: the model's arguments (a tensor, a tuple or a mapping), or a function that runs the
            pass.

    Raises:
        ValueError: if a weight is sharded or on the meta device, or if the pass creates parameters
            or uses a vector as a matrix. The returned function raises as `Use.verdict` does.
    """
    for name, weight in weights.items():
        if is_dtensor(weight) or weight.is_meta:
            kind = "sharded" if is_dtensor(weight) else "on the meta device"
            remedy = "before sharding it" if is_dtensor(weight) else "after materializing it"
            raise ValueError(
                f"the model cannot run on `example`, because parameter {name} is {kind}: split the "
                f"model {remedy}, or omit `example`"
            )
    if not callable(example):  # the pass may write to the example
        example = copied(example, {p.untyped_storage() for p in model.parameters()}, {})
    watched = Watch(weights, model.parameters(), filter(is_strided, tensors_in(example)))
    for name, vector in vectors.items():
        watched.facts(vector).vector = name if vector.numel() > 1 else ""
    with undisturbed(model):
        for module in model.modules():
            if isinstance(module, parametrize.ParametrizationList):
                _skip(watched, module)
        model.register_forward_hook(lambda _, __, out: watched.end_with(tensors_in(out)))
        known = {name for name, _ in model.named_parameters()}
        try:
            with watched:
                result = _run(model, example)
        finally:
            for storage, values in watched.before.items():
                storage.copy_(values)
        if made := [name for name, _ in model.named_parameters() if name not in known]:
            raise ValueError(
                f"the forward pass must not create parameters, got {', '.join(made)}: run the "
                "model once before splitting it"
            )
    watched.end_with(tensors_in(result))
    uses = [record for record in watched.numbers.records if isinstance(record, Use)]
    taken = {None, *(use for use in uses if use.sets.keys() & {INNER, LAYER})}
    if watched.flat:
        raise ValueError(listed(watched.flat))
    by_name = {use.name: use for use in uses}
    return lambda weight: by_name[weight.name].verdict(taken)


def _run(model: nn.Module, example: Any) -> Any:
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # MATH exposes attention's products
            if isinstance(example, Mapping):
                return model(**example)
            if isinstance(example, (tuple, list)):
                return model(*example)
            return example() if callable(example) else model(example)
    except Exception as error:
        error.add_note("raised in the forward pass on `example`: pass the model's arguments")
        raise


def _skip(watched: "Watch", computed: parametrize.ParametrizationList) -> None:
    """Treat a parametrized weight as its original parameter if both have the same shape."""

    def pause(*_: Any) -> None:
        watched.paused = True

    def resume(_: Any, __: Any, weight: Tensor) -> None:
        watched.paused = False
        for original in computed.parameters(recurse=False):
            if original in watched.weights and original.shape == weight.shape:
                watched.weights.copy(weight, original)

    computed.register_forward_pre_hook(pause)
    computed.register_forward_hook(resume)


class Origin(IntEnum):
    """The kind of inputs that values depend on. A result's origin is the largest of its operands'
    origins."""

    POSITIONS = 0
    EXAMPLE = 1  # the example's values
    ACTIVATIONS = 2  # values computed from the example, or random values
    SCALARS = 3  # scalar parameters, a layer's only output, or scores of vectors
    PARAMETERS = 4


@dataclass(eq=False)
class Facts:
    """Properties of the values in a storage, except for their columns."""

    origin: Origin = Origin.POSITIONS
    is_parameter: bool = False
    is_active: bool = False  # whether the values depend on the example, unlike a computed weight
    is_product: bool = False  # whether parameters alone are multiplied: a table's rows, or a weight
    scaled: frozenset[Use] = frozenset()  # weights combined with activations or with each other
    is_softmax: bool = False  # whether the values are computed elementwise from a softmax
    vector: str = ""  # the name of the vector that the values belong to
    factors: "Sequence[Side]" = ()  # of a * b
    terms: "Sequence[Side]" = ()  # of f(a + b)
    # Columns and axes of the vectors whose inner products the values are computed from.
    scored: frozenset[tuple[Tensor, frozenset[int]]] = frozenset()
    # For a maximum or its index: the columns, and whether only a comparison chooses among them.
    chosen: tuple[Tensor, bool] | None = None


class Side(NamedTuple):
    """An operand of an elementwise operation, with as many axes as the result."""

    tensor: Tensor
    facts: Facts
    columns: Tensor | None
    shape: tuple[int, ...]
    counts: bool  # whether it is an activation rather than a position, gain or other constant

    @property
    def moving(self) -> list[int]:
        """The axes along which columns change."""
        return [] if self.columns is None else _moving(self.columns)

    def axes(self, other: "Side") -> tuple[set[int], set[int]]:
        """The axes that both operands have, and the axes that only this operand has."""
        pairs = [*enumerate(zip(self.shape, other.shape, strict=True))]
        shared = {axis for axis, (n, m) in pairs if n > 1 < m}
        return shared, {axis for axis, (n, m) in pairs if n > 1 == m}

    def vectors(self, other: "Side") -> list[int]:
        """The axes of the vectors that are each multiplied by a single element of `other`.

        In attention, for example, a weight multiplies the value vector of a head.
        """
        along = [axis for axis in self.moving if other.shape[axis] == 1]
        return along if len(along) < len(self.moving) else []


class Watch(TorchDispatchMode):
    """Dispatch mode that follows the outputs of weights through a forward pass."""

    supports_higher_order_operators = True

    def __init__(
        self, weights: Mapping[str, Tensor], parameters: Iterable[Tensor], inputs: Iterable[Tensor]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.paused = False
        self.numbers = Columns()
        self.columns, self.weights = Shadows(), Shadows()  # of activations, and of weights
        self.before: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # original parameter values
        self.known: WeakKeyDictionary[Any, Facts] = WeakKeyDictionary()
        self.flat = dict[str, str]()  # uses of vectors as matrices
        for name, weight in weights.items():
            if weight in self.weights:
                raise ValueError(
                    f"{name} shares its storage with another weight, so the uses of the two "
                    "weights cannot be distinguished: store each weight in a separate tensor "
                    "(p.data = p.data.clone()), or omit `example`"
                )
            start = self.numbers.end
            end = start + self.weights.number(weight, start)
            self.numbers.records.append(Use(name, tuple(weight.shape), weight.stride(), start, end))
        for p in parameters:
            origin = Origin.SCALARS if p.numel() == 1 else Origin.PARAMETERS
            self.known[p.untyped_storage()] = Facts(origin, is_parameter=True)
        for t in inputs:
            facts = self.facts(t)
            facts.is_active = True
            if t.is_floating_point():
                facts.origin = Origin.EXAMPLE

    def facts(self, tensor: Tensor) -> Facts:
        """Return the `Facts` of a tensor's storage."""
        return self.known.setdefault(tensor.untyped_storage(), Facts())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation, and propagate the shadows of its operands."""
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):
            self._hide(tensors_in((args, kwargs)), str(func))
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "the forward pass must not run in inference mode, because matrix products cannot "
                "be observed there: use torch.no_grad"
            )
        written = tensors_in((args, kwargs)) if func._schema.is_mutable else []
        for t in filter(is_strided, written):
            storage = t.untyped_storage()
            if self.facts(t).is_parameter and storage not in self.before:
                self.before[storage] = storage.clone()
        result = func(*args, **kwargs)
        if not (self.paused or func.is_view):  # views share the shadow of their storage
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        name, results = func.overloadpacket.__name__, tensors_in(result)
        operands = [] if SHAPES.match(name) else tensors_in((args, kwargs))
        if not all(map(is_strided, (*operands, *results))):
            return self._hide(filter(is_strided, operands), f"{func} of sparse tensors")
        weights = [t for t in operands if t in self.weights]
        tracked = [t for t in operands if t.numel() and t in self.columns]
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._derive_facts(name, operands, results, bool(tracked), random)
        if name in PRODUCTS or name in COPIES:
            self._watch_vectors(name, operands, results)
        factors = [facts for t in operands[:1] for facts in self.facts(t).factors]
        if not (weights or tracked or (factors and name in ("sum", "mean", *COPIES))):
            return
        if in_place := bool(re.search("[^_]_$", name)):
            name = name[:-1]
        for use in map(self._use, weights):
            use.used = True
            use.looked_up |= name in LOOKUPS and len(use.shape) == 2 and not MOVES.fullmatch(name)
            use.idle |= not any(t.numel() for t in results)
        old = set() if in_place else {t.untyped_storage() for t in operands}
        fresh = [t for t in results if t.numel() and t.untyped_storage() not in old]
        indices = [t for t in tracked if not _is_continuous(t)]
        acts_on_each = STAYS.fullmatch(name) or torch.Tag.pointwise in func.tags
        line = bool(fresh) and sum(n > 1 for n in fresh[0].shape) < 2  # one number for each row
        chooses = name in CHOICES and (isinstance(result, tuple) or name not in ("max", "min"))
        if tracked and chooses:
            self._choose(name, args, result)
        elif not fresh or torch.Tag.inplace_view in func.tags:
            return  # a view, or an operation without columns
        elif indices and name in LOOKUPS:
            self._hide(indices, f"{func}, which uses the outputs as an index,")
        elif not _is_continuous(fresh[0]):
            if acts_on_each:
                self._stay("where", tracked, fresh[0])
            elif name == "sum":
                self._reduce(name, args[0], args[1:], fresh[0])
            elif fresh[0].dtype != torch.bool and fresh[0].numel() > 1:
                self._hide(operands, str(func))
        elif tracked and name.startswith("_fft_"):
            self._transform(args[0], args[1], fresh[0])
        elif any(t.is_complex() for t in operands) and not acts_on_each:
            kind = "a product" if name in PRODUCTS else str(func)
            self._hide(operands, f"{kind} of complex numbers")
        elif name in PRODUCTS:
            first = PRODUCTS[name]
            self._multiply(args[first], args[first + 1], fresh[0])
        elif name in VECTORS:
            for operand in operands:
                self.numbers.consume(self.columns.read(operand), [-1], INNER)
            self._hide(weights if name == "_trilinear" else [], "a bilinear form")
        elif name == "convolution":
            self._convolve(fresh[0], *args)
        elif name.startswith("_scaled_dot_product") and fresh[0].ndim == 4:
            self._attend(fresh[0], *args[:3])
        elif name == "glu":
            self._stay("mul", args[0].chunk(2, *(args[1:] or (-1,))), fresh[0])
        elif MOVES.fullmatch(name):
            self._move(name, args, kwargs, fresh[0])
        elif acts_on_each:
            for out in fresh:
                self._stay(name, operands[name == "copy" :], out)
        elif (not weights or NORMS.fullmatch(name) or line) and REDUCTIONS.fullmatch(name):
            self._reduce(name, args[0], args[1:] or [*kwargs.values()], fresh[0])
        elif tracked and CHANNELWISE.match(name):
            self._channelwise(str(func), args[0], fresh[0])
        elif tracked and ENDS.match(name):
            self.end_with(tracked, loss=True)
        elif name not in LOOKUPS and max(t.numel() for t in fresh) > 1:
            self._hide(operands, str(func))

    def _derive_facts(
        self, name: str, operands: list[Tensor], results: list[Tensor], tracked: bool, random: bool
    ) -> None:
        """Derive the facts about results, and record choices that read a maximum or its index."""
        known = [*map(self.facts, operands)]
        for columns, compared in (facts.chosen for facts in known if facts.chosen):
            if name in COMPARISONS or not compared:
                self.numbers.consume(columns, range(columns.ndim), CHOICE)
        origin = max((facts.origin for facts in known), default=Origin.POSITIONS)
        if name.rstrip("_") in WAVES and origin < Origin.SCALARS:
            origin = Origin.POSITIONS
        if name in PRODUCTS and results[0].shape[-1:] == (1,) and any(f.vector for f in known):
            origin = Origin.SCALARS
        active = tracked or any(facts.is_active for facts in known)
        scaled = frozenset[Use]().union(*(facts.scaled for facts in known))
        scored = frozenset[Any]().union(*(facts.scored for facts in known))
        if name in PRODUCTS or name == "convolution":
            layer = any(self.facts(t).is_parameter for t in operands if t.ndim > 1)
            for use in [] if layer else scaled:
                use.hidden = use.hidden or "a weight computed from activations or several weights"
        if not (name.rstrip("_") in (*COPIES, *ADDITIONS) or MOVES.fullmatch(name)):
            scaled = frozenset()  # a decay, for example, is no weight
        replaced = name[-1] == "_" != name[-2] and (name[:-1] not in COPIES or len(operands) > 1)
        ones = [t for t in operands if t.numel() > 1 == t.shape[-1]] if len(operands) > 1 else []
        bends = origin == Origin.SCALARS and any(self.facts(t).origin == origin for t in ones)
        if bends and results[0].shape[-1:] != (1,):  # a layer's only output scales activations
            origin = Origin.PARAMETERS
        for facts in map(self.facts, results):
            facts.factors = () if replaced else facts.factors
            facts.scaled |= scaled
            facts.scored |= scored if name not in (*PRODUCTS, "convolution") else frozenset()
            facts.origin = max(origin, Origin.ACTIVATIONS) if origin or random else facts.origin
            facts.is_active |= active

    def _watch_vectors(self, name: str, operands: list[Tensor], results: list[Tensor]) -> None:
        """Record a matmul that uses a vector, or a copy of it, as a matrix."""
        for t in operands:
            vector = self.facts(t).vector
            if not vector or t.numel() * t.element_size() > t.untyped_storage().nbytes():
                continue  # repeated, as a token is for each entry of a batch
            if name in COPIES and sum(other.numel() > 1 for other in operands) == 1:
                self.facts(results[0]).vector = vector
            elif name in PRODUCTS and t.ndim > 1 and min(t.shape[-2:]) > 1:
                shape = "x".join(map(str, t.shape[-2:]))
                self.flat[vector] = (
                    f"a product uses a part of this vector as a {shape} matrix: store each "
                    "matrix as a parameter [out, in], or pass the vector as elementwise"
                )

    def _use(self, weight: Tensor) -> Use:
        shadow = self.weights[weight]
        start = shadow.start if shadow.values is None else shadow.values.max()
        use = self.numbers.record(start)
        assert isinstance(use, Use)
        return use

    def _hide(self, operands: Iterable[Tensor], operation: str, uses: Iterable[Use] = ()) -> None:
        """Mark as hidden the weights of operands and uses, and the tables that these weights
        multiply."""
        for t in operands:
            own = {self._use(t)} if t in self.weights else set[Use]()
            uses = {*uses, *(self.numbers.beneath(self.columns.read(t)) or own)}
        for each in chain(uses, *(use.tables for use in uses)):
            each.hidden = each.hidden or operation

    def end_with(self, tensors: Iterable[Tensor], loss: bool = False) -> None:
        """Record that the model returns `tensors` or, if `loss`, that the tensors enter a loss."""
        for t in filter(is_strided, tensors):
            for vectors, axes in self.facts(t).scored if t.numel() > 1 and not loss else ():
                self.numbers.consume(vectors, axes, INNER)
            for use in self.numbers.beneath(columns := self.columns.read(t)):
                term = loss or (columns is not None and self._is_statistic(columns))
                use.in_loss, use.returned = use.in_loss or term, use.returned or not term

    def _stay(self, name: str, operands: Iterable[Tensor], out: Tensor) -> None:
        """Follow an elementwise operation, whose result has the columns of its operands."""
        sides = [self._side(t, out) for t in operands if _broadcasts(t, out)]
        whole = [side for side in sides if side.tensor.shape == out.shape]
        distinct, full, result = self._distinct(sides), whole or sides, self.facts(out)
        self._choose_weights(name, sides, out)
        result.is_softmax |= name.endswith("softmax") or any(s.facts.is_softmax for s in sides)
        nothing = out.new_empty(0)  # activations must not be kept alive
        kept = [s if s.tensor in self.weights else s._replace(tensor=nothing) for s in sides]
        if name == "mul" and len(sides) == 2:
            result.factors = kept
        elif name in COPIES and len(full) == 1:
            result.factors = sides[0].facts.factors
        if not distinct:
            return self._copy_weight(sides, whole, out)
        self._multiply_weights(name, sides, result)
        # Positions and gains only scale columns; activations multiply vectors or whole tensors.
        scales = len(distinct) > 1 or any(s.counts and s.columns is None for s in full)
        factors = [s for s in sides if s.columns is None and s.counts and s.facts.is_active]
        scales |= any(side.vectors(factor) for side in sides for factor in factors)
        parts = [s for s in sides if s.columns is not None and self._is_part(s.columns)]
        scales |= any({f.shape[axis] for axis in s.moving} == {1} for s in parts for f in factors)
        if scales and name not in ADDITIONS:
            for side, other in permutations(sides, 2):
                self._scale(side, other)
            distinct = self._distinct(full) or distinct
        elif name in ("add", "sub") and len(whole) > 1 and len(distinct) == 1:
            streams = [_is_stream(s.facts.origin, name) for s in whole if s.columns is None]
            for use in self.numbers.beneath(distinct[0]) if streams and all(streams) else ():
                use.joined.add(None)
        # A table's rows are compared with each token, whereas a bias is added to each token.
        compared = len(sides) == 2 and all(s.axes(other)[1] for s, other in permutations(sides))
        result.terms = kept if name in ("add", "sub") and (compared or len(distinct) > 1) else ()
        if len(distinct) == 1 and not result.terms:
            result.terms = next((s.facts.terms for s in full if s.facts.terms), ())
        joined = partial(self.numbers.joined, terms=name in ADDITIONS)
        self.columns.write(out, reduce(joined, distinct))

    def _copy_weight(self, sides: Sequence[Side], whole: Sequence[Side], out: Tensor) -> None:
        """Follow an elementwise operation on a weight: the result is a weight, too."""
        weights = [s.tensor for s in sides if s.tensor in self.weights]
        several = {self._use(t) for t in weights if sum(n > 1 for n in t.shape) > 1}
        self.facts(out).scaled |= several if len(several) > 1 else set()
        chosen = any(s.facts.is_active and s.tensor.dtype != torch.bool for s in whole)
        alone = sum(side.tensor.numel() > 1 for side in sides) == 1
        weight = next((t for t in weights if t.shape == out.shape), None)
        if weight is None:
            return
        self.facts(out).is_active &= chosen
        if not chosen or (alone and len(self._use(weight).shape) > 2):
            self.weights.copy(out, weight)

    def _multiply_weights(self, name: str, sides: Sequence[Side], result: Facts) -> None:
        """Follow products of parameters. Mark the factors of a computed weight as hidden."""
        computed = [side.tensor for side in sides if side.facts.is_product]
        known = [s for s in sides if s.facts.is_parameter or s.tensor in self.weights]
        matrices = [s.tensor for s in known if sum(n > 1 for n in s.shape) > 1]
        if computed and len(computed + matrices) > 1 and name not in FILLS:
            operation = f"a {'sum' if name in ADDITIONS else 'product'} with a weight"
            self._hide(computed + matrices, operation)
        if computed and all(side.facts.is_product for side in sides if side.facts.is_active):
            result.is_product = True

    def _scale(self, side: Side, other: Side) -> None:
        """Record the vectors of columns that another operand multiplies."""
        if side.columns is None:
            return
        axes = side.vectors(other) or side.moving
        if other.columns is not None and axes:
            scaled = (self.numbers.adds_matrices(other.columns, axis) for axis in axes)
            axes = [] if all(scaled) else axes  # a single factor per matrix
        self.numbers.consume(side.columns, axes, PRODUCT)
        if axes == side.moving and other.vectors(side) and self._sums(side.columns):
            self.numbers.consume(side.columns, [], PRODUCT)  # a score for each head

    def _distinct(self, sides: Iterable[Side]) -> list[Tensor]:
        """Return the distinct columns of operands, except sums that only scale other operands."""
        distinct: list[Tensor] = []
        known = [side.columns for side in sides if side.columns is not None]
        for columns in sorted(known, key=Tensor.numel, reverse=True):
            own = self.numbers.beneath(columns) if self._is_statistic(columns) else None
            scales = any(
                own == self.numbers.beneath(d) and not self._apart(columns, d) for d in distinct
            )
            if not (scales or any(bool((columns == other).all()) for other in distinct)):
                distinct.append(columns)
        return distinct

    def _is_statistic(self, columns: Tensor) -> bool:
        """Return whether all elements have the number of a single sum, such as a vector norm."""
        return columns.numel() == 1 and self._sums(columns)

    def _is_part(self, columns: Tensor) -> bool:
        """Return whether columns are part of a weight's columns, such as those of a head."""
        use = self.numbers.record(columns.max())
        return isinstance(use, Use) and 1 < columns.numel() < use.count

    def _apart(self, statistic: Tensor, columns: Tensor) -> bool:
        """Return whether `columns` are part of a weight and none are in the sum `statistic`.

        A head's score, for example, contains columns of queries and keys, but no columns of values.
        """
        if not self._is_part(columns):
            return False
        return self.numbers.leaves(int(statistic.max())).isdisjoint(columns.flatten().tolist())

    def _sums(self, columns: Tensor) -> bool:
        """Return whether some columns are sums."""
        return isinstance(self.numbers.record(columns.max()), Sums)

    def _choose_weights(self, name: str, sides: Sequence[Side], out: Tensor) -> None:
        """Record the weights that activations choose or modify.

        A weight is marked as hidden if activations multiply its whole matrices, as in a mixture of
        weights. If activations scale or shift rows or columns instead, the weight is recorded in
        the result's `Facts.scaled`.
        """
        for side, factor in permutations(sides, 2):
            _, kept = side.axes(factor)
            chosen = factor.columns is not None or factor.facts.is_active
            if side.tensor in self.weights and chosen:
                if len(kept) > 1 and name == "mul":
                    operation = "a product with activations, which may choose a weight,"
                    self._hide([side.tensor], operation)
                elif kept and side.tensor.shape != out.shape:
                    self.facts(out).scaled |= {self._use(side.tensor)}

    def _side(self, tensor: Tensor, out: Tensor) -> Side:
        """Wrap an operand of an elementwise operation in a `Side`."""
        columns, missing = self.columns.read(tensor), [1] * (out.ndim - tensor.ndim)
        if tensor.dtype == torch.bool and _is_continuous(out):
            columns = None  # a mask
        if columns is not None:
            if out.is_complex() != tensor.is_complex():
                columns = columns[..., None] if out.is_complex() else columns[..., 0]
            columns = columns.view(*missing, *columns.shape)
        facts, varies = self.facts(tensor), tensor.numel() > 1
        live = facts.origin > 0 and not isinstance(tensor, nn.Parameter)
        shape = (*missing, *tensor.shape, *[1] * out.is_complex())
        return Side(tensor, facts, columns, shape, counts=columns is not None or (live and varies))

    def _move(self, name: str, args: Any, kwargs: Any, out: Tensor) -> None:
        """For an operation that moves elements, move their columns or numbers in the same way."""
        moves_columns = any(t in self.columns for t in tensors_in(args))
        shadows = self.columns if moves_columns else self.weights

        def numbers(t: Any) -> Any:
            if isinstance(t, (list, tuple)):
                return [numbers(each) for each in t]
            if not isinstance(t, Tensor) or not t.is_floating_point():
                return 0.0 if isinstance(t, float) else t
            known = shadows.read(t)
            known = torch.full((), NONE, device=t.device).double() if known is None else known
            return (known - NONE).expand(t.shape)  # zero-filled elements have no columns

        moved, there = [numbers(a) for a in args], None
        if name in ADDING_MOVES:
            name, there, kwargs = ADDING_MOVES[name], moved[0] + NONE, {}
            moved[0] = torch.zeros_like(there)
        lengths = {"constant_pad_nd": 2, "index_put": 3, "scatter": 4}
        moved = moved[: lengths.get(name)]  # no fill value, flag or kind of reduction
        result = getattr(torch.ops.aten, name)(*moved, **kwargs) + NONE
        if shadows is self.weights and name in LOOKUPS:
            self._look_up(args[0], moved[0] + NONE, result)
        shadows.write(
            out, condensed(result if there is None else self.numbers.joined(there, result))
        )

    def _look_up(self, source: Tensor, numbers: Tensor, chosen: Tensor) -> None:
        """Record the weights whose rows are indexed, and stacked weights that are left out."""
        ordered = torch.equal(numbers.flatten(), chosen.flatten())
        known = chosen[chosen >= 0].sort().values.long().cpu()
        taken = [*self.numbers.uses(known)]
        for use, own in taken if source.ndim < 3 else ():
            use.looked_up |= use.looks_up(own, ordered)
        firsts = numbers.flatten(1)[:, :1] if source.ndim > 2 else known
        for use, _ in self.numbers.uses(firsts.flatten().unique().long().cpu()):
            use.idle |= use not in {use for use, _ in taken}

    def _reduce(self, name: str, source: Tensor, options: Any, out: Tensor) -> None:
        """Follow a reduction, which keeps columns that are constant along the reduced axes."""
        lists = [o for o in options if isinstance(o, (list, tuple))]
        given = lists[0] if lists else [o for o in options if type(o) is int][:1]
        axes = {axis % source.ndim for axis in given}
        columns = self.columns.read(source)
        if (name in ("sum", "mean") and self._contract(source, axes, out)) or columns is None:
            return
        branches = bool(axes) and all(self.numbers.adds_matrices(columns, axis) for axis in axes)
        sums = name == "sum" or (name == "mean" and branches)
        sides = self.facts(source).factors
        if sides and name in ("sum", "mean"):
            viewed = len(sides[0].shape) != source.ndim
            if sums and axes and not viewed and self._inner(sides, axes):
                return
            if not viewed and self._are_scored(sides, axes):
                vectors = (s.columns for s in sides if s.columns is not None)
                self.facts(out).scored |= {(v, frozenset(axes)) for v in vectors if v.numel() > 1}
            for factor in [columns] if viewed else [side.columns for side in sides]:
                if factor is not None and self._is_headwise(factor, axes):
                    self.numbers.consume(factor, axes, PRODUCT)
        rest = any(n > 1 for axis, n in enumerate(columns.shape) if axis not in axes)
        terms = self.facts(source).terms  # as in a distance of two vectors
        if terms and (not rest or (sums and self._is_headwise(columns, axes))):
            viewed = len(terms[0].shape) != source.ndim
            for term in [columns] if viewed else [side.columns for side in terms]:
                self.numbers.consume(term, axes, PRODUCT)
        if name in ("amax", "amin", "max", "min") and any(columns.shape[a] > 1 for a in axes):
            self.facts(out).chosen = columns, True
        if out.numel() == 1:
            self.end_with([source], loss=True)
        elif sums or not rest or all(columns.shape[a] == 1 for a in axes):
            columns = self._folded(columns, axes)
            kept = out.ndim == columns.ndim
            self.columns.write(out, columns if kept else columns.squeeze(tuple(axes)))
        elif EXTREMES.fullmatch(name):
            self._hide([source], f"{name} of part of the outputs")

    def _contract(self, source: Tensor, axes: set[int], out: Tensor) -> bool:
        """Follow a sum of products with a weight over `axes` if it computes a matmul."""
        for side, other in permutations(self.facts(source).factors, 2):
            shared, kept = side.axes(other)
            viewed = len(side.shape) != source.ndim
            if viewed or side.tensor not in self.weights or not (kept and shared & axes):
                continue
            unclear = shared != axes or len(kept) > 1 or not source.is_contiguous()
            if unclear or other.tensor in self.weights or not {*other.moving} <= axes:
                beneath = self.numbers.beneath(other.columns)
                self._hide([side.tensor, other.tensor], "a sum of products", beneath)
                continue
            missing, (axis,) = source.ndim - side.tensor.ndim, kept
            summed = [a - missing for a in axes]
            columns = self._outputs(side.tensor, summed, axis - missing)
            self.numbers.consume(other.columns, axes, LAYER)
            dropped = out.ndim < source.ndim and sum(a < axis for a in axes)
            self._made(out, columns[None], axis - dropped)
            return True
        return False

    def _inner(self, sides: Sequence[Side], axes: set[int]) -> bool:
        """Follow a sum of an elementwise product over `axes` if it computes inner products.

        The sum computes inner products if one factor is a parameter, if the factors broadcast along
        different token axes as in attention, or if one factor is a state of outer products.
        """
        first, second = sides
        if first.facts.is_parameter or second.facts.is_parameter:
            inner = all(s.facts.is_parameter or axes <= {*s.moving} for s in sides)
            inner &= all(s.shape[axis] > 1 for s in sides for axis in axes)
        else:
            pairs = [*zip(first.shape, second.shape, strict=True)]
            inner = axes <= {*first.moving} and first.moving == second.moving
            inner &= any(a < b for a, b in pairs) and any(a > b for a, b in pairs)
            inner |= axes <= {*first.moving} & {*second.moving} and any(
                self._is_outer(side.columns, constant, axes)
                for side, other in permutations(sides)
                if side.columns is not None and (constant := side.vectors(other))
            )
        for side in sides if inner else ():
            self.numbers.consume(side.columns, axes, INNER)
        return inner

    def _are_scored(self, sides: Sequence[Side], axes: set[int]) -> bool:
        """Return whether a sum of an elementwise product may score one vector by another.

        The vectors are outputs of layers or rows of embeddings, but not probabilities. The scores
        are inner products if the model returns them instead of a loss.
        """
        first, second = (side.facts for side in sides)
        made = (
            side.columns is not None
            or (
                side.facts.origin == Origin.PARAMETERS
                and not side.facts.is_parameter
                and any(n > 1 for axis, n in enumerate(side.shape) if axis not in axes)
            )
            for side in sides
        )
        return first is not second and all(made) and not (first.is_softmax or second.is_softmax)

    def _is_outer(self, columns: Tensor, constant: list[int], axes: set[int]) -> bool:
        """Return whether one term of the sums changes along `axes` but not along `constant`."""
        moving = [steps.keys() for steps in self._steps(columns)]
        return any(axes <= own and own.isdisjoint(constant) for own in moving)

    def _is_headwise(self, columns: Tensor, axes: set[int]) -> bool:
        """Return whether a sum of products over `axes` adds consecutive, but not all, columns.

        Such sums are inner products of heads, as between the two nodes of each edge in a graph.
        """
        steps = [own for own in self._steps(columns) if len(own) > len(axes)]
        firsts = ({*sorted(own, key=own.__getitem__)[: len(axes)]} for own in steps)
        return bool(axes) and axes in firsts

    def _steps(self, columns: Tensor) -> Iterator[dict[int, float]]:
        """Yield the smallest change along each changing axis, for columns and each of their
        terms."""
        terms, seen = [columns], set[int]()
        for term in terms:
            moving = [a for a in range(term.ndim) if bool((term != term.narrow(a, 0, 1)).any())]
            yield {axis: float(term.diff(dim=axis).abs().min()) for axis in moving}
            record = self.numbers.record(term.max())
            if isinstance(record, Sums) and record.start not in seen and term.min() >= record.start:
                seen.add(record.start)
                terms += record.pairs[term.long().cpu() - record.start].unbind(-1)

    def _folded(self, columns: Tensor, axes: Iterable[int]) -> Tensor:
        """Return the columns of a tensor after summation along axes."""
        for axis in axes:
            while (size := columns.shape[axis]) > 1:  # sum the halves
                first, between, second = columns.split([size // 2, size % 2, size // 2], axis)
                columns = torch.cat([self.numbers.joined(first, second), between], axis)
        return columns

    def _choose(self, name: str, args: Any, result: Any) -> None:
        """Follow a choice. A choice among columns, rather than tokens, indicates a router."""
        columns = self.columns.read(args[0])
        axis = next((a for a in args[CHOICES[name] :] if type(a) is int), -1)
        if columns is None or not columns.ndim:
            return
        among = columns.shape[axis] > 1
        if name in ("max", "min"):  # a choice only if a later operation reads the indices
            self._reduce(name, args[0], [axis], result[0])
            if among:
                self.facts(result[1]).chosen = columns, False
            return
        if isinstance(result, (tuple, list)):
            self.columns.write(result[0], columns.narrow(axis, 0, 1))
        if among:
            self.numbers.consume(columns, range(columns.ndim), CHOICE)

    def _channelwise(self, operation: str, source: Tensor, out: Tensor) -> None:
        """Follow a channelwise operation, which keeps the columns of each channel."""
        columns = self.columns.read(source)
        if columns is None:
            return
        first = columns.shape[:2]
        if out.shape[:2] == source.shape[:2] and columns.numel() == prod(first):
            self.columns.write(out, columns.view(*first, *[1] * (out.ndim - 2)))
        else:
            self._hide([source], operation)

    def _transform(self, source: Tensor, axes: list[int], out: Tensor) -> None:
        """Follow a Fourier transform, which keeps or adds the columns along each axis."""
        columns = self.columns.read(source)
        if columns is None:
            return
        columns = columns if source.is_complex() else columns[..., None]
        added = [axis for axis in (*(a % source.ndim for a in axes), -1) if columns.shape[axis] > 1]
        if added:
            self.numbers.consume(columns, added, PRODUCT)
            columns = self._folded(columns, added)
        self.columns.write(out, columns if out.is_complex() else columns[..., 0])

    def _multiply(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Follow a matmul of `[..., rows, n]` and `[..., n, columns]`; either operand may be a
        vector `[n]`."""
        # If both are weights, the first is a table of inputs, or a factor of a weight.
        weight = next((t for t in (right, left) if t in self.weights), None)
        if left in self.weights and self.facts(right).is_parameter:
            if weight is not right:
                return self._hide([left], "a product with a frozen weight or an embedding")
            self._use(right).tables.add(self._use(left))
            self.facts(out).is_product = True
        layer = weight is not None or any(self.facts(t).is_parameter for t in (left, right))
        if not layer and prod(out.shape[:-2]) == 1 and self.facts(right).is_product:
            self._hide([right], "a matmul with a product of two weights")
        depthwise = self._take(left, right, out, weight, layer)
        scores = not layer and all(t in self.columns for t in (left, right))
        if scores and out not in self.columns:  # a head's outputs may be added to them
            self.facts(out).origin = Origin.SCALARS
        if weight is not None and weight.ndim > 1:
            self._give(weight, int(weight is not right), out, depthwise)

    def _take(
        self, left: Tensor, right: Tensor, out: Tensor, weight: Tensor | None, layer: bool
    ) -> bool:
        """Follow the columns that a matmul uses. Return whether the matmul only scales each
        column."""
        depthwise, kept, kind = False, list[Tensor](), LAYER if layer else INNER
        axes = left.ndim - 1, max(right.ndim - 2, 0)
        read = [None if t is weight else self.columns.read(t) for t in (left, right)]
        for i, axis in enumerate(axes):
            columns, other = read[i], read[1 - i]
            if columns is None:
                continue
            by_entry = columns.ndim == 3 and columns[0].numel() == 1 < len(columns)
            if layer and by_entry and out.shape[2 - i] == 1:
                depthwise = True  # one vector per column only scales that column
                kept.append(columns)
                continue
            own = kind
            if columns.ndim > 1 and columns.shape[axis] == 1:  # the sum is over tokens
                axis, own = 2 * columns.ndim - 3 - axis, LAYER if layer else PRODUCT
                if weight is not None and columns.numel() > 1:
                    self._use(weight).mixed |= self.numbers.beneath(columns)
                elif weight is None and out.ndim == columns.ndim:
                    kept.append(columns)
            for use in self.numbers.beneath(columns) if not layer else ():
                for mixed in use.mixed:
                    mixed.hidden = mixed.hidden or "a layer over tokens before attention"
            used = [[0]] if by_entry and own == PRODUCT else self._mixed(columns, axis, kind)
            if axis not in chain(*used) and out.ndim == columns.ndim:
                kept.append(self._folded(columns, [axis]))
            scales = other is not None and self.numbers.adds_matrices(other, axes[1 - i])
            scores = by_entry and own == PRODUCT and self._sums(columns)  # one for each head
            for vectors in [[]] if scales else [*used, *[[]] * scores]:
                self.numbers.consume(columns, vectors, own)
        if kept:  # other columns only scale vectors
            both = (c for c in kept if {*_moving(c)} >= {*_moving(kept[-1])})
            self.columns.write(out, reduce(self.numbers.joined, both))
        return depthwise

    def _give(self, weight: Tensor, axis: int, out: Tensor, depthwise: bool) -> None:
        """Record the outputs of a matmul that sums over an axis of a weight's matrices."""
        parts = weight.unbind() if weight.ndim == 3 else (weight,)
        alike = True  # whether entries begin and end at the same places of the same weights
        if self.weights[weight].values is not None:
            numbers = self.weights.read(weight)
            if numbers is None or bool((numbers < 0).any()):
                return self._hide([weight], "a matmul with a padded weight")
            rows, cols = (slice(None, None, max(size - 1, 1)) for size in weight.shape[-2:])
            corners = numbers.expand(weight.shape)[..., rows, cols].reshape(len(parts), -1)
            alike = len({(*map(self._place, entry),) for entry in corners.tolist()}) == 1
        apart = weight.ndim == 2 or len(weight) == 1
        follow = partial(self._outputs, summed=[axis], kept=1 - axis, apart=apart)
        made = [*map(follow, parts[:1] + parts[1:][-1:])]
        if not (alike and torch.equal(made[0], made[-1])):
            made = [*map(follow, parts)]
        columns = torch.stack(made)
        if bool((columns == columns[0]).all()):
            columns = self._entries(weight, out)[:, None] + columns[0]
        if len(columns) > 1:  # each entry of the batch has separate outputs
            self.numbers.settle(columns, GROUP)
        if not depthwise:
            self._made(out, columns, -1 if axis == 0 or out.ndim == 1 else out.ndim - 2)

    def _place(self, number: float) -> tuple[Any, int]:
        """Return the weight of an element, and the element's position in the weight or stack
        entry."""
        use = self.numbers.record(int(number))
        place = int(number) - use.start
        if isinstance(use, Use) and len(use.shape) > 2 and use.strides[0] == max(use.strides):
            place %= use.strides[0]
        return use, place

    def _entries(self, weight: Tensor, out: Tensor) -> Tensor:
        """Return a stack's entry offsets if a batched matmul uses the entries in order, else a
        single 0."""
        use = self._use(weight)
        if (weight.ndim, len(use.shape), out.ndim) == (3, 3, 3):
            numbers = self.weights[weight].read(weight[:, :1, :1]).flatten() - use.start
            order = torch.arange(use.shape[0]).repeat(len(weight) // use.shape[0])
            if torch.equal(numbers.cpu() // use.strides[0], order.double()):
                use.outputs.add(0)
                return order * use.strides[0]
        return torch.zeros(1, dtype=torch.long)

    def _mixed(self, columns: Tensor, axis: int, kind: str) -> list[list[int]]:
        """Return the axes of the vectors used by a matmul that sums over `axis`.

        Vectors are slices along `axis`, with three exceptions. A matmul that adds outputs of
        different matrices is a weighted sum of vectors along all other axes. A matmul of
        activations whose other axis contains consecutive outputs is a weighted sum of vectors along
        that other axis. A matmul with a state of outer products uses vectors along both axes. With
        three or more axes, the first enumerates the separate entries of a batch.
        """
        axes = range(columns.ndim > 2, columns.ndim)
        others = [a for a in axes if columns.shape[a] > 1 and a != axis % columns.ndim]
        if others and self.numbers.adds_matrices(columns, axis):
            return [others]
        other = 2 * columns.ndim - 3 - axis
        if kind == INNER and other in others and columns.shape[axis] > 1:
            if self._is_outer(columns, [other], {axis % columns.ndim}):
                return [[axis], [other]]
            steps = [float(columns.diff(dim=a).abs().min()) for a in (other, axis)]
            if 0 < steps[0] < steps[1]:
                return [[other]]
        return [[axis]]

    def _outputs(
        self, weight: Tensor, summed: Iterable[int], kept: int, apart: bool = False
    ) -> Tensor:
        """Return the columns of a matmul that keeps axis `kept` of a weight.

        `apart` means that the matmul uses one stack entry, whose columns differ from the columns of
        other entries.
        """

        def along(axis: int) -> Tensor:
            line = weight[tuple(slice(None) if a == axis else 0 for a in range(weight.ndim))]
            return self.weights[weight].read(line).expand(len(line)).long().cpu()

        lines = [[*self.numbers.uses(along(axis))] for axis in summed]
        inputs = {a for line in lines for use, own in line for a in use.axes(own)}
        for use in {use for line in lines for use, _ in line}:
            sizes = [len(own) for line in lines for other, own in line if other is use]
            wanted = prod(use.shape[a] for a in inputs)
            if prod(sizes) != wanted:
                use.hidden = f"a product with {prod(sizes)} of the weight's {wanted} inputs"
        kept_parts = self.numbers.uses(along(kept))
        return torch.cat([use.columns(own, inputs, apart) for use, own in kept_parts])

    def _attend(self, out: Tensor, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Follow attention that a context manager in the model runs as a single operation."""
        for operand in (query, key, value):
            self.numbers.consume(self.columns.read(operand), [-1], INNER)
        if (columns := self.columns.read(value)) is not None:
            repeats = out.shape[1] // columns.shape[1] if columns.shape[1] > 1 else 1
            columns = columns.repeat_interleave(repeats, 1)
            self.columns.write(out, self._folded(columns, [2]))

    def _convolve(self, out: Tensor, source: Tensor, weight: Tensor, *options: Any) -> None:
        """Follow a convolution; `options` are bias, stride, ..., transposed, padding and groups."""
        transposed, groups = options[4], options[6]
        # A single filter per channel only scales the channel and mixes neighbouring positions.
        depthwise = groups > 1 and groups == source.shape[1] == out.shape[1]
        columns = self.columns.read(source)
        if depthwise and columns is not None:
            self._channelwise("convolution", source, out)
        elif columns is not None:
            # With kernels of one position, groups are separate matrices, as in a batched product.
            grouped = groups > 1 and weight[0, 0].numel() == 1 and columns.shape[1] > 1
            columns = columns.unflatten(1, (groups if grouped else 1, -1))
            for axes in self._mixed(columns, 2, LAYER):
                self.numbers.consume(columns, axes, LAYER)
        if weight not in self.weights:
            return
        kept, use = int(transposed), self._use(weight)
        numbers = self._outputs(weight, [a for a in range(weight.ndim) if a != kept], kept)
        if transposed:
            use.groups = groups
            each = weight.shape[0] // groups * use.strides[0]
            numbers = (torch.arange(groups)[:, None] * each + numbers).flatten()
        if groups > 1:
            self.numbers.settle(numbers.view(groups, -1), GROUP)
        if not depthwise:
            self._made(out, numbers[None], 1)

    def _made(self, out: Tensor, columns: Tensor, axis: int) -> None:
        """Store the columns `[1 or n, columns]` of a matmul's result, along axis 0 and `axis`."""
        sizes = [1] * out.ndim
        sizes[0], sizes[axis] = columns.shape  # if `out` has one axis, there is one row of columns
        self.columns.write(out, columns.double().to(out.device).view(sizes))


def _is_stream(origin: Origin, name: str) -> bool:
    """Return whether a layer whose outputs are added to values of this origin cannot be a head.

    A head's outputs may be added to a scaled example or noise, or subtracted from a target.
    """
    known = origin > Origin.EXAMPLE
    return origin == Origin.PARAMETERS if known else name == "add"


def _moving(columns: Tensor) -> list[int]:
    """Return the axes along which columns change."""
    return [axis for axis, size in enumerate(columns.shape) if size > 1]


def _broadcasts(tensor: Tensor, out: Tensor) -> bool:
    """Return whether a tensor can be broadcast to the shape of a result."""
    sizes = zip(reversed(tensor.shape), reversed(out.shape), strict=False)
    return tensor.ndim <= out.ndim and all(n in (1, size) for n, size in sizes)


def _is_continuous(tensor: Tensor) -> bool:
    """Return whether a tensor holds real or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()
