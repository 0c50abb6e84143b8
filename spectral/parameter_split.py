"""Which parameters of a model take a spectral rule, and how they are divided into matrices.

With an example, `split_parameters` watches what a forward pass does with each weight (watch.py).
Without one it reads the modules of a model. What it knows of fused weights is the table
`FUSED`: the name that a model gives the weight, and the attribute of the module around it that says
how many rows a matrix has. A weight that looks fused and is not in the table is an error, never one
matrix.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from .division import Division, sizes_of
from .watch import Seen, watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ELEMENTWISE_LR = 1e-3
"""Learning rate of AdamW for what takes no spectral rule, unless another is given."""

HEAD_NAMES = ("lm_head", "embed_out", "score", "classifier")
"""Names of the linear layers that compute logits."""
TOP_HEADS = ("output.weight", "head.weight")
"""Their weights' full names in models whose last layer has a common name, such as torchtitan's."""
WRAPPERS = re.compile(r"^((module|model|_orig_mod)\.)+")
"""What DDP, a class around a model, and torch.compile put before names."""
EMBEDDINGS = re.compile(
    r"(^|[._])(emb|embed|embeds|embedding|embeddings|embed_tokens|wte|wpe)([._]|$)"
)
ROUTERS = re.compile(r"(Router|Gate)$")
"""Classes of modules that choose experts."""
LOOKS_FUSED = re.compile(
    r"qkv|kv(?!a|down)|qkproj|querykey|keyvalue|cattn|inproj|gateup|upgate|glu|gu$|w1w3|w13|w12"
    r"|fused|pack",
    re.IGNORECASE,
)
"""Parts of names, without underscores, that weights of several matrices have."""
VECTORS = re.compile(r"(^|_)(bias|gain|scale|log|gamma|beta|table)(_|$)", re.IGNORECASE)
"""Words in the names of parameters that are not matrices, whatever their shape."""
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


HEAD = (("head_dim",),)
LATENT = (("qk_nope_head_dim", "v_head_dim"),)
"""Each head's keys and values of multi-head latent attention."""
FUSED: dict[str, tuple[tuple[str, ...], ...]] = {
    # Llama, Qwen, Mistral, Gemma, DeepSeek: fused over heads alone.
    "q_proj": (("qk_head_dim",), ("head_dim",)),
    "k_proj": HEAD,
    "v_proj": HEAD,
    # torchtitan
    "wq": (("qk_head_dim",), ("head_dim",)),
    "wk": HEAD,
    "wv": HEAD,
    "wq_b": (("qk_head_dim",),),
    "wkv_b": LATENT,
    # DeepSeek
    "q_b_proj": (("qk_head_dim",),),
    "kv_b_proj": LATENT,
    # GPT-2, Phi-3, GPT-NeoX: heads of queries, keys and values all have one size.
    "c_attn": HEAD,
    "qkv_proj": HEAD,
    "query_key_value": (("head_size",),),
    "in_proj_weight": HEAD,  # torch.nn.MultiheadAttention
    **{f"{name}_proj_weight": HEAD for name in "qkv"},  # the same with `kdim`
    # Phi-3, experts: a gate and what it multiplies, of one size
    "gate_up_proj": ((),),
}
"""By the name of a weight, the attributes of the module around it that are the rows of successive
matrices, none for two halves; the first that the module has."""
REQUIRED = ("q_b_proj", "kv_b_proj", "wq_b", "wkv_b", "c_attn", "qkv_proj", "query_key_value")
"""Weights that are never one matrix. Others without an answer are, as a `q_proj` of one head."""
EXPERTS = re.compile(r"^(Mixtral|Qwen\d\w*Moe|DeepseekV\d|Olmoe|GraniteMoe)\w*Experts$")
"""Modules whose `gate_up_proj` is `[experts, 2 inner, hidden]`, the gate first, and whose
`down_proj` is `[experts, hidden, inner]`."""


class Row(NamedTuple):
    """What became of one parameter."""

    name: str
    shape: tuple[int, ...]
    rule: str
    matrices: int
    matrix: tuple[int, ...]
    reason: str


