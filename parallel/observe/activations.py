"""Measures activations during a monitored step: Gram matrices, sizes, attention scores.

The Gram matrix A A^T of each weight's inputs A is accumulated a few thousand tokens at a time,
without storing activations. Hooks are installed for monitored steps only and never modify values.
With activation recomputation, only the recomputed forward pass is counted.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.nn.utils import parametrize

from models.blocks.attention import CoreAttention
from models.units import Unit
from parallel.comm.collectives import MAX, CommVolume, all_reduce_, gather
from parallel.comm.groups import Axis, Domain, Groups
from parallel.model import ParallelModel

CHUNK = 4096
"""Number of tokens whose inputs are upcast at a time."""

EMBEDDING = "embedding"


@dataclass
class Inputs:
    """Sums over tokens for a parameter's inputs A `[inputs, tokens]`.

    gram     A A^T `[inputs, inputs]`. If A is sharded, holds only this rank's rows until
             `ActivationWatch.inputs` gathers all rows. For the embedding, token counts `[rows]`.
    tokens   number of tokens, `[]`
    cut      ranks that A is sharded across; None if this rank has all of A
    """

    gram: Tensor
    tokens: Tensor
    cut: Axis | None


@dataclass
class Size:
    """Sum of squares, count, and maximum absolute value of a tensor's entries."""

    square: Tensor
    number: Tensor
    largest: Tensor

    def add(self, seen: Tensor) -> None:
        """Add the entries of `seen` to the statistics."""
        wide = seen.detach().double()
        self.square += wide.square().sum()
        self.number += wide.numel()
        self.largest = torch.maximum(self.largest, wide.abs().amax())


