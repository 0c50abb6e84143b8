"""Facts about a weight from names, classes and attributes of the model.

Nothing here sees what the model computes. A weight counts as one matrix only if nothing suggests
several: not its name, and no later layer that takes a part of its outputs while none takes them
all. A weight that is neither known nor plainly one matrix is an error with a remedy.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, product, takewhile

from torch import nn

from .division import Division
from .model_weights import CONVOLUTIONS, Layers, Weight, is_transposed, kind_of
from .weight_use import Seen

HEADS = re.compile(
    r"^(embed_out|score|unembed|qa_outputs|output_projection)$|_head$|(^|_)(classifier|logits)$"
)
"""Names of layers, or of modules that end with one, that compute the results of a model."""
TOP_HEADS = re.compile(
    r"^((module|model|_orig_mod|net|network|backbone|base_model)\.)*(output|head|fc)\.weight$"
)
"""Full names of heads that are called like other layers, wherever a wrapper puts the model."""
ROUTERS = re.compile(r"^(router|gate|gating|wg)$|(Router|Gate|Gating)$")
"""Names and classes of modules that choose experts, if experts are next to them."""
NORMS = re.compile(r"Norm(Gated|Act)?(\dd)?$")
GAINS = re.compile(r"(?i)(^|_)(bias|biases|gain|scale|log|gamma|beta|table)(_|$)|^D$")
EMBEDDINGS = re.compile(r"(^|_)(emb|embed|embeds|embedding|embeddings|embed_tokens|wte|wpe)(_|$)")
TABLES = re.compile(
    r"(?i)(^|_)(pos|position|positional|rel|relative|emb|embed|embeds|embeddings?|tokens?|cls|mask"
    r"|latents?|quer(y|ies)|prompts?|codebook|memory|slots?|prototypes?|anchors?)(_|$)"
)
"""Words in the names of bare parameters whose rows are vectors."""
FUSED = re.compile(
    r"(?i)qkv|kv(?!a|down)|qkproj|querykey|keyvalue|cattn|^inproj(?!.$)|gateup|upgate|glu|gu$|w1w3"
    r"|w13|w12|fused|pack|vgate|gatev|^projectionin$"
)
"""Parts of names, without underscores, that weights of several matrices have."""
FILLERS = re.compile(
    r"(^|_)(to|attn|self|cross|add|lin|linear|proj|projection|fc|layer|global|conv|dense|pos|b|up|w"
    r"|c|weight|project)(?=_|$)|_"
)
"""What names of attention's projections have besides the projection."""
PROJECTIONS = {
    **dict.fromkeys(("q", "query", "queries", "wq"), "q"),
    **dict.fromkeys(("k", "key", "keys", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "wv"), "v"),
    **dict.fromkeys(("qkv", "wqkv", "querykeyvalue"), "qkv"),
    **dict.fromkeys(("kv", "wkv", "keyvalue"), "kv"),
    **dict.fromkeys(("qk", "querykey"), "qk"),
}
HEAD_SIZES = (
    "head_dim attention_head_size head_size d_kv key_value_proj_dim dim_head dim_per_head "
    "attn_head_size hidden_size_per_attention_head d_head"
)
QUERY_SIZES = "qk_head_dim head_k_dim qk_channels_per_head"
VALUE_SIZES = "v_head_dim head_v_dim value_head_dim val_dim v_channels_per_head"
"""Attributes of attention that are the rows of a head."""
HEAD_COUNTS = "num_heads num_attention_heads n_heads n_head nhead heads"
KEY_COUNTS = "num_key_value_heads num_kv_heads n_kv_heads"
KNOWN = {
    **dict.fromkeys(("kv_b_proj", "wkv_b"), "qk_nope_head_dim v_head_dim"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "wkv_a"), "kv_lora_rank qk_rope_head_dim"),
    **dict.fromkeys(("f_proj", "f_b_proj"), "head_dim"),  # forget gates of Kimi's linear attention
    # Mamba, gated delta networks
    "in_proj": "intermediate_size intermediate_size",
    "x_proj": "time_step_rank ssm_state_size ssm_state_size",
    "in_proj_qkv": "num_k_heads*head_k_dim num_k_heads*head_k_dim num_v_heads*head_v_dim",
}
"""Rows of successive matrices by the name of a weight, as attributes of the module around it."""
SIZES = "hidden_size hidden_dim d_model embed_dim model_dim dim"
"""Attributes of experts that are the size of the model."""
DOWN, UP = re.compile(r"down|w2$|wo$|output"), re.compile(r"up|gate|w1$|w3$|wi$|input")
"""Names of experts' weights whose outputs, and whose inputs, have the size of the model."""
WRAPPERS = ("base_layer", "original_module", "modules_to_save", "default")
"""Names that adapters put between a layer and its own."""
BRANCHES = re.compile("downsample|shortcut|residual")
"""Names of layers next to which others take the same inputs, not their outputs."""
PARTS = range(2, 13)
"""Numbers of equal matrices that are looked for in a weight."""


