"""Uses names, classes and attributes in the model to infer how a weight divides into matrices.

The model is not run. A weight counts as a single matrix under two conditions: nothing suggests that
it holds several matrices, and a nearby layer has as many inputs as the weight has outputs.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import chain, pairwise, takewhile
from math import prod
from typing import Any

from torch import nn

from .division import Division
from .forward_words import OPAQUE, ForwardWords, is_bare
from .model_weights import (
    CONVOLUTIONS,
    Layer,
    Layers,
    Weight,
    is_transposed,
    kind_of,
)
from .weight_use import Seen

HEADS = re.compile(
    r"^(embed_out|score|unembed|qa_outputs|output_projection)$|_head$|(^|_)(classifier|logits)$"
)
"""Names of output layers, or of modules that end with an output layer."""
ROUTERS = re.compile(r"^(router|gate|gating|wg)$|(Router|Gate|Gating)$")
"""Names and classes of modules that count as routers if they are next to experts."""
NORMS = re.compile(r"Norm(Gated|Act)?(\dd)?$")
GAINS = re.compile(r"(?i)(^|_)(bias|biases|gain|scale|log|gamma|beta|table)(_|$)|^D$")
EMBEDDINGS = re.compile(r"(^|_)(emb|embed|embeds|embedding|embeddings|embed_tokens|wte|wpe)(_|$)")
TABLES = re.compile(
    r"(?i)(^|_)(pos|position|positional|relative|emb|embed|embeds|embeddings?|tokens?|cls|mask"
    r"|latents?|prompts?|codebook|memory|slots?|prototypes?|anchors?)(_|$)"
)
"""Words in the names of bare parameters that indicate tables of vectors."""
FUSED = re.compile(
    r"(?i)qkv|kv(?!a|down)|qkproj|querykey|keyvalue|cattn|^inproj(?!.$)|gateup|upgate|glu|gu$|w1w3"
    r"|w13|w12|fused|pack|vgate|gatev|^projectionin$"
)
"""Substrings (without underscores) in the names of weights that hold several matrices."""
FILLERS = re.compile(
    r"(^|_)(to|attn|self|cross|add|lin|linear|proj|projection|fc|layer|global|conv(?!_attn)|dense|pos"
    r"|b|up|w|c|weight|project)(?=_|$)|_"
)
"""Parts of an attention projection's name that do not identify the projection."""
PROJECTIONS = re.compile("query|queries$|key(s$)?|value(s$)?")
"""Words in the names of attention projections; each word is shortened to its first letter."""
HEAD_SIZES = (
    "head_dim attention_head_size head_size d_kv key_value_proj_dim dim_head dim_per_head "
    "attn_head_size hidden_size_per_attention_head d_head"
)
QUERY_SIZES = "qk_head_dim head_k_dim qk_channels_per_head"
VALUE_SIZES = "v_head_dim head_v_dim value_head_dim val_dim v_channels_per_head"
"""Attributes of attention modules that hold the number of rows per head."""
HEAD_COUNTS = "num_heads num_attention_heads n_heads n_head nhead heads"
KEY_COUNTS = "num_key_value_heads num_kv_heads n_kv_heads n_kv_head kv_heads"
KNOWN = {
    **dict.fromkeys(("kv_b_proj", "wkv_b"), "qk_nope_head_dim v_head_dim"),
    **dict.fromkeys(("kv_a_proj_with_mqa", "wkv_a"), "kv_lora_rank qk_rope_head_dim"),
    **dict.fromkeys(("f_proj", "f_b_proj"), "head_dim"),  # forget gates of Kimi's linear attention
    # Mamba, gated delta networks
    "in_proj": "intermediate_size intermediate_size",
    "x_proj": "time_step_rank ssm_state_size ssm_state_size",
    "dt_proj": "intermediate_size",
    "in_proj_qkv": "num_k_heads*head_k_dim num_k_heads*head_k_dim num_v_heads*head_v_dim",
}
"""Maps weight names to attributes of the enclosing module. The attributes contain the row counts of
the consecutive matrices in the weight."""
ATTENTION = re.compile(
    r"(?i)^(c_|to_|attention_)?(w?o|out|output|proj|dense|final)(_proj|_lin|_layer)?$"
    r"|^[gq]_proj$|_[ab]_proj$|^[ab]_proj$|gate|_[abz]$"
)
"""Names of layers that are next to attention projections but are not divided into heads: output,
gates, low-rank factors."""
PARTS = {"chunk", "split", "tensor_split", "split_with_sizes", "unbind", "narrow", "glu", OPAQUE}
PARTS |= {"hsplit", "dsplit", "select", "index_select", "take_along_dim"}
"""Functions that split a tensor, and the word for unreadable code, which may split a tensor."""
GATES = {"*", "mul"}
"""Operators and functions that multiply the two halves of a layer's outputs."""
AXES = {"unflatten", "rearrange", "scaled_dot_product_attention", "Ellipsis", "::"}
"""Functions and index expressions that may divide a layer's outputs."""
SHUFFLES = {"rearrange", "pixel_shuffle", "pixelshuffle"}
"""Functions and classes that may divide a layer's outputs among tokens or pixels."""
SHAPES = {"view", "reshape"}
"""Functions that may divide outputs into heads, or flatten the axes of an image before a layer."""
HEADWISE = {"transpose", "permute", "movedim", "swapaxes", "mT", "einsum", "matmul", "bmm"}
HEADWISE |= {"softmax", "sum", "norm", "normalize"}
"""Functions that operate on heads if they are called after a function in `SHAPES`."""
PRODUCTS = {"@", "matmul", "mm", "bmm", "einsum", "cosine_similarity", "cdist"}
"""Operators and functions that multiply the outputs of two layers."""
READS = {"dtype", "device", "shape", "size"}
"""Attributes of a weight that do not reveal its use."""
WRAPPERS = ("base_layer", "original_module", "modules_to_save", "default")
"""Names that adapters insert between layer and parameter names."""


