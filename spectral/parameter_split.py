"""Splits a model's parameters into groups: matrices for a spectral rule, everything else for AdamW.

`split_parameters` determines each weight's rule and its division into matrices. Explicit arguments
take precedence. Weights not covered by explicit arguments are assigned by watching a forward pass
on an example (`watch.py`) or, without an example, by names, classes and attributes in the model
(`known_weights.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .division import Division
from .known_weights import EMBEDDINGS, HEADS, KnownWeights, is_fused
from .model_weights import CONVOLUTIONS, Weight, is_embedding, listed, pattern_of, weights_of
from .watch import watch
from .weight_use import Seen

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ELEMENTWISE_LR = 1e-3
"""Default AdamW learning rate for parameters without a spectral rule."""
VECTOR = Seen(None, "a vector", decays=False)
EMBEDDING = Seen(None, "an embedding")


class Row(NamedTuple):
    """The rule and the matrices of a parameter, and the reason for this assignment."""

    name: str
    shape: tuple[int, ...]
    rule: str
    matrices: int
    matrix: tuple[int, ...]
    reason: str


class ParameterSplit(Sequence[dict[str, Any]]):
    """Parameter groups of a model for a spectral rule and for AdamW.

    Pass the split to an optimizer as `params`. Print the split to show each parameter's assignment.
    The model may be sharded after the split, but not after the optimizer is created.

    Attributes:
        module: the model.
        groups: the parameter groups. Groups for the optimizer's rule come first and have `units`.
        rows: the assignment of each parameter.
        replicas: the process group of a DDP model; None for other models.
        frozen: (name, parameter) pairs that are excluded because the parameters are frozen.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: Sequence[dict[str, Any]],
        rows: Sequence[Row],
        replicas: "ProcessGroup | None" = None,
        frozen: Sequence[tuple[str, nn.Parameter]] = (),
    ) -> None:
        self.module = module
        self._groups = list(groups)
        self.rows = list(rows)
        self.replicas = replicas
        self.frozen = list(frozen)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The parameter groups.

        Groups contain the model's current parameters, because sharding replaces parameters.
        """
        named = dict(self.module.named_parameters())
        ids = {id(parameter) for parameter in named.values()}
        for group in self._groups:
            for i, (name, parameter) in enumerate(group["params"]):
                now = parameter if id(parameter) in ids else named.get(name)
                if now is None or now.shape != parameter.shape:
                    raise ValueError(
                        f"{name} was removed, renamed or reshaped after split_parameters; split "
                        "the model again"
                    )
                group["params"][i] = name, now
        return self._groups

    def __getitem__(self, index: Any) -> Any:
        """Return a copy of a group."""
        chosen = self.groups[index]
        return [dict(g) for g in chosen] if isinstance(chosen, list) else dict(chosen)

    def __len__(self) -> int:
        """Return the number of groups."""
        return len(self._groups)

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Parameters for a spectral rule."""
        return [p for g in self.groups if "rule" not in g for _, p in g["params"]]

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters for AdamW."""
        return [p for g in self.groups if "rule" in g for _, p in g["params"]]

    def __str__(self) -> str:
        """Return a table in which repeated layers share a row, and a line for frozen parameters."""
        counts = Counter((pattern_of(row.name), *row[1:]) for row in self.rows)
        lines = []
        for (name, shape, rule, matrices, matrix, reason), count in counts.items():
            what = f"{matrices} of {'x'.join(map(str, matrix))}" if rule != "adamw" else ""
            shown = "x".join(map(str, shape)) or "scalar"
            row = f"{count:4} x {name:50} {shown:>16}  {rule:8}  {what:16}  {reason}"
            lines.append(row.rstrip())
        if self.frozen:
            lines.append(f"{len(self.frozen):4} frozen and in no group: {self.frozen[0][0]} ...")
        return "\n".join(lines)


def split_parameters(
    module: nn.Module,
    *,
    example: Any = None,
    elementwise: Iterable[nn.Module | nn.Parameter] | nn.Module | nn.Parameter = (),
    units: Mapping[str, Mapping[str, Any]] | None = None,
    lr: float = ELEMENTWISE_LR,
) -> ParameterSplit:
    """Split the trainable parameters into groups for a spectral rule and for AdamW.

    AdamW updates embeddings, tables, tokens, output heads, expert routers, gains and biases; weight
    decay is off for gains and biases. AdamW also updates parameters with at most one side longer
    than 1, and parameters whose matrices have a side of 1. A shared parameter appears once, and
    counts as an embedding if an embedding shares it. The optimizer's rule updates everything else.
    A parameter that holds several heads, gates, groups or experts is divided into several matrices.

    Args:
        module: any model, even after `fully_shard`, tensor parallelism or DDP.
        example: the arguments of a small forward pass (a tensor, a tuple or a mapping), or a
            function that runs the pass. With an example, names are ignored (see `watch`).
        elementwise: one or more modules or parameters to be updated by AdamW, even if a pattern in
            `units` matches them.
        units: maps patterns of parameter names, such as `*.attention.qkv`, to divisions:
            `{"rows": [...], "stride": 2, "transposed": True, "stacked": True, "groups": 4}` (see
            `Division`), or `{}` for a single matrix. These divisions override detected divisions.
        lr: learning rate for AdamW.

    Raises:
        ValueError: if a weight looks like several matrices or its use is unclear, or if the forward
            pass on `example` does not use a weight or does not reveal its division. Also if rows do
            not divide a weight, a pattern matches nothing, patterns specify different divisions of
            a parameter, an entry of `elementwise` belongs to another model, parameters are
            flattened, or no parameter is left for the optimizer's rule.
        TypeError: if `module`, `units` or an entry of `elementwise` has the wrong type.
    """
    if not isinstance(module, nn.Module) or isinstance(module, torch.jit.ScriptModule):
        kind = type(module).__name__
        raise TypeError(f"module must be a torch.nn.Module without torch.jit.script, got {kind}")
    overrides = _divisions({} if units is None else units)
    weights, apart = [*weights_of(module)], _apart(module, elementwise)
    given, unused = dict[str, Seen](), set(overrides)
    for weight in weights:
        _refuse_unfit(weight)
        own = {
            k: v for k, v in overrides.items() if k == weight.name or fnmatchcase(weight.name, k)
        }
        unused -= own.keys()
        if (answer := _given(weight, own, apart)) is not None:
            given[weight.name] = answer
    given |= _detected(module, weights, given, example)
    groups: dict[Division, list[tuple[str, nn.Parameter]]] = {}
    others: dict[bool, list[tuple[str, nn.Parameter]]] = {True: [], False: []}  # by weight decay
    rows = []
    for name, parameter, *_ in weights:
        division, reason, decays = given[name]
        shape, rule, matrices = tuple(parameter.shape), "adamw", [tuple(parameter.shape)]
        members = others[decays]
        if division is not None:
            members, rule = groups.setdefault(division, []), "spectral"
            try:
                matrices = division.shapes(shape)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        members.append((name, parameter))
        rows.append(Row(name, shape, rule, len(matrices), matrices[0], reason))
    if unused:
        raise ValueError(
            "every pattern in units must match a parameter, but no parameter matches "
            f"{', '.join(sorted(unused))}"
        )
    if not groups:
        raise ValueError(
            f"{type(module).__name__} has no parameter for the optimizer's rule: every parameter "
            "is frozen, elementwise, an output head, a lookup table, a gain or a bias; use "
            "AdamW(model.parameters())"
        )
    chosen: list[dict[str, Any]] = [
        {"params": params, "units": division.settings()} for division, params in groups.items()
    ]
    for decays, params in others.items():
        decay = {} if decays else {"weight_decay": 0.0}
        chosen += [{"params": params, "rule": "adamw", "lr": lr, **decay}] if params else []
    from torch.nn.parallel import DistributedDataParallel

    replicas = module.process_group if isinstance(module, DistributedDataParallel) else None
    frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
    return ParameterSplit(module, chosen, rows, replicas, frozen)


def _detected(
    module: nn.Module, weights: Sequence[Weight], given: Mapping[str, Seen], example: Any
) -> dict[str, Seen]:
    """Return the divisions of all weights that are not in `given`.

    Raises ValueError if the division of any weight is unclear.
    """
    if example is None:
        answer: Callable[[Weight], Seen] = KnownWeights(module).answer
    else:
        rest = [w for w in weights if given.get(w.name) not in (VECTOR, EMBEDDING)]
        followed = {w.name: w.parameter for w in rest if w.parameter.ndim > 1}
        vectors = {w.name: w.parameter for w in weights if given.get(w.name) == VECTOR}
        answer = watch(module, followed, vectors, example)
    seen, problems = dict[str, Seen](), dict[str, str]()
    for weight in weights:
        if weight.name not in given:
            try:
                seen[weight.name] = answer(weight)
            except ValueError as error:
                problems[weight.name] = str(error)
    if problems:
        first = next(iter(problems))
        raise ValueError(
            f"{listed(problems)}\npass split_parameters one of these arguments:\n"
            "- example=(...), the arguments of a forward pass that uses the weight\n"
            f"- units={{{first!r}: {{'rows': [n]}}}}, with the row count of each matrix\n"
            f"- units={{{first!r}: {{}}}}, for a single matrix\n"
            "- elementwise=[...], with the weights or modules to update with AdamW"
        )
    return seen


def check_name(name: str) -> None:
    """Raise ValueError if a name suggests an embedding, an output head or fused matrices."""
    last = name.partition(".parametrizations")[0].removesuffix(".weight").rpartition(".")[2]
    if EMBEDDINGS.search(last) or HEADS.search(last):
        raise ValueError(
            f"{name} is an embedding or an output head, which a spectral rule must not update; "
            "put it in a group with rule 'adamw', as split_parameters does"
        )
    if is_fused(last):
        raise ValueError(
            f"{name} looks like several matrices fused into one; use split_parameters, or set the "
            "group's units to {'rows': [n, ...]} with the row count of each matrix"
        )


def _divisions(units: Mapping[str, Mapping[str, Any]]) -> dict[str, Division]:
    """Return the divisions in `units`. Errors for invalid divisions name the pattern."""
    if not isinstance(units, Mapping):
        raise TypeError(
            f"units must be a mapping from name patterns to divisions, got {units!r:.80}"
        )
    divisions = {}
    for pattern, value in units.items():
        try:
            divisions[pattern] = Division.of(value)
        except (TypeError, ValueError) as error:
            message = str(error).replace("units", f"units[{pattern!r:.80}]", 1)
            raise type(error)(message) from None
    return divisions


def _apart(
    module: nn.Module, elementwise: Iterable[nn.Module | nn.Parameter] | nn.Module | nn.Parameter
) -> set[int]:
    """Return the ids of the parameters in `elementwise`, including those of its modules."""
    own, apart = {id(p) for p in module.parameters()}, set[int]()
    if isinstance(elementwise, (nn.Module, nn.Parameter, str)):  # a string is refused whole
        elementwise = [elementwise]
    for each in elementwise:
        if not isinstance(each, (nn.Module, nn.Parameter)):
            raise TypeError(f"elementwise must contain modules or parameters, got {each!r}")
        ids = {id(p) for p in ([each] if isinstance(each, nn.Parameter) else each.parameters())}
        if ids and own.isdisjoint(ids):
            raise ValueError(
                "elementwise must contain modules or parameters of this model, got "
                f"{each!r} from another model"
            )
        apart |= ids
    return apart


def _refuse_unfit(weight: Weight) -> None:
    """Raise ValueError if a parameter is complex, uninitialized or flattened."""
    if nn.parameter.is_lazy(weight.parameter):
        raise ValueError(f"{weight.name} has no shape yet: run the model before splitting it")
    if weight.parameter.is_complex():
        raise ValueError(
            f"{weight.name} must be real, got complex numbers: replace it with a real parameter "
            "(torch.view_as_real), or freeze it and pass it to another optimizer"
        )
    shape = tuple(weight.parameter.shape)
    layer = isinstance(weight.module, (nn.Linear, nn.Embedding, *CONVOLUTIONS))
    flat = weight.own == "weight" and layer and len(shape) < 2
    if shape == (0,) or flat or weight.own.endswith("_flat_param"):
        raise ValueError(
            f"{weight.name} has shape {shape}, because DeepSpeed ZeRO-3 or FSDP1 flattened or "
            "emptied the parameter; use fully_shard (FSDP2) or DDP"
        )


def _given(weight: Weight, units: Mapping[str, Division], apart: set[int]) -> Seen | None:
    """Return a parameter's division if its shape, module or an argument determines the division."""
    divisions = {*units.values()}
    if len(divisions) > 1:
        raise ValueError(
            f"units: all patterns that match {weight.name} must have the same value, got different "
            f"values for {' and '.join(units)}"
        )
    if weight.parameter.ndim < 2:
        return VECTOR._replace(reason="elementwise") if id(weight.parameter) in apart else VECTOR
    if is_embedding(weight.module):
        return EMBEDDING
    if id(weight.parameter) in apart:
        return Seen(None, "elementwise")
    if divisions:
        return Seen(divisions.pop(), "units")
    line = weight.parameter.numel() <= max(weight.parameter.shape)
    return VECTOR if line else None
