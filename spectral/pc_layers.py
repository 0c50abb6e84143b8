"""PC layers in any model: linear layers that multiply by PC(W) instead of W.

    preconditioned(model)                # after parallelize_module, before fully_shard or DDP
    optimizer = AdamW(split_parameters(model), lr=1e-3)
    ...
    merge_(model)                                            # W becomes PC(W), for export

PC(W) is a parametrization of the weight (torch.nn.utils.parametrize), computed in every forward
pass. Its only state is gamma. The top singular pair is computed from a cold start each time, so
activation recomputation, all ranks and resumed runs use the same pair. See
`spectral.effective_weight`.
"""

import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .batching import grouped
from .division import Division, narrowed
from .effective_weight import Preconditioner
from .ieee_products import without_autocast
from .known_weights import KnownWeights
from .local_part import is_dtensor, placed_as
from .model_weights import weights_of
from .odd_polynomial import Level, stages

BLOCKS = (
    *("o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj"),  # Llama family
    *("wo", "w1", "w2", "w3"),  # torchtitan
    *("c_proj", "c_fc"),  # GPT-2
    *("dense", "dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX
)
"""Names of the layers preconditioned in the paper: attention output and feed-forward."""


class EffectiveWeight(nn.Module):
    """Maps a weight to its effective weight, matrix by matrix.

    Subclasses define how to split a weight into matrices and how to obtain the matrices' top
    singular pairs.

    preconditioners   one preconditioner per matrix
    gamma             `[matrices]`, one scale per matrix
    """

    gamma: Tensor

    def __init__(self, preconditioners: Sequence[Preconditioner]) -> None:
        super().__init__()
        self.preconditioners = list(preconditioners)

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """Return the whole matrices `[rows, cols]` in a weight; differentiable."""
        raise NotImplementedError

    def assembled(self, matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Assemble the matrices into a tensor with the shape and placements of `weight`."""
        raise NotImplementedError

    def pairs(self, members: Sequence[int], stack: Tensor) -> tuple[Tensor, Tensor]:
        """Return the top singular pair of each matrix in `stack`.

        `members` lists the matrices' indices in the weight.
        """
        return self.preconditioners[members[0]].cold_pair(stack.detach())

    def forward(self, weight: Tensor) -> Tensor:
        """Return PC(W), with the shape, dtype and placements of `weight`."""
        matrices = self.matrices(weight)
        groups = grouped(
            range(len(matrices)), lambda i: (matrices[i].shape, self.preconditioners[i])
        )
        effective: dict[int, Tensor] = {}
        for (_, preconditioner), members in groups.items():
            stack = torch.stack([matrices[i] for i in members])
            wide = stack.to(torch.promote_types(stack.dtype, torch.float32))
            # Concatenate slices, because a list of indices would be copied to the device.
            gamma = torch.cat([self.gamma[i : i + 1] for i in members]).to(wide.dtype)
            with without_autocast(wide.device):
                new = preconditioner.effective(wide, *self.pairs(members, wide), gamma)
            effective |= dict(zip(members, new.to(weight.dtype), strict=True))
        return self.assembled([effective[i] for i in range(len(matrices))], weight)


class DividedWeight(EffectiveWeight):
    """The effective weight of a divided parameter, with singular pairs from cold starts.

    Tensor-parallel ranks that share a weight all-gather it, and each rank computes the whole PC(W).
    """

    def __init__(self, weight: Tensor, division: Division, preconditioner: Preconditioner) -> None:
        boxes = division.boxes(weight.shape)
        super().__init__([preconditioner] * len(boxes))
        self.division, self.boxes = division, boxes
        self.is_identity = False
        """Whether the layer uses W instead of PC(W), as during initialisation."""
        self.gamma = nn.Parameter(torch.ones(len(boxes), dtype=weight.dtype, device=weight.device))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set gamma to 1, its initial value."""
        self.gamma.fill_(1)

    def forward(self, weight: Tensor) -> Tensor:
        """Return PC(W), or W during initialisation."""
        return weight if self.is_identity else super().forward(weight)

    def matrices(self, weight: Tensor) -> list[Tensor]:
        """Return the matrices in the gathered weight.

        Every rank computes with the whole weight, so incoming gradients are identical on all ranks.
        """
        whole = weight.full_tensor() if is_dtensor(weight) else weight
        return [self.division.matrix(narrowed(whole, box)) for box in self.boxes]

    def assembled(self, matrices: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Assemble the matrices with the placements of `weight`."""
        whole = matrices[0].new_empty(weight.shape)
        for box, matrix in zip(self.boxes, matrices, strict=True):
            target = narrowed(whole, box)
            target.copy_(self.division.part(matrix, target.shape))
        return placed_as(whole, weight)

    def get_extra_state(self) -> Tensor:
        """Return the polynomial's coefficients, for comparison in `set_extra_state`."""
        level = self.preconditioners[0].level
        return torch.tensor([c for stage in stages(level) for c in stage], device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError if the saved coefficients differ by more than 16-bit rounding."""
        coefficients = self.get_extra_state()
        saved = state.to(coefficients)
        if saved.shape != coefficients.shape or not torch.allclose(saved, coefficients, rtol=1e-2):
            raise ValueError(
                f"a PC layer of level {self.preconditioners[0].level} cannot load a state with the "
                f"coefficients {saved.tolist()}, which differ from {coefficients.tolist()}"
            )


class PCLinear(nn.Linear):
    """A drop-in replacement for nn.Linear whose weight is preconditioned as a single matrix."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, level: Level = 4
    ) -> None:
        super().__init__(in_features, out_features, bias)
        _register(self, Division(), Preconditioner(level=level))


def preconditioned(
    model: nn.Module, *, blocks: Iterable[str] = BLOCKS, level: Level = 4
) -> list[str]:
    """Convert a model's linear layers to PC layers in place, and return their names.

    The matrices in a weight (see `split_parameters`) are preconditioned separately. Until `merge_`,
    the parameter is named `parametrizations.weight.original`. Initialise or load the weights before
    this call. Afterwards, use the layers' `reset_parameters`: `layer.weight` is then PC(W), so
    `nn.init` would have no effect on W.

    Args:
        model: any model, after tensor parallelism but before FSDP or DDP is applied.
        blocks: layer names, or patterns of full names such as `*.layers.3.mlp.*`.
        level: polynomial level; see `Preconditioner`.

    Raises:
        ValueError: if a name in `blocks` matches no layer (with the default `blocks`: if none of
            the names matches), or if a matching weight is parametrized, sharded by FSDP, or shared
            with another module. The model is then left unchanged.
        TypeError: if `model` is not a module, or `blocks` is not a collection of names.
    """
    _check_module(model)
    optional = blocks is BLOCKS
    if isinstance(blocks, str):
        raise TypeError(f"blocks must be a collection of names, got {blocks!r}")
    blocks = list(blocks)
    weights, unused = {}, set(blocks)
    for weight in weights_of(model):
        layer, parametrized, _ = weight.name.partition(".parametrizations.weight.")
        layer = layer.removesuffix(".weight")
        if weight.parameter.ndim < 2 or not (parametrized or weight.name.endswith(".weight")):
            continue
        matching = {b for b in blocks if weight.own_name == b or fnmatchcase(layer, b)}
        if not matching:
            continue
        unused -= matching
        if parametrized:
            raise ValueError(
                f"the weight of {layer} must not already be parametrized, for example by a PC layer"
            )
        if is_dtensor(weight.parameter) and _is_sharded_by_fsdp(model):
            raise ValueError(f"{layer} is already sharded; call preconditioned before fully_shard")
        _refuse_shared(model, weight.parameter)
        weights[layer] = weight
    if not weights or (unused and not optional):
        names = [block for block in blocks if block in unused]
        raise ValueError(
            f"blocks must be the names of layers that can be preconditioned, got {names}"
        )
    weights_by_name = KnownWeights(model)
    divisions = {}
    for layer, weight in weights.items():
        try:
            divisions[layer], _ = weights_by_name.division(weight)
        except ValueError as error:
            raise ValueError(f"{weight.name}: {error}; leave {layer} out of blocks") from None
    for layer, division in divisions.items():
        _register(weights[layer].module, division, Preconditioner(level=level))
    return [*weights]


def merge_(model: nn.Module) -> None:
    """Turn every PC layer back into an ordinary layer, whose weight is PC(W).

    Tensor-parallel ranks must call this collectively. Raises ValueError if the model has no PC
    layers or is sharded by `fully_shard`, or if a weight is shared with another module.
    """
    _check_module(model)
    if _is_sharded_by_fsdp(model):
        raise ValueError(
            "merge_ requires an unsharded model; load the state into an unsharded model first"
        )
    layers: list[tuple[nn.Module, Any]] = [
        (module, chain)
        for module in model.modules()
        if parametrize.is_parametrized(module, "weight")
        for chain in [module.get_submodule("parametrizations.weight")]
        if any(isinstance(part, EffectiveWeight) for part in chain.children())
    ]
    if not layers:
        raise ValueError(f"merge_ requires a model with PC layers, got {type(model).__name__}")
    for module, chain in layers:
        _refuse_shared(model, chain.original)
        # `weight` is removed from the module's class, which copies of the module share.
        kind = type(module)
        module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


def _check_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def _is_sharded_by_fsdp(model: nn.Module) -> bool:
    """Return whether `fully_shard` has been applied to any part of the model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules())


def _refuse_shared(model: nn.Module, parameter: Tensor) -> None:
    """Raise ValueError if a weight is shared by several modules."""
    sharers = [
        name.removesuffix(".parametrizations.weight")
        for name, module in model.named_modules()
        if any(p is parameter for p in module.parameters(recurse=False))
    ]
    if len(sharers) > 1:
        raise ValueError(
            f"{' and '.join(sharers)} share a weight, so only one of these layers would multiply "
            "by PC(W)"
        )


def _register(module: nn.Module, division: Division, preconditioner: Preconditioner) -> None:
    weight = module.get_parameter("weight")
    effective = DividedWeight(weight, division, preconditioner)
    parametrize.register_parametrization(module, "weight", effective)
    if hasattr(module, "reset_parameters"):
        kind: Any = type(module)  # class that torch created for this module and its copies
        kind.reset_parameters = _reset_parameters


def _reset_parameters(module: nn.Module) -> None:
    """Initialise W and the bias as the ordinary layer does, and set gamma to 1."""
    chain: Any = module.get_submodule("parametrizations.weight")
    parts = [part for part in chain if isinstance(part, DividedWeight)]
    for part in parts:
        part.is_identity = True
    try:
        type(module).__bases__[0].reset_parameters(module)  # type: ignore[attr-defined]
    finally:
        for part in parts:
            part.is_identity = False
            part.reset_parameters()