class ActivationWatch:
    """Hooks that measure this rank's forward passes during one step."""

    def __init__(
        self,
        model: ParallelModel,
        groups: Groups,
        layers: Collection[int],
        *,
        inputs: bool,
        attention: bool,
    ) -> None:
        """Install the hooks.

        With `inputs`, accumulates the inputs of the embedding, of the head and of all weights in
        `layers`, and measures the residual stream and the block outputs. With `attention`, records
        each layer's largest attention score.
        """
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def inputs(self) -> dict[str, Inputs]:
        """Return the `Inputs` of each watched parameter, summed over the global batch.

        Collective: all ranks of a stage must call this method. Inputs replicated across
        tensor-parallel ranks are counted once per rank, in both `gram` and `tokens`.
        """
        units = {unit.parameter: unit for unit in self.model.units}
        for name, seen in self.seen.items():
            domain = self.model.domain_of(units[name])
            axis = domain.stage if seen.cut is None else domain.replicas
            all_reduce_(seen.gram, axis, CommVolume(), "activations")
            all_reduce_(seen.tokens, axis, CommVolume(), "activations")
            if seen.cut is not None:
                seen.gram, seen.cut = gathered(seen.gram, seen.cut), None
        return self.seen

    def blocks(self) -> dict[str, dict[str, float]]:
        """Return activation sizes and attention scores, keyed by layer or "embedding".

        Collective: all ranks of a stage must call this method. Returns an empty dict on ranks other
        than the stage's first.
        """
        stage = self.groups.dense.stage
        figures: dict[str, dict[str, float]] = {}
        for (place, name), size in self.sizes.items():
            for value in (size.square, size.number):
                all_reduce_(value, stage, CommVolume(), "activations")
            all_reduce_(size.largest, stage, CommVolume(), "activations", MAX)
            layer = figures.setdefault(place, {})
            layer[f"{name}_rms"] = (size.square / size.number).sqrt().item()
            layer[f"{name}_absmax"] = size.largest.item()
        for place, value in self.logits.items():
            all_reduce_(value, stage, CommVolume(), "activations", MAX)
            figures.setdefault(place, {})["max_attention_logit"] = value.item()
        return figures if stage.rank == 0 else {}

    def _linears(self, layers: Collection[int]) -> Iterator[tuple[torch.nn.Module, Unit, Domain]]:
        """Yield the module, one unit and the domain of each watched matrix parameter on this
        rank."""
        module_of: dict[int, torch.nn.Module] = {}
        for chunk in self.model.chunks:
            for module in chunk.modules():
                if parametrize.is_parametrized(module, "weight"):
                    chain = cast(Any, module).parametrizations.weight
                    module_of[id(chain.original)] = module
                for parameter in module._parameters.values():
                    module_of.setdefault(id(parameter), module)
        done = set()
        for part in self.model.domains:
            for unit in part.units:
                # The inputs to a tied head are not measured on any layout.
                watched = unit.layer in layers or (unit.layer is None and not unit.is_copy)
                if unit.is_matrix and watched and unit.parameter not in done:
                    done.add(unit.parameter)
                    module = module_of[id(self.model.parameters[unit.parameter])]
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
            norm = layer.pre_mlp_layernorm
            self._measure(norm, place, "residual_after_attention", inputs=True)
        core = layer.self_attention.core_attention
        if not (attention and isinstance(core, CoreAttention)):
            return
        self.logits[place] = torch.full((), -torch.inf, device=self.groups.device).double()

        def hook(core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if torch.is_grad_enabled():
                query, key = (*args, *kwargs.values())[:2]
                documents = kwargs["packed_seq_params"]
                best = core.largest_logit(query.detach(), key.detach(), documents).double()
                self.logits[place] = torch.maximum(self.logits[place], best)

        self._handles.append(core.register_forward_pre_hook(hook, with_kwargs=True))

    def _measure(
        self, module: torch.nn.Module, place: str, name: str, *, inputs: bool = False
    ) -> None:
        """Measure the output of `module` or, with `inputs`, its input."""
        zeros = [torch.zeros((), dtype=torch.float64, device=self.groups.device) for _ in range(3)]
        size = self.sizes[place, name] = Size(*zeros)

        def hook(module: Any, args: Any, kwargs: Any, output: Any = None) -> None:
            if inputs and len(args) > 1:
                return  # given two terms, it returns their sum and is called again with it
            seen = first(args, kwargs) if inputs else output
            if torch.is_grad_enabled():
                size.add(seen[0] if isinstance(seen, tuple) else seen)

        register = module.register_forward_pre_hook if inputs else module.register_forward_hook
        self._handles.append(register(hook, with_kwargs=True))


def first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first argument passed to a module's forward."""
    argument: Tensor = (*args, *kwargs.values())[0]
    return argument.detach()


def normalised(module: torch.nn.Module, seen: Tensor) -> Tensor:
    """Return the input of the matmul in `module`, given the module's input `seen`.

    Transformer Engine's linear layers include the preceding norm.
    """
    gain = getattr(module, "layer_norm_weight", None)
    if gain is None:
        return seen
    return F.rms_norm(seen, (seen.shape[-1],), gain.detach(), cast(float, module.eps))


def add_gram(inputs: Inputs, seen: Tensor) -> None:
    """Add the product of this rank's inputs `seen` `[..., inputs]` and all ranks' inputs to
    `gram`."""
    seen = seen.reshape(-1, seen.shape[-1])
    inputs.tokens += len(seen)
    for part in seen.split(CHUNK):
        wide = part.to(inputs.gram.dtype)
        everything = wide if inputs.cut is None else gathered(wide.T.contiguous(), inputs.cut).T
        inputs.gram += wide.T @ everything


def count_tokens(inputs: Inputs, seen: Tensor) -> None:
    """Add the tokens `seen` `[b, s]` to the token counts."""
    flat = seen.flatten()
    # Integer sums are exact in any order; bincount would cause a host sync.
    inputs.gram.scatter_add_(0, flat, torch.ones_like(flat, dtype=inputs.gram.dtype))
    inputs.tokens += seen.numel()


def gathered(rows: Tensor, axis: Axis) -> Tensor:
    """Gather `rows` `[rows, ...]` from all ranks of an axis and concatenate them."""
    return torch.cat(gather(rows, axis.group, "gather of activations"))
