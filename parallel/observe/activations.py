"""What flows through the model on a step that is looked at: Gram matrices, sizes, attention scores.

The inputs of every weight are added up to their Gram matrix A A^T as they come by, a few thousand
tokens at a time; no activation is kept. Hooks exist on such steps alone, and change nothing. What
recomputation runs twice is counted once, in the pass that backward follows.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.utils import parametrize

from models.blocks.attention import CoreAttention
from models.units import Unit
from parallel.comm.collectives import MAX, Traffic, all_reduce_
from parallel.comm.groups import Axis, Domain, Groups
from parallel.model import ParallelModel

CHUNK = 4096
"""Tokens whose inputs are in float32 at once."""

EMBEDDING = "embedding"


@dataclass
class Inputs:
    """The inputs A `[inputs, tokens]` of one parameter, added up.

    gram     A A^T: `[inputs, inputs]`; before `ActivationWatch.inputs`, if tensor parallelism cuts
             A, the rows of this rank; of the embedding, the number of times `[rows]` that each
             token came
    tokens   how many, `[]`
    """

    gram: Tensor
    tokens: Tensor
    cut: Axis | None


@dataclass
class Size:
    """Entries of something that came by: the sum of their squares, their number, the largest."""

    square: Tensor
    number: Tensor
    largest: Tensor

    def add(self, seen: Tensor) -> None:
        """Count the entries of `seen`."""
        wide = seen.detach().double()
        self.square += wide.square().sum()
        self.number += wide.numel()
        self.largest = torch.maximum(self.largest, wide.abs().amax())


class ActivationWatch:
    """Watches the forward passes of one step on this rank."""

    def __init__(
        self,
        model: ParallelModel,
        groups: Groups,
        layers: Collection[int],
        *,
        inputs: bool,
        attention: bool,
    ) -> None:
        """Starts to watch. The inputs of the weights in `layers`, of the embedding and of the head
        are added up with `inputs`, which also measures the residual stream and the blocks' outputs;
        `attention` is whether the scores of attention are looked at."""
        self.model = model
        self.groups = groups
        self.seen: dict[str, Inputs] = {}
        self.sizes: dict[tuple[str, str], Size] = {}
        self.logits: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        if inputs:
            for module, unit, domain in self._linears(layers):
                self._watch_inputs(module, unit, domain)
        for chunk in model.chunks:
            for module in chunk.modules():
                if isinstance(module, TransformerLayer):
                    self._watch_layer(module, inputs, attention)
                elif isinstance(module, GPTModel) and module.pre_process and inputs:
                    self._measure(module.embedding, EMBEDDING, "residual")

    def stop(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def inputs(self) -> dict[str, Inputs]:
        """The inputs of each watched parameter over the global batch; all ranks of a stage
        together. A factor in common is left in what every tensor-parallel rank has seen alike."""
        domains = {part.domain.name: part.domain for part in self.model.domains}
        names = {unit.parameter: unit.domain for unit in self.model.units}
        for name, seen in self.seen.items():
            domain = domains[names[name]]
            axis = domain.stage if seen.cut is None else domain.replicas
            all_reduce_(seen.gram, axis, Traffic(), "activations")
            all_reduce_(seen.tokens, axis, Traffic(), "activations")
            if seen.cut is not None:
                seen.gram, seen.cut = gathered(seen.gram, seen.cut), None
        return self.seen

    def blocks(self) -> dict[str, dict[str, float]]:
        """Figures by layer or place, on the first rank of each stage; all of a stage together."""
        stage = self.groups.dense.stage
        found: dict[str, dict[str, float]] = {}
        for (place, name), size in self.sizes.items():
            for value in (size.square, size.number):
                all_reduce_(value, stage, Traffic(), "activations")
            all_reduce_(size.largest, stage, Traffic(), "activations", MAX)
            own = found.setdefault(place, {})
            own[f"{name}_rms"] = (size.square / size.number).sqrt().item()
            own[f"{name}_absmax"] = size.largest.item()
        for place, value in self.logits.items():
            all_reduce_(value, stage, Traffic(), "activations", MAX)
            found.setdefault(place, {})["max_attention_logit"] = value.item()
        return found if stage.rank == 0 else {}

    def _linears(self, layers: Collection[int]) -> Iterator[tuple[torch.nn.Module, Unit, Domain]]:
        """Module, a unit and its domain of every watched matrix parameter of this rank."""
        owners: dict[int, torch.nn.Module] = {}
        for chunk in self.model.chunks:
            for module in chunk.modules():
                if parametrize.is_parametrized(module, "weight"):
                    chain = cast(Any, module).parametrizations.weight
                    owners[id(chain.original)] = module
                for parameter in module._parameters.values():
                    owners.setdefault(id(parameter), module)
        done = set()
        for part in self.model.domains:
            for unit in part.units:
                watched = unit.layer is None or unit.layer in layers
                if unit.is_matrix and watched and unit.parameter not in done:
                    done.add(unit.parameter)
                    module = owners[id(self.model.parameters[unit.parameter])]
                    yield module, unit, part.domain

    def _watch_inputs(self, module: torch.nn.Module, unit: Unit, domain: Domain) -> None:
        device, tensor = self.groups.device, domain.tensor
        dtype = torch.promote_types(next(module.parameters()).dtype, torch.float32)
        cut = unit.shard_axis == len(unit.axes) - 1
        rows, cols = unit.axes[0], unit.axes[-1]
        shape = (rows,) if unit.role == EMBEDDING else (cols // tensor.size if cut else cols, cols)
        seen = Inputs(
            torch.zeros(shape, dtype=dtype, device=device),
            torch.zeros((), dtype=torch.float64, device=device),
            tensor if cut else None,
        )
        self.seen[unit.parameter] = seen
        add = count_tokens if unit.role == EMBEDDING else add_gram

        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                with torch.no_grad():
                    add(seen, normalised(module, first(args, kwargs)))

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _watch_layer(self, layer: TransformerLayer, sizes: bool, attention: bool) -> None:
        place = str(layer.layer_number - 1)
        if sizes:
            self._measure(layer, place, "residual")
            self._measure(layer.self_attention, place, "attention_output")
            self._measure(layer.mlp, place, "ffn_output")
            self._measure_input(layer.pre_mlp_layernorm, place, "residual_after_attention")
        core = layer.self_attention.core_attention
        if attention and isinstance(core, CoreAttention):
            self._watch_scores(core, place)

    def _watch_scores(self, core: CoreAttention, place: str) -> None:
        self.logits[place] = torch.full((), -torch.inf, device=self.groups.device).double()

        def hook(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                query, key = (*args, *kwargs.values())[:2]
                best = core.largest_logit(query.detach(), key.detach()).double()
                self.logits[place] = torch.maximum(self.logits[place], best)

        self._handles.append(core.register_forward_pre_hook(hook, with_kwargs=True))

    def _measure(self, module: torch.nn.Module, place: str, name: str) -> None:
        """Measure what `module` gives out."""
        add = self._adder(place, name)

        def hook(module: Any, args: Any, output: Any) -> None:
            add(output[0] if isinstance(output, tuple) else output)

        self._handles.append(module.register_forward_hook(hook))

    def _measure_input(self, module: torch.nn.Module, place: str, name: str) -> None:
        add = self._adder(place, name)

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            add(first(args, kwargs))

        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _adder(self, place: str, name: str) -> Callable[[Tensor], None]:
        zeros = [torch.zeros((), dtype=torch.float64, device=self.groups.device) for _ in range(3)]
        size = self.sizes[place, name] = Size(*zeros)

        def add(seen: Tensor) -> None:
            if torch.is_grad_enabled():
                size.add(seen)

        return add


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The first thing that a module is given."""
    found: Tensor = (*args, *kwargs.values())[0]
    return found.detach()