class KnownWeights:
    """Answers about the weights of a model, from its names, classes and attributes."""

    def __init__(self, model: nn.Module) -> None:
        self.layers, self.blocks = Layers(model), _blocks(model)
        self.heads = {id(p) for head in _heads(model) for p in head.parameters()}

    def answer(self, weight: Weight) -> Seen:
        """Return the kind of a parameter; raises ValueError if its division is unknown."""
        parameter, module = weight.parameter, weight.module
        if GAINS.search(weight.own) or (weight.is_layer and _is_norm(module)):
            return Seen(None, "a gain or bias by its name or class", decays=False)
        if id(parameter) in self.heads or self._is_head(weight):
            return Seen(None, "an output head")
        if any(map(_is_router, weight.path[:3], weight.path[1:])):
            return Seen(None, "a router next to experts")
        if _is_table(weight):
            return Seen(None, "a table or token by its name or shape")
        division, reason = self.division(weight)
        if reason == "one matrix":
            ends, reason = self._ending(weight, division)
            if ends:
                return Seen(None, reason)
        try:
            shapes = division.shapes(parameter.shape)
        except ValueError as error:
            raise _unclear(weight, f": {error}") from None
        if all(min(shape) == 1 for shape in shapes):
            return Seen(None, f"{reason}, each with a side of 1", decays=False)
        return Seen(division, reason)

    def division(self, weight: Weight) -> tuple[Division, str]:
        """Return the division of a matrix and the reason.

        Raises ValueError if nothing says it.
        """
        module, shape = weight.module, weight.parameter.shape
        transposed = weight.is_layer and is_transposed(module)
        if weight.is_layer and isinstance(module, CONVOLUTIONS):
            if module.groups > 1:
                division = Division(rows=(module.out_channels // module.groups,))
                if transposed:
                    division = Division(transposed=True, groups=module.groups)
                return division, f"{module.groups} groups"
        elif len(shape) > 2:
            return self._experts(weight)
        outputs = shape[int(transposed)]
        rows, reason = self._rows(weight, outputs)
        return Division(rows=() if rows == (outputs,) else rows, transposed=transposed), reason

    def _rows(self, weight: Weight, outputs: int) -> tuple[tuple[int, ...], str]:
        """Return the rows of successive matrices of a weight, and what says so."""
        module, problem = weight.module, ""
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            gated = "_hr" not in weight.own
            return (module.hidden_size if gated else outputs,), "gates" if gated else "one matrix"
        groups = _first(module, "n_groups num_groups groups", alone=True)
        if (
            weight.is_layer
            and isinstance(module, nn.Linear)
            and outputs % max(groups, 1) == 0 < groups
        ):
            return (outputs // groups,), f"{groups} groups"
        for name, around in self._names(weight):
            if name == "gate_up_proj":
                return (outputs // 2, outputs - outputs // 2), "gate and up"
            rows = _attribute_rows(KNOWN.get(name, ""), around)
            if rows and outputs % sum(rows) == 0:
                return rows, KNOWN[name].replace(" ", ", ")
            part = projection_of(name)
            size = _head_size(part, around, outputs) if part else None
            if size:
                return (size,), f"heads of {size}"
            if size is None and part in ("q", "k", "v") and "b" not in name.split("_"):
                return (outputs,), f"{kind_of(around)} says no heads"
            if size == 0:
                problem = f": the heads of {kind_of(around)} do not divide its {outputs} outputs"
            elif part or is_fused(name):
                problem = problem or f": it is called {name}"
        if problem := problem or self._taken(weight, outputs):
            raise _unclear(weight, f" looks like several matrices in one{problem}")
        if not weight.is_layer and not weight.own.endswith("_weight"):
            why = "either its rows or its columns may be outputs"
            raise _unclear(weight, f" is not the weight of a layer, so {why}")
        return (outputs,), "one matrix"

    def _names(self, weight: Weight) -> Iterator[tuple[str, nn.Module]]:
        """Yield the names of a weight and the modules around, out of what contains nothing else.

        An adapter's outputs are called as its base's.
        """
        if not weight.is_layer:
            yield weight.own_name, weight.around
            return
        for (name, _), (_, around) in pairwise(weight.path[_base(weight) :]):
            yield name, around
            only = sum(layer.multiplies for layer in self.layers.within(around)) == 1
            last = isinstance(around, nn.Sequential) and self._last(around) is weight.module
            if not (only or last or name in WRAPPERS):
                return

    def _last(self, module: nn.Module) -> nn.Module | None:
        """Return the last layer of a module that has a matrix."""
        layers = (x.module for x in reversed(self.layers.within(module)) if x.multiplies)
        return next(layers, None)

    def _is_head(self, weight: Weight) -> bool:
        """Whether a weight is that of the last layer in a module that has the name of a head.

        A name makes no head of a layer whose outputs a later layer takes.
        """
        (_, inner), *_, (_, model) = (*weight.path[_base(weight) :], weight.path[-1])
        outputs = weight.parameter.shape[int(is_transposed(weight.module))]
        if any(x.inputs == outputs for x in self.layers.after(inner, model)):
            return False
        if TOP_HEADS.match(weight.name):
            return True
        inside = takewhile(lambda step: self._last(step[1]) is weight.module, weight.path)
        return weight.is_layer and any(map(HEADS.search, (name for name, _ in inside)))

    def _taken(self, weight: Weight, outputs: int) -> str:
        """Return which later layer takes a part of the outputs, "" if some layer takes them all.

        A part is a half, a third ..., as in gated layers; or, in one module, what no layer makes.
        The nearest module that contains later layers decides.
        """
        (_, inner), *scopes = weight.path[_base(weight) :]
        if not weight.is_layer or _is_branch(weight):
            return ""
        inputs = _inputs(weight, outputs)
        for i, (_, scope) in enumerate(scopes):
            before, later = self.layers.before(inner, scope), self.layers.after(inner, scope)
            if name := self.layers.branches(inner, scope, outputs):
                return f": the branches of {name} take parts of its {outputs} outputs"
            if _is_shuffled(scopes[: i + 1]) or any(
                layer.inputs == outputs for layer in before + later
            ):
                return ""
            made = {inputs, *(x.inputs for x in before), *(x.outputs for x in before + later)}
            for layer in later:
                parts, rest = divmod(outputs, layer.inputs)
                # A norm of the inputs may have been called before this layer.
                equal = not rest and parts in PARTS and (layer.multiplies or layer.inputs != inputs)
                sequence = i == 0 and not isinstance(scope, nn.ModuleList) and layer.multiplies
                unmade = sequence and layer.inputs < outputs and layer.inputs not in made
                if (equal or unmade) and layer.inputs > 2 and not BRANCHES.search(layer.name):
                    return f": {layer.name} takes {layer.inputs} of its {outputs} outputs"
            if later:
                return ""
        return ""

    def _ending(self, weight: Weight, division: Division) -> tuple[bool, str]:
        """Return whether the outputs of a matrix end the model, and what says so.

        They do if no later layer takes so many and all later layers are other heads: these take
        what it takes, or one another's outputs. Raises ValueError if sizes do not tell.
        """
        outputs = weight.parameter.shape[int(division.transposed)]
        inputs = _inputs(weight, outputs)
        (_, inner), *scopes = weight.path[_base(weight) :]
        if not (weight.is_layer and scopes) or _is_branch(weight) or _is_shuffled(scopes):
            return False, "one matrix"
        model = scopes[-1][1]
        before, later = self.layers.before(inner, model), self.layers.after(inner, model)
        others = (x for x in self.layers.within(model) if x.module is not weight.module)
        sizes = {n for x in others if x.multiplies and x.outputs > 1 for n in x[2:]}
        used = inputs == outputs or any(x.inputs == outputs for x in before)
        joined = outputs > 7 and any(x.inputs % outputs == 0 for x in later)  # cat, flatten
        joined &= used or isinstance(weight.module, CONVOLUTIONS)
        taken = joined or any(x.inputs == outputs for x in later)
        if taken or sizes.isdisjoint((inputs, outputs)):
            return False, "one matrix"
        counts = [_first(scope, f"{HEAD_COUNTS} num_v_heads", alone=True) for _, scope in scopes]
        direct = outputs == counts[0]
        coordinates = inputs if direct else self.layers.within(scopes[0][1])[0].inputs
        if outputs in counts and coordinates < 4:
            return True, "biases of positions, one output a head"
        if direct:
            return False, "one output a head of attention"
        made = (inputs, *(x.outputs for x in later))
        last = all(x.inputs in made[: i + 1] for i, x in enumerate(later))
        inside = any(module in self.blocks for _, module in scopes)
        if last and not inside and (self.blocks or not used):
            return True, f"no later layer takes its {outputs} outputs: a head"
        if used:
            return False, "one matrix" if inside or not last else "one matrix, if it is no head"
        why = "no layer takes so many, so it may be a head or several matrices"
        raise _unclear(weight, f" has {outputs} outputs, and {why}")

    def _experts(self, weight: Weight) -> tuple[Division, str]:
        """Return how the weight of several experts, `[experts, ., .]`, is divided."""
        shape, fused = tuple(weight.parameter.shape), is_fused(weight.own_name)
        named = any("expert" in f"{n}{kind_of(m)}".lower() for n, m in weight.path[:2])
        transposed = self._is_transposed(weight) if named and len(shape) == 3 else None
        if transposed is None:
            raise _unclear(weight, f" has shape {shape}, and its matrices are unknown")
        outputs, division = shape[1 + transposed], Division(stacked=True, transposed=transposed)
        if any("attention" in name for name, _ in weight.path[:3]):
            raise _unclear(weight, " is of experts in attention: its outputs may be several heads")
        if not fused:
            if taken := self._taken(weight, outputs):
                raise _unclear(weight, f" looks like several matrices in one{taken}")
            return division, "experts"
        halves = replace(division, rows=(outputs // 2, outputs - outputs // 2))
        joined = getattr(weight.module, "is_concatenated", None)
        if joined is False:
            return replace(division, stride=2), "experts' alternating gate and up"
        if joined is None and f"{weight.own}_bias" in dict(weight.module.named_parameters()):
            rows = list(halves.rows)
            layouts = f"halves ('rows': {rows}) or alternating outputs ('stride': 2)"
            raise _unclear(weight, f" is a gate and its factor, in an unknown layout: {layouts}")
        return halves, "experts' gate and up"

    def _is_transposed(self, weight: Weight) -> bool | None:
        """Return whether experts are `[in, out]`, None if nothing says it.

        What says it is their module, or the sizes of other weights.
        """
        module, name, (_, first, second) = weight.module, weight.own_name, weight.parameter.shape
        if isinstance(stated := getattr(module, "is_transposed", None), bool):
            return stated
        experts = {n: p.shape[1:] for n, p in module.named_parameters(recurse=False) if p.ndim == 3}
        fused = [shape for n, shape in experts.items() if is_fused(n)]
        downs = [shape for n, shape in experts.items() if DOWN.search(n)]
        for (a, b), (c, d) in product(fused, downs):  # [2 inner, hidden] and [hidden, inner]
            if ((a, b) == (2 * d, c)) != ((a, b) == (d, 2 * c)):
                return b == 2 * c
        outputs, inputs = (
            _first(module, "out_features output_size"),
            _first(module, "in_features input_size"),
        )
        hidden = _first(module, SIZES) or self._routed(weight)
        outputs = outputs or (hidden if DOWN.search(name) else 0)
        inputs = inputs or (hidden if UP.search(name) and not DOWN.search(name) else 0)
        straight = outputs in (0, first) and inputs in (0, second)
        crossed = outputs in (0, second) and inputs in (0, first)
        return crossed if straight != crossed else None

    def _routed(self, weight: Weight) -> int:
        """Return the size of the inputs of a router next to experts, 0 without one."""
        near = [layer for _, module in weight.path[:2] for layer in self.layers.within(module)]
        return next((x.inputs for x in near if ROUTERS.search(x.name.rpartition(".")[2])), 0)


def is_fused(name: str) -> bool:
    """Whether a weight is called like one of several matrices."""
    return FUSED.search(name.replace("_", "")) is not None


def projection_of(name: str) -> str | None:
    """Return which projections of attention a weight is by its name, as "q" or "qkv"."""
    if name in ("c_attn", "att_proj", "in_proj_weight"):
        return "qkv"
    part = PROJECTIONS.get(FILLERS.sub("", name.lower()))
    return None if part != "q" and re.search(r"_(b|up)(_|$)", name) else part


def _head_size(part: str, around: nn.Module, outputs: int) -> int | None:
    """Return the rows of each head of a projection, None if nothing says it, 0 if it is unclear."""
    size, values, heads = (_first(around, x) for x in (HEAD_SIZES, VALUE_SIZES, HEAD_COUNTS))
    keys = _first(around, KEY_COUNTS) or heads
    own = values if part == "v" else _first(around, QUERY_SIZES) if part in ("q", "k") else 0
    if not (size or own or heads):
        return None
    if own and outputs % own == 0:
        return own
    if part in ("qkv", "kv") and values not in (0, size):
        return 0
    wider = part == "v" and 0 < heads * size < outputs and outputs % heads == 0
    if size and outputs % size == 0 and not wider:
        return size
    count = ("q" in part) * heads + len(part.strip("q")) * keys
    return 0 if not count or outputs % count else outputs // count


def _first(module: nn.Module, names: str, *, alone: bool = False) -> int:
    """Return the first of some attributes that a module or, unless it is to speak alone, its config
    has, 0 without one."""
    for source in (module,) if alone else (module, getattr(module, "config", None)):
        for name in names.split():
            with suppress(Exception):  # whatever a config raises for what varies over layers
                if type(value := getattr(source, name)) is int and value > 0:
                    return value
    return 0


def _attribute_rows(attributes: str, around: nn.Module) -> tuple[int, ...]:
    """Return the rows of successive matrices that attributes say, () if one is missing."""
    rows: list[int] = []
    for attribute in attributes.split():
        *count, size = (_first(around, name, alone=True) for name in attribute.split("*"))
        rows += [size] * (count[0] if count else 1)
    return tuple(rows) if rows and all(rows) else ()


def _base(weight: Weight) -> int:
    """Return where in its path the layer of a weight is: that of its base for what an adapter
    adds to the outputs."""
    names = [name.lower() for name, _ in weight.path]
    return names.index("lora_b") + 1 if "lora_b" in names else 0


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output heads that the modules of a model name."""
    for module in model.modules():
        for name in ("get_output_embeddings", "get_classifier"):
            heads: object = None
            with suppress(AttributeError, NotImplementedError, TypeError):
                heads = getattr(module, name)()
            for head in heads if isinstance(heads, (tuple, list)) else [heads]:
                if isinstance(head, nn.Module):
                    yield head


def _blocks(model: nn.Module) -> set[nn.Module]:
    """Return the modules that a model repeats, as its layers."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    blocks = set[nn.Module]()
    for outer in lists:
        kinds = Counter(map(type, outer))
        single = isinstance(outer, nn.ModuleList) and len(outer) == 1
        blocks |= {m for m in outer if single or kinds[type(m)] > 1}
    return {m for m in blocks if any(m.children()) and not isinstance(m, nn.Sequential)}


def _inputs(weight: Weight, outputs: int) -> int:
    """Return the number of inputs, or of channels, that a weight takes."""
    if isinstance(weight.module, CONVOLUTIONS):
        return weight.module.in_channels
    return weight.parameter.numel() // outputs


def _is_branch(weight: Weight) -> bool:
    """Whether the outputs of a weight are added to those of other layers."""
    return any(BRANCHES.search(name) for name, _ in weight.path[:2])


def _is_shuffled(scopes: Iterable[tuple[str, nn.Module]]) -> bool:
    """Whether pixels are made of outputs."""
    return any(isinstance(module, nn.PixelShuffle) for _, s in scopes for module in s.children())


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.LayerNorm) or NORMS.search(kind_of(module)) is not None


def _is_router(step: tuple[str, nn.Module], outer: tuple[str, nn.Module]) -> bool:
    """Whether a module is called like a router, and experts are next to it."""
    (name, module), (_, around) = step, outer
    return bool(ROUTERS.search(name) or ROUTERS.search(kind_of(module))) and any(
        child is not module and "expert" in f"{other}{kind_of(child)}".lower()
        for other, child in around.named_children()
    )


def _is_table(weight: Weight) -> bool:
    """Whether a weight is looked up or added, by its name and shape."""
    if kind_of(weight.module).endswith("Embedding"):
        return True
    if weight.is_layer:
        linear = isinstance(weight.module, CONVOLUTIONS) or "Linear" in kind_of(weight.module)
        return not linear and EMBEDDINGS.search(weight.own_name) is not None
    name = weight.own
    if isinstance(weight.module, (nn.ParameterList, nn.ParameterDict)):
        name = f"{weight.path[0][0]}_{name}"
    alone = weight.parameter.ndim > 2 and weight.parameter.shape[0] == 1
    return alone or TABLES.search(name) is not None


def _unclear(weight: Weight, why: str) -> ValueError:
    """Return the error of a weight that names leave open, which says what to do."""
    return ValueError(
        f"{weight.name}{why}; give split_parameters example=(arguments of a forward pass), "
        f"units={{{weight.name!r}: {{'rows': [n]}}}} with the rows of each matrix, {{}} if it is "
        "one, or elementwise=[...] for AdamW"
    )