class ParameterSplit(Sequence[dict[str, Any]]):
    """Parameter groups of a model: those for a spectral rule, and those for AdamW.

    Pass it to an optimizer as its parameters. Printed, it says what became of each parameter.

    Attributes:
        groups: the groups. Those for the optimizer's own rule come first and have `units`.
        rows: what became of each parameter.
        replicas: the process group of a DDP model, else None.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        rows: Sequence[Row],
        replicas: "ProcessGroup | None" = None,
    ) -> None:
        self.groups = list(groups)
        self.rows = list(rows)
        self.replicas = replicas

    def __getitem__(self, index: Any) -> Any:
        """Return a copy of a group."""
        chosen = self.groups[index]
        return [dict(g) for g in chosen] if isinstance(chosen, list) else dict(chosen)

    def __len__(self) -> int:
        """Count the groups."""
        return len(self.groups)

    @property
    def matrices(self) -> list[nn.Parameter]:
        """Parameters for a spectral rule."""
        return [p for g in self.groups if "rule" not in g for _, p in g["params"]]

    @property
    def others(self) -> list[nn.Parameter]:
        """Parameters for AdamW."""
        return [p for g in self.groups if "rule" in g for _, p in g["params"]]

    def __str__(self) -> str:
        """Return a table, equal rows of numbered layers joined."""
        counts = Counter((re.sub(r"\.\d+(?=\.|$)", ".*", row.name), *row[1:]) for row in self.rows)
        lines = []
        for (name, shape, rule, matrices, matrix, reason), count in counts.items():
            what = f"{matrices} of {'x'.join(map(str, matrix))}" if rule != "adamw" else ""
            shown = "x".join(map(str, shape)) or "scalar"
            line = f"{count:4} x {name:50} {shown:>16}  {rule:8}  {what:16}  {reason}"
            lines.append(line.rstrip())
        return "\n".join(lines)


class Weight(NamedTuple):
    """A trainable parameter, and the modules that it belongs to."""

    name: str
    parameter: nn.Parameter
    module: nn.Module  # that has the parameter
    around: nn.Module  # that has the module; the module itself if the weight has a name of its own
    own_name: str  # by which models tell what it is

    @property
    def kind(self) -> str:
        """Name of its module's class. FSDP2 and parametrizations derive classes of longer names."""
        return type(self.module).__name__.removeprefix("FSDP").removeprefix("Parametrized")