def normalised(module: torch.nn.Module, seen: Tensor) -> Tensor:
    """What the weight of `module` multiplies: Transformer Engine's linears have the norm before
    them inside."""
    gain = getattr(module, "layer_norm_weight", None)
    if gain is None:
        return seen
    return F.rms_norm(seen, (seen.shape[-1],), gain.detach(), cast(float, module.eps))


def add_gram(inputs: Inputs, seen: Tensor) -> None:
    """Add the Gram matrix of `seen` `[..., inputs]`, of this rank's inputs with all."""
    seen = seen.reshape(-1, seen.shape[-1])
    inputs.tokens += len(seen)
    for part in seen.split(CHUNK):
        wide = part.to(inputs.gram.dtype)
        everything = wide if inputs.cut is None else gathered(wide.T.contiguous(), inputs.cut).T
        inputs.gram += wide.T @ everything


def count_tokens(inputs: Inputs, seen: Tensor) -> None:
    """Count tokens `[b, s]`."""
    inputs.gram += torch.bincount(seen.flatten(), minlength=len(inputs.gram)).to(inputs.gram.dtype)
    inputs.tokens += seen.numel()


def gathered(rows: Tensor, axis: Axis) -> Tensor:
    """The rows `[rows, ...]` of every rank of an axis, one below the other."""
    parts = [torch.empty_like(rows) for _ in range(axis.size)]
    dist.all_gather(parts, rows, group=axis.group)
    return torch.cat(parts)