class KnownWeights:
    """Uses names, classes and attributes to infer how a model's weights divide into matrices."""

    def __init__(self, model: nn.Module) -> None:
        self.layers, self.blocks = Layers(model), _blocks(model)
        self.words = ForwardWords()
        self.cutter = self._cutter(model)
        self.repeated = {x.module for block in self.blocks for x in self.layers.within(block)}
        self.single = sum(p.numel() > max(p.shape, default=0) for p in model.parameters()) == 1
        self.headed = [module for module in model.modules() if self._divides_inputs(module)]
        heads = [head for head in _heads(model) if head in self.layers.slices]
        self.heads = {id(p) for head in heads for p in (self._last(head) or head).parameters()}

    def answer(self, weight: Weight) -> Seen:
        """Return a weight's division into matrices, or raise ValueError."""
        parameter, module = weight.parameter, weight.module
        norm = NORMS.search(kind_of(module)) or isinstance(module, nn.LayerNorm)
        if GAINS.search(weight.own) or (weight.is_layer and norm):
            return Seen(None, "a gain or bias by its name or class", decays=False)
        if id(parameter) in self.heads:
            return Seen(None, "an output head")
        if any(map(_is_router, weight.path[:3], weight.path[1:])):
            return Seen(None, "a router next to experts")
        if _is_table(weight):
            return Seen(None, "a table or token by its name or shape")
        division, reason = self.division(weight)
        if reason == "one matrix" and weight.is_layer:
            ends, reason = self._ends(weight, division)
            if ends:
                return Seen(None, reason)
        if all(min(shape) == 1 for shape in division.shapes(parameter.shape)):
            return Seen(None, f"{reason}, each with a side of 1", decays=False)
        outputs = parameter.shape[int(division.transposed)]
        for headed in self.headed if reason.startswith("one matrix") else ():
            sizes = {x.inputs for x in self.layers.within(headed) if x.multiplies} or {0}
            if sizes & {0, outputs} and all(inner is not headed for _, inner in weight.path):
                why = f"{kind_of(headed)} may divide its inputs into heads"
                raise ValueError(f"looks like several matrices fused into one: {why}")
        return Seen(division, reason)

    def division(self, weight: Weight) -> tuple[Division, str]:
        """Return a weight's division and the evidence for it.

        The weight must not be a gain, head, router or table. Raises ValueError if names, classes
        and attributes do not determine the division.
        """
        module, shape = weight.module, weight.parameter.shape
        transposed = weight.is_layer and is_transposed(module)
        if weight.is_layer and isinstance(module, CONVOLUTIONS):
            if module.groups > 1:
                outputs = module.out_channels // module.groups
                if outputs > 1 and projection_of(weight.own_name):
                    raise ValueError("may contain several heads in each group of the convolution")
                division = Division(rows=(outputs,))
                if transposed:
                    division = Division(transposed=True, groups=module.groups)
                return division, f"{module.groups} groups"
        elif len(shape) > 2:
            return self._experts(weight)
        outputs = shape[int(transposed)]
        rows, reason = self._rows(weight, outputs)
        return Division(rows=() if rows == (outputs,) else rows, transposed=transposed), reason

    def _rows(self, weight: Weight, outputs: int) -> tuple[tuple[int, ...], str]:
        """Return the row counts of the consecutive matrices in a weight, and the evidence."""
        module, problem = weight.module, ""
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            gated = "_hr" not in weight.own
            return (module.hidden_size if gated else outputs,), "gates" if gated else "one matrix"
        linear = isinstance(module, nn.Linear)
        groups = _first(module, "n_groups num_groups groups") if linear else 0
        if groups and outputs % groups == 0:
            return (outputs // groups,), f"{groups} groups"
        for name, around in self._names(weight):
            if name == "gate_up_proj" and outputs % 2 == 0:
                return (outputs // 2,), "gate and up"
            rows = _attribute_rows(KNOWN.get(name, ""), around)
            if rows and outputs % sum(rows) == 0:
                return rows, KNOWN[name].replace(" ", ", ")
            part = projection_of(name)
            oriented = weight.is_layer or name.endswith("weight")  # else `[in, out]` is possible
            size = _head_size(part, around, outputs) if part and oriented else None
            if size and not self._joins(part or "", name, around):
                return (size,), f"heads of {size}"
            if size is not None:
                kind = kind_of(around)
                problem = (
                    f": the heads of {kind} do not divide the weight's {outputs} outputs, or are "
                    "concatenated"
                )
            elif part or is_fused(name):
                problem = problem or f": its name is {name}"
            elif not ATTENTION.search(name) and _is_attention(around):
                problem = ": its attention module also projects heads"
        if problem:
            raise ValueError(f"looks like several matrices fused into one{problem}")
        multiplies = not linear and not PRODUCTS.isdisjoint(words := self.words.of(module))
        if not weight.is_layer or (multiplies and "linear" not in words):
            raise ValueError(
                "is not a linear layer's weight, so its outputs may be rows or columns"
            )
        return (outputs,), "one matrix"

    def _names(self, weight: Weight) -> Iterator[tuple[str, nn.Module]]:
        """Yield the names of a weight and of its wrappers, each with its parent module.

        For adapters, these are the names of the base layer.
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
        """Return the last matmul layer in a module."""
        layers = (x.module for x in reversed(self.layers.within(module)) if x.multiplies)
        return next(layers, None)

    def _ends(self, weight: Weight, division: Division) -> tuple[bool, str]:
        """Return whether a layer is an output layer, and the evidence.

        The layer's name must suggest a single matrix. The evidence is the layer's name or the input
        sizes of other layers. Raises ValueError if no nearby layer uses all of the layer's outputs.
        """
        outputs = weight.parameter.shape[int(division.transposed)]
        inputs = weight.parameter.numel() // outputs
        layer = Layer.of(weight.module) or Layer(weight.module, inputs, outputs)
        (_, inner), *scopes = weight.path[_base(weight) :]
        inside = any(module in self.blocks for _, module in scopes)
        found = None if inside or self.single else self._outside(weight, layer)
        if found:
            return True, found
        if why := self._contained(weight, layer):
            raise ValueError(f"looks like several matrices fused into one: {why}")
        if self.single:
            return False, "one matrix"
        for _, scope in scopes if found is None else ():
            later = self.layers.after(inner, scope)
            if any(x.inputs == outputs for x in self.layers.before(inner, scope) + later):
                return False, "one matrix"
            if any(x.multiplies for x in later):
                break
        if scopes and outputs == _first(scopes[0][1], f"{HEAD_COUNTS} num_v_heads"):
            return False, "one output per head of attention"
        why = f"no layer uses its {outputs} outputs"
        raise ValueError(f"looks like an output head or several matrices fused into one: {why}")

    def _outside(self, weight: Weight, layer: Layer) -> str | None:
        """Return the evidence that a layer outside repeated blocks is an output layer, or "".

        Returns None if another layer could use the layer's outputs: the answer then depends on the
        layers in the enclosing modules. Raises ValueError if the layer could be either an output
        layer or a single matrix.
        """
        later, again, mixer = self._later(weight)
        takers = {x.module for x in later if x.inputs == layer.outputs}
        if any((own := Layer.of(m)) and own.inputs == layer.outputs for _, m in weight.path[1:]):
            return None  # the enclosing head also has a weight
        reason, why = "" if takers else self._head(weight, layer, later), ""
        if takers and takers <= again:
            why = "all layers that could use its outputs also run before it"
        elif takers & self.repeated and self._may_end(weight, layer, later, mixer):
            why = "other blocks run after it"
        elif takers:
            return None
        elif reason.endswith(": a head") and (user := self._user(weight)):
            why = f"{user} also uses its weight directly"
        elif reason.endswith(": a head") and mixer:
            why = f"{mixer} adds or multiplies activations after it"
        if why:
            raise ValueError(f"could be an output head or a single matrix: {why}")
        return reason

    def _user(self, weight: Weight) -> str:
        """Return the class of a module that uses the weight of a child directly, or ""."""
        for (name, _), (_, module) in pairwise(weight.path):
            words = self.words.of(module)
            uses = zip(words, words[1:], [*words[2:], ""], strict=False)
            if any(use[:2] == (f".{name}", "weight") and use[2] not in READS for use in uses):
                return kind_of(module)
        return ""

    def _may_end(self, weight: Weight, layer: Layer, later: list[Layer], mixer: str) -> bool:
        """Return whether a layer may be a head even though later blocks could use its outputs.

        The layer may be a head if it is square, follows blocks and does not scale activations. It
        may also be a head if it ends a tower of blocks and its outputs are pooled or multiplied.
        """
        (name, inner), *scopes = weight.path
        after = {x.module for x in later}
        before = [x.module for x in self.layers.before(inner, scopes[-1][1]) if x.multiplies]
        follows = bool({*before[-1:]} & self.repeated - after)
        scales = "*" in self.words.after(scopes[0][1], name)
        if layer.inputs == layer.outputs and follows and not scales:
            return True
        takers = {x.module for x in later if x.inputs == layer.outputs}
        return (mixer != "" or any("pool" in name for name, _ in weight.path)) and any(
            any(x.module in self.repeated for x in self.layers.before(inner, scope))
            and takers.isdisjoint(x.module for x in self.layers.after(inner, scope))
            for _, scope in scopes
        )

    def _head(self, weight: Weight, layer: Layer, later: list[Layer]) -> str:
        """Return the evidence that a layer is a head, or "".

        The caller must have checked that no layer in `later` uses this layer's outputs.
        """
        if any(HEADS.search(name) for name, _ in weight.path):
            return "an output head by its name"
        inputs, outputs = layer.inputs, layer.outputs
        parts = outputs in range(2 * inputs, 13 * inputs, inputs)  # e.g. shift and scale
        cut = parts and any(x.inputs == inputs for x in later)
        made = [inputs, *(x.outputs for x in later)]  # sizes before each later layer
        others = all(x.inputs in made[:i] for i, x in enumerate(later, 1))
        others &= self.repeated.isdisjoint(x.module for x in later)
        used = any(x.inputs == outputs for x in self.layers.layers)
        parted = self._cuts(weight) or not (PARTS | AXES | SHAPES).isdisjoint(
            self.words.after(weight.around, weight.own_name)
        )
        last = self.layers.layers[-1]
        alike = last in later and outputs == last.outputs and not (cut or used or parted)
        ends = (self.blocks and not cut and others) or not (later or used) or alike
        return f"no later layer uses its {outputs} outputs: a head" if ends else ""

    def _later(self, weight: Weight) -> tuple[list[Layer], set[nn.Module], str]:
        """Return the matmul layers after a weight's layer, the modules that run before it, and the
        class of a mixer.

        A layer counts as later if it follows in model order or in a forward pass. The modules are
        layers that a forward pass uses before the weight's layer, possibly in another branch. A
        mixer is a module that adds or multiplies activations after the weight's layer; without a
        mixer, the class is "".
        """
        steps, mixer, again = weight.path[_base(weight) :], "", set[nn.Module]()
        later = [*self.layers.after(steps[0][1], steps[-1][1])]
        for (name, inner), (_, scope) in pairwise(steps):
            words = self.words.after(scope, name)
            own = self.words.of(scope)
            before = own[: own.index(f".{name}")] if f".{name}" in own else []
            for n, child in scope.named_children():
                layers = self.layers.within(child) if child is not inner else []
                later += layers if f".{n}" in words else []
                again |= {x.module for x in layers if f".{n}" in before}
            if {*PRODUCTS, "linear"}.intersection(words) or (
                "+" in words and self.blocks.isdisjoint(scope.modules())
            ):
                mixer = mixer or kind_of(scope)
        return [x for x in later if x.multiplies], again, mixer

    def _cuts(self, weight: Weight) -> str:
        """Return the reason why a forward pass may divide a layer's outputs, or ""."""
        inner = False  # whether the layer is the last layer of an inner module
        for (name, _), (_, module) in pairwise(weight.path):
            ends, words = self._last(module) is weight.module, self.words
            sequential, later = isinstance(module, nn.Sequential), words.after(module, name)
            if sequential and (cut := (PARTS | AXES).intersection(later)):
                return _divider(module, cut)
            if getattr(type(module), "forward", None) is nn.Module.forward or (sequential and ends):
                continue  # a container whose parent uses the outputs
            if inner:
                later = [*takewhile(lambda word: word[0] != ".", later)]  # until the next child
            used = {*(later if ends or sequential or inner else words.of(module))}
            apart, parts = (PRODUCTS, PARTS | SHUFFLES) if ends else (HEADWISE, PARTS | AXES)
            cut = used & parts or (used & SHAPES and used & apart)
            gated = ends and later.count(":") > 1 and not GATES.isdisjoint(later)
            if (cut or gated) and not (ATTENTION.search(name) and _is_attention(module)):
                return _divider(module, cut)
            if inner or not ends:
                return ""
            inner = True
        return ""

    def _contained(self, weight: Weight, layer: Layer) -> str:
        """Return evidence, other than names, that a layer holds several matrices, or ""."""
        cutter = self.cutter if isinstance(weight.module, CONVOLUTIONS) else ""
        if why := f"{cutter} splits channels" if cutter else self._cuts(weight):
            return why
        heads = [_first(module, HEAD_COUNTS) for _, module in weight.path[1:3]]
        if layer.inputs == layer.outputs in heads:
            return f"it mixes the {layer.outputs} heads of attention"
        for name, other in weight.around.named_parameters(recurse=False):
            axes = [size for size in other.shape if size > 1]
            if len(axes) > 1 and prod(axes) == layer.outputs and other is not weight.parameter:
                along = f"along {len(axes)} axes, like heads"
                return f"{name} arranges its {layer.outputs} outputs {along}"
        return ""

    def _divides_inputs(self, module: nn.Module) -> bool:
        """Return whether a module may split its inputs (other modules' projections) into heads."""
        words, size = self.words.of(module), _first(module, HEAD_SIZES)
        widest = max((x.inputs for x in self.layers.within(module)), default=0)
        grouped = _first(module, KEY_COUNTS) not in (0, _first(module, HEAD_COUNTS))
        members = chain(module.named_modules(), module.named_parameters(recurse=False))
        parts = set[str]()
        for name, member in members:
            layer = Layer.of(member) if isinstance(member, nn.Module) else None
            own = name.rpartition(".")[2]
            one = layer is not None and layer.inputs == layer.outputs == size < widest
            if not one:  # a layer that maps one head to one head is not a projection
                part = projection_of(own) or ("qkv" if is_fused(own) else "")
                twice = layer is not None and layer.outputs == 2 * layer.inputs
                parts |= {*("kv" if part == "qkv" and twice and not grouped else part)}
        products = sum(word in PRODUCTS for word in words)
        return (
            not parts >= {*"qkv"}
            # If the only product is that of queries and keys, there are no values.
            and (products > bool(parts) or "scaled_dot_product_attention" in words)
            and not (SHAPES | AXES).isdisjoint(words)
            and self.blocks.isdisjoint({*module.modules()} - {module})
            and not is_bare(module)
        )

    def _joins(self, part: str, name: str, around: nn.Module) -> bool:
        """Return whether the projection or its attention may append heads to the outputs."""
        inner = getattr(around, name, None)
        words = [word for word in self.words.of(around) if word != "torch"]
        passes = isinstance(inner, nn.Module) and "cat" in self.words.of(inner)
        pairs = any(cut in PARTS and then == "cat" for cut, then in pairwise(words))
        return passes or (part == "v" and pairs)

    def _cutter(self, model: nn.Module) -> str:
        """Return the class of a convolutional module that splits a tensor, or ""."""
        for module in model.modules():
            if any(isinstance(m, CONVOLUTIONS) for m in module.modules()):
                own = (c if isinstance(c, nn.Sequential) else [c] for c in module.children())
                convolves = any(isinstance(m, CONVOLUTIONS) for layers in own for m in layers)
                words = self.words.of(module)
                if PARTS.intersection(words) or (convolves and ":" in words):
                    return kind_of(module)
        return ""

    def _experts(self, weight: Weight) -> tuple[Division, str]:
        """Return the division of a stack of experts `[experts, ., .]`, and the evidence for it."""
        module, shape = weight.module, tuple(weight.parameter.shape)
        named = any("expert" in f"{n}{kind_of(m)}".lower() for n, m in weight.path[:2])
        transposed: Any = getattr(module, "is_transposed", None)
        fused = is_fused(weight.own_name)
        if not (named and isinstance(transposed, bool) and len(shape) == 3):
            raise ValueError(f"has shape {shape}, and its two matrix axes are unknown")
        rows = shape[1 + transposed]
        if fused and rows % 2:
            raise ValueError(f"must have an even number of rows, got {rows}")
        division = Division(stacked=True, transposed=transposed)
        if not fused:
            return division, "experts"
        if getattr(module, "is_concatenated", True) is False:
            return replace(division, stride=2), "experts' alternating gate and up"
        return replace(division, rows=(rows // 2,)), "experts' gate and up"


def is_fused(name: str) -> bool:
    """Return whether a weight's name suggests that it holds several matrices."""
    return FUSED.search(name.replace("_", "")) is not None


def projection_of(name: str) -> str | None:
    """Return the attention projections that a name refers to ("q", "qkv", ...), or None."""
    if name in ("c_attn", "att_proj", "in_proj_weight"):
        return "qkv"
    words = FILLERS.sub("", name.lower()).removeprefix("w")
    part = PROJECTIONS.sub(lambda word: word[0][0], words)
    factor = part != "q" and re.search(r"_(b|up)(_|$)", name)
    return None if factor or part not in ("q", "k", "v", "qk", "kv", "qkv") else part


def _divider(module: nn.Module, words: set[str]) -> str:
    """Return the reason why a forward pass with `words` in its code may divide outputs."""
    return f"{kind_of(module)} " + (
        "calls code that cannot be read" if words == {OPAQUE} else "splits channels"
    )


def _head_size(part: str, around: nn.Module, outputs: int) -> int | None:
    """Return a projection's rows per head: None without heads, 0 if the number is unclear."""
    attributes = HEAD_SIZES, VALUE_SIZES, HEAD_COUNTS, KEY_COUNTS
    size, values, heads, stated = (_first(around, names) for names in attributes)
    own = values if part == "v" else _first(around, QUERY_SIZES) if part in ("q", "k") else 0
    if not (size or own or heads):
        return None
    if own and outputs % own == 0:
        return own
    if part in ("qkv", "kv") and values not in (0, size):
        return 0
    layers = [(projection_of(name), Layer.of(child)) for name, child in around.named_children()]
    count = ("q" in part) * heads + len(part.strip("q")) * (stated or heads)
    if size and heads:  # size and count must agree; queries may have several vectors per head
        queries = [x.outputs for p, x in layers if p == "q" and x] + [outputs] * (part == "q")
        fewer = not stated and part != "q"  # maybe one key for all heads
        agree = count * size % outputs == 0 if fewer else outputs == count * size
        if any(n % (heads * size) for n in queries) or not (agree or part == "q"):
            return 0
    if size and outputs % size == 0:
        return size
    widths = [x.outputs * len(part) - outputs * len(p) for p, x in layers if p and x]
    if part in ("k", "v", "kv") and not stated and any(widths):  # maybe one key for all heads
        return 0
    return 0 if not count or outputs % count else outputs // count


def _first(module: nn.Module, names: str) -> int:
    """Return the first positive integer among a module's attributes `names`, or 0."""
    values = (getattr(module, name, None) for name in names.split())
    return next((value for value in values if type(value) is int and value > 0), 0)


def _attribute_rows(attributes: str, around: nn.Module) -> tuple[int, ...]:
    """Return the row counts of consecutive matrices, or () if an attribute is missing."""
    sizes = ([_first(around, name) for name in part.split("*")] for part in attributes.split())
    rows = tuple(size for *count, size in sizes for _ in range(*count or [1]))
    return rows if all(rows) else ()


def _base(weight: Weight) -> int:
    """Return the path index of a weight's layer or, for an adapter's lora_B, of the base layer."""
    names = [name.lower() for name, _ in weight.path]
    return names.index("lora_b") + 1 if "lora_b" in names else 0


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the output heads returned by `get_...` methods of a model's modules."""
    for module in model.modules():
        for name in ("get_output_embeddings", "get_classifier"):
            heads: object = None
            with suppress(AttributeError, NotImplementedError, TypeError):
                heads = getattr(module, name)()
            heads = [*heads.values()] if isinstance(heads, (dict, nn.ModuleDict)) else heads
            for head in heads if isinstance(heads, (tuple, list, nn.ModuleList)) else [heads]:
                if isinstance(head, nn.Module):
                    yield head


def _blocks(model: nn.Module) -> set[nn.Module]:
    """Return the modules that a model repeats, such as its layers."""
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    blocks = set[nn.Module]()
    for outer in lists:
        modules = [m for m in outer if m is not None]  # x_transformers' lists contain None
        kinds = Counter(map(type, modules))
        single = isinstance(outer, nn.ModuleList) and len(outer) == 1
        blocks |= {m for m in modules if single or kinds[type(m)] > 1}
    return {m for m in blocks if any(m.children()) and not isinstance(m, nn.Sequential)}


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module defines a number of heads and has attention projections."""
    stated = _first(module, f"{HEAD_SIZES} {HEAD_COUNTS}")
    return stated > 0 and any(projection_of(name) for name, _ in module.named_children())


def _is_router(step: tuple[str, nn.Module], outer: tuple[str, nn.Module]) -> bool:
    """Return whether a module has a router's name or class and is next to experts."""
    (name, module), (_, around) = step, outer
    return bool(ROUTERS.search(name) or ROUTERS.search(kind_of(module))) and any(
        child is not module and "expert" in f"{other}{kind_of(child)}".lower()
        for other, child in around.named_children()
    )


def _is_table(weight: Weight) -> bool:
    """Return whether a weight's name and shape suggest a table of rows to look up or to add."""
    if kind_of(weight.module).endswith("Embedding"):
        return True
    if weight.is_layer:
        named = EMBEDDINGS.search(weight.own_name) is not None
        return named and re.search("(?i)emb|lookup", kind_of(weight.module)) is not None
    return TABLES.search(weight.own) is not None