def split_parameters(
    module: nn.Module,
    *,
    example: Any = None,
    elementwise: Iterable[nn.Module] | nn.Module = (),
    units: Mapping[str, Mapping[str, Any]] | None = None,
    lr: float = ELEMENTWISE_LR,
) -> ParameterSplit:
    """Split the trainable parameters into groups for a spectral rule and for AdamW.

    Embeddings, output heads, routers of experts, gains and biases go to AdamW, the last two without
    weight decay: what has one axis longer than 1, is a norm's or is called so. Shared parameters
    appear once; one shared with an embedding counts as an embedding. All others take the
    optimizer's rule, as one matrix or, by heads, gates and experts, as several.

    Args:
        module: any model, also after `fully_shard`, tensor parallelism or DDP.
        example: the arguments of one small forward pass, a tensor, a tuple or a mapping, or a
            function that runs it. What the pass shows decides, and no name is asked (`watch`).
        elementwise: modules, or one, all of whose parameters go to AdamW.
        units: how parameters are divided, by a pattern of their names such as `*.attention.qkv`;
            `{"rows": [...], "stride": 2, "transposed": True, "stacked": True, "groups": 4}`, see
            `Division`, `{}` for one matrix. It goes before what this function finds.
        lr: learning rate of AdamW.

    Raises:
        ValueError: a weight that looks fused, or has more than two dimensions, and that nobody
            said how to divide; rows that do not divide a weight; a pattern that matches nothing;
            patterns that divide one parameter differently; an elementwise module of another model;
            a weight that the pass of `example` did not use, or that it shows no division of.
        TypeError: no module, or elementwise modules that are none.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    overrides = {} if units is None else dict(units)
    unused = set(overrides)
    apart = _apart(module, elementwise)
    given = {}
    for weight in (weights := [*weights_of(module)]):
        patterns = [p for p in overrides if fnmatchcase(weight.name, p)]
        unused -= set(patterns)
        divisions = {Division.of(overrides[p]) for p in patterns}
        if len(divisions) > 1:
            raise ValueError(
                f"{weight.name} matches {' and '.join(patterns)} of units, which differ"
            )
        if weight.parameter.ndim < 2:
            given[weight.name] = Seen(None, "a vector", decays=False)
        elif id(weight.parameter) in apart:
            given[weight.name] = Seen(None, apart[id(weight.parameter)])
        elif divisions:
            given[weight.name] = Seen(divisions.pop(), "units")
        elif _is_line(weight.parameter):
            given[weight.name] = Seen(None, "a vector", decays=False)
    if example is not None:
        others = {w.name: w.parameter for w in weights if w.name not in given}
        given |= watch(module, others, example)
    groups: dict[Division, list[tuple[str, nn.Parameter]]] = {}
    tables: list[tuple[str, nn.Parameter]] = []
    vectors: list[tuple[str, nn.Parameter]] = []
    rows = []
    for weight in weights:
        name, parameter = weight.name, weight.parameter
        shape = tuple(parameter.shape)
        division, reason, decays = given.get(name) or _by_name(weight)
        if division is None:
            (tables if decays else vectors).append((name, parameter))
            rows.append(Row(name, shape, "adamw", 1, shape, reason))
            continue
        try:
            boxes = division.boxes(shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        groups.setdefault(division, []).append((name, parameter))
        matrix = tuple(division.matrix(torch.empty(sizes_of(boxes[0]), device="meta")).shape)
        rows.append(Row(name, shape, "spectral", len(boxes), matrix, reason))
    if unused:
        raise ValueError(f"units matches no parameter: {', '.join(sorted(unused))}")
    chosen: list[dict[str, Any]] = [
        {"params": params, "units": division.settings()} for division, params in groups.items()
    ]
    adamw = {"rule": "adamw", "lr": lr}
    chosen += [{"params": tables, **adamw}] if tables else []
    chosen += [{"params": vectors, **adamw, "weight_decay": 0.0}] if vectors else []
    from torch.nn.parallel import DistributedDataParallel

    replicas = module.process_group if isinstance(module, DistributedDataParallel) else None
    return ParameterSplit(chosen, rows, replicas)


def check_name(name: str) -> None:
    """Raise ValueError for a name of what no whole-matrix rule should take as one matrix."""
    last = name.partition(".parametrizations")[0].removesuffix(".weight").rpartition(".")[2]
    if EMBEDDINGS.search(name) or last in HEAD_NAMES:
        raise ValueError(
            f"{name} is an embedding or an output head, which is not a matrix of a spectral rule; "
            "put it into a group with rule 'adamw', as split_parameters does"
        )
    if _looks_fused(last):
        raise ValueError(
            f"{name} looks like several matrices in one; give its group units, as "
            "split_parameters does, or units={'rows': [n], ...} with the rows of each matrix"
        )


def weights_of(module: nn.Module) -> Iterator[Weight]:
    """Yield every trainable parameter once, an embedding's first."""
    modules = dict(module.named_modules())
    order = sorted(modules.items(), key=lambda item: not _is_embedding(item[1]))
    places: dict[int, tuple[nn.Module, nn.Module, str]] = {}
    for prefix, owner in order:
        for short, parameter in owner.named_parameters(recurse=False):
            places.setdefault(id(parameter), _place(modules, prefix, short))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield Weight(name, parameter, *places[id(parameter)])


def _place(
    modules: Mapping[str, nn.Module], prefix: str, short: str
) -> tuple[nn.Module, nn.Module, str]:
    """Return a weight's module, the module around it, and the name that tells what it is."""
    parts = prefix.split(".") if prefix else []
    if "parametrizations" in parts:  # x.parametrizations.weight.original is x.weight
        at = parts.index("parametrizations")
        parts, short = parts[:at], parts[at + 1]
    own = modules[".".join(parts)]
    if short in ("weight", "bias") and parts:
        return own, modules[".".join(parts[:-1])], parts[-1]
    return own, own, short


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def _apart(module: nn.Module, elementwise: Iterable[nn.Module] | nn.Module) -> dict[int, str]:
    """Return why parameters of embeddings and of the modules given are apart, by their ids."""
    elementwise = [elementwise] if isinstance(elementwise, nn.Module) else list(elementwise)
    own = {id(p) for p in module.parameters()}
    for each in elementwise:
        if not isinstance(each, nn.Module):
            raise TypeError(f"elementwise must be modules of the model, got {each!r}")
        if own.isdisjoint(ids := [id(p) for p in each.parameters()]) and ids:
            raise ValueError(f"elementwise must be modules of the model, got {each!r} beside it")
    reasons = {m: "an embedding" for m in module.modules() if _is_embedding(m)}
    reasons |= dict.fromkeys(elementwise, "elementwise")
    return {id(p): reason for m, reason in reasons.items() for p in m.parameters()}


def _by_name(weight: Weight) -> Seen:
    """Return what names and classes tell of a weight; raises ValueError for what they do not."""
    if _is_table(weight):
        return Seen(None, "a table, a head or a router by its name or class")
    if _is_vector(weight):
        return Seen(None, "a gain or a bias by its name or class", decays=False)
    return Seen(division_of(weight), "names of layers")


def _is_line(parameter: nn.Parameter) -> bool:
    return parameter.numel() <= max(parameter.shape)


def _is_table(weight: Weight) -> bool:
    """Whether a matrix is an embedding, an output head or a router, by names and classes."""
    head = weight.own_name in HEAD_NAMES or WRAPPERS.sub("", weight.name) in TOP_HEADS
    return (
        head
        or EMBEDDINGS.search(weight.name) is not None
        or ROUTERS.search(weight.kind) is not None
    )


def _is_vector(weight: Weight) -> bool:
    """Whether a parameter is a gain or a bias, by its shape, its module's class or its name."""
    return "Norm" in weight.kind or VECTORS.search(weight.name.rpartition(".")[2]) is not None


def _looks_fused(name: str) -> bool:
    return LOOKS_FUSED.search(name.replace("_", "")) is not None


def _consumer(weight: Weight) -> str:
    """Return which layer after a linear one takes a half or a third of its outputs and gives its
    inputs, as in gated layers and attention; nothing if some layer takes all of them."""
    layers = [
        (name, layer)
        for top, child in weight.around.named_children()
        for name, layer in child.named_modules(prefix=top)
        if isinstance(layer, nn.Linear) and (layer is child or isinstance(child, nn.Sequential))
    ]
    later = dict(dropwhile(lambda item: item[1] is not weight.module, layers))
    outputs, inputs = weight.parameter.shape[0], weight.parameter.shape[-1]
    if any(layer.in_features == outputs for layer in later.values()):
        return ""
    for name, layer in later.items():
        if layer.out_features == inputs and layer.in_features in (outputs / 2, outputs / 3):
            return f": {name} takes {layer.in_features} of its {outputs} outputs"
    return ""


def division_of(weight: Weight) -> Division:
    """Return how a weight is divided; raises ValueError for one that nothing is known of."""
    name, shape = weight.own_name, weight.parameter.shape
    transposed = weight.kind == "Conv1D"  # transformers' linear layer `[in, out]`
    stacked = weight.parameter.ndim == 3 and EXPERTS.match(weight.kind) is not None
    if isinstance(weight.module, CONVOLUTIONS):
        return Division()
    if weight.parameter.ndim > 2 and not stacked:
        raise ValueError(
            f"{weight.name} has shape {tuple(shape)}, and nothing says which matrices are in it; "
            "give split_parameters units={name: {...}}, or {} for one matrix [out, in * ...]"
        )
    outputs = shape[-1] if transposed else shape[int(stacked)]
    problem = ""
    for attributes in FUSED.get(name, ()):
        rows: dict[str, Any] = {a: getattr(weight.around, a, None) for a in attributes}
        if lacking := [a for a, n in rows.items() if not isinstance(n, int)]:
            problem = f": {type(weight.around).__name__} has no {lacking[0]}"
            continue
        pattern = (*rows.values(),) or (outputs // 2, outputs - outputs // 2)
        if outputs % sum(pattern):
            raise ValueError(
                f"{weight.name} has {outputs} outputs, which matrices of {pattern} rows do not "
                "divide; give split_parameters units={name: {'rows': [n]}}"
            )
        repeated = () if pattern == (outputs,) else pattern
        return Division(rows=repeated, transposed=transposed, stacked=stacked)
    fused = name in REQUIRED
    if name not in FUSED:
        problem = _consumer(weight)
        fused = fused or bool(problem) or _looks_fused(name)
    if fused:
        raise ValueError(
            f"{weight.name} looks like several matrices in one{problem}; give split_parameters "
            "units={name: {'rows': [n]}} with the rows of each matrix, or {} if it is one"
        )
    return Division(transposed=transposed, stacked=stacked)
