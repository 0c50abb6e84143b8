"""Checks and warnings of the optimizer: its arguments, parameter groups and replaced parameters."""

import math
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from .division import Division
from .local_part import rank_and_count
from .parameter_split import check_name
from .parameter_state import Member, entry_names, listed_in, rule_of
from .rules import Rule, State
from .rules.base import Rate, check_rate, check_value

if TYPE_CHECKING:
    from .sharded.ranks import RankGroup

Group = Mapping[str, Any]
"""A parameter group."""
Frozen = tuple[str, "ref[torch.nn.Module]"]
"""Name of a frozen parameter, and its module."""


def check_params(params: Any) -> None:
    """Raise TypeError for a `params` argument that is not an ordered collection of parameters."""
    if isinstance(params, torch.nn.Module) and not isinstance(params, torch.nn.ParameterList):
        raise TypeError("params must be parameters or split_parameters(model), got a model")
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(
            "params must be parameters, a list of groups or split_parameters(model), got "
            f"{params!r:.60}"
        )
    if isinstance(params, set | frozenset):
        raise TypeError(
            "params must be an ordered collection, got a set: the order of a set differs "
            "across ranks"
        )


def check_rates(group: dict[str, Any], *, least: float = -math.inf) -> None:
    """Raise ValueError or TypeError for invalid rates or rates below `least`, without reading
    tensors.

    One-element tensors are reshaped to 0-d.
    """
    for name in ("lr", "weight_decay"):
        rate = group[name]
        if isinstance(rate, Tensor) and rate.ndim and rate.numel() == 1:
            rate = group[name] = rate.view(())  # torch's optimizers also accept such tensors
        check_rate(name, rate)
        check_value(name, Rate, rate)
        if not isinstance(rate, Tensor) and rate < least:
            raise ValueError(f"{name} must not be negative, got {rate}")


def check_names(group: Group, groups: Sequence[Group]) -> None:
    """Raise ValueError if only some groups name their parameters."""
    named = "param_names" in group or any(isinstance(p, tuple) for p in group["params"])
    if all(named is ("param_names" in other) for other in groups):
        return
    if named:
        raise ValueError(
            "a group must not contain parameter names, because the other groups contain no "
            "names; create the optimizer with split_parameters(model)"
        )
    raise ValueError(
        "a group must contain parameter names, because the other groups contain names; call "
        "optimizer.add_param_group for each group of split_parameters(module)"
    )


def check_parameters(group: Group, rule: Rule, division: Division) -> None:
    """Raise ValueError for a parameter that is not supported by its group's rule."""
    names = group.get("param_names", [""] * len(group["params"]))
    for parameter, name in zip(group["params"], names, strict=True):
        if not parameter.is_floating_point():
            raise ValueError(
                f"parameters must be real floating-point tensors, got {parameter.dtype}"
            )
        if parameter.element_size() < 2:
            raise ValueError(f"parameters must have at least 16 bits, got {parameter.dtype}")
        if rule.whole_matrix:
            _check_matrices(rule, division, parameter, name)
            if group["units"] is None:
                check_name(name)
                if parameter.ndim == 3:
                    raise ValueError(
                        f"{name or 'a parameter'} of shape {tuple(parameter.shape)} may be a "
                        "stack of matrices or a single convolution: use split_parameters, or set "
                        "the group's units to {'stacked': True} for a stack or {} for a convolution"
                    )


def _check_matrices(rule: Rule, division: Division, parameter: Tensor, name: str) -> None:
    """Raise ValueError for a parameter that contains no matrix that the rule can update."""
    shape = tuple(parameter.shape)
    if not parameter.numel():
        raise ValueError(f"{name or 'a parameter'} must not be empty, got shape {shape}")
    if parameter.ndim < 2:
        try:
            rule.init_state(torch.empty(1, *shape, device="meta"))
        except ValueError:
            raise ValueError(
                f"{type(rule).__name__} requires parameters with at least 2 dimensions, got shape "
                f"{shape} for {name or 'a parameter'}; put the parameter in a group with an "
                "elementwise rule, as split_parameters(model) does"
            ) from None
    division.boxes(parameter.shape)


def warn_unnamed(groups: Sequence[Group]) -> None:
    """Warn if several 2-D parameters have no names or units: some may not be single
    matrices."""
    unnamed = [g for g in groups if "param_names" not in g and g["units"] is None]
    matrices = [g["params"] for g in unnamed if rule_of(g).whole_matrix]
    count = sum(parameter.ndim == 2 for params in matrices for parameter in params)
    if count > 1:
        warn(
            f"{count} unnamed parameters are each updated as one matrix, even embeddings, "
            "output heads and fused weights: pass split_parameters(model), or set each group's "
            "units ({} for single matrices)"
        )


def warn_alone(groups: Sequence[Group]) -> None:
    """Warn on rank 0 if several ranks neither share matrices nor compare gradients."""
    rank, count = rank_and_count()
    whole = any(rule_of(group).whole_matrix for group in groups)
    if whole and count > 1 and rank == 0:
        warn(
            f"replicas is None, so each of {count} ranks updates all its matrices, and ranks "
            "with different gradients silently diverge: average gradients before the step, as "
            "DDP does; to check gradients and divide the work, pass "
            "replicas=torch.distributed.group.WORLD, or another group if ranks have different "
            "parameters"
        )


def warn_unfrozen(frozen: Sequence[Frozen], groups: Sequence[Group]) -> list[Frozen]:
    """Warn about each frozen parameter that now has a gradient, and return the other parameters."""
    trained: dict[str, Tensor] = {}
    for name, holder in frozen:
        parameter = getattr(holder(), "_parameters", {}).get(name.rpartition(".")[2])
        if parameter is not None and parameter.requires_grad and parameter.grad is not None:
            trained[name] = parameter
    stepped = {*listed_in(groups, "params")} if trained else set()
    names = [name for name, parameter in trained.items() if parameter not in stepped]
    if names:
        warn(
            f"{listed(names)} will not be updated, because split_parameters skips frozen "
            "parameters; add them with add_param_group"
        )
    return [each for each in frozen if each[0] not in names]


def check_kinds(
    groups: Sequence[Group], members: Mapping[Tensor, Member], state: Mapping[Tensor, State]
) -> None:
    """Raise ValueError if a rule or division does not match the state of a parameter."""
    for group in groups:
        name, division = group["rule"], Division.of(group["units"])
        for parameter in group["params"]:
            old = members.get(parameter)
            if old is None or (old.rule_name, old.division) == (name, division):
                continue
            if state.get(parameter, {}).keys() & {*entry_names(old.rule)}:
                raise ValueError(
                    "the rule and units of a parameter with optimizer state must not change "
                    f"from {old.rule_name!r} and {old.division.settings()} to {name!r} and "
                    f"{division.settings()}; create a new optimizer or group for the parameter"
                )


def check_module(module: torch.nn.Module | None, groups: Sequence[Group]) -> None:
    """Raise ValueError if the model replaced a parameter, because the gradient is then
    missing."""
    named = dict(module.named_parameters()) if module is not None else {}
    present, stepped = {*named.values()}, {*listed_in(groups, "params")}
    for group in groups:
        for name, old in zip(group.get("param_names", ()), group["params"], strict=False):
            now = named.get(name)
            replaced = now is not None and now.grad is not None and old not in present
            if replaced and old.grad is None and now not in stepped:
                raise ValueError(
                    f"{name} was replaced after the optimizer was created, for example by "
                    "fully_shard or load_state_dict(assign=True); create the optimizer after "
                    "this call"
                )


def check_replicas(
    ranks: "RankGroup",
    parameters: Sequence[Tensor],
    grads: Sequence[Tensor],
    members: Mapping[Tensor, Member],
) -> None:
    """Raise ValueError if the norms of gradients differ between the replicas."""
    norms = []
    for grad in grads:
        # A norm in a wider dtype would copy the gradient, except from 16 bits on GPUs.
        dtype = torch.promote_types(grad.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(grad, dtype=dtype).to(grads[0].device))
    differing = [*compress(parameters, ranks.differ(norms))]
    if differing:
        raise ValueError(
            f"the gradient of {names_of(differing, members)} differs between the ranks of "
            "`replicas`; average gradients over these ranks before the step, as DDP does"
        )


def names_of(parameters: Iterable[Tensor], members: Mapping[Tensor, Member]) -> str:
    """List parameters by name, or by shape if they have no name."""
    return listed([members[p].name or f"a parameter of shape {tuple(p.shape)}" for p in parameters])


def warn(message: str) -> None:
    """Issue a warning that points to the caller's code, outside torch and this package."""
    frame, level, inner = sys._getframe().f_back, 2, {"torch", __name__.partition(".")[0]}
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in inner:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def listed(names: Sequence[str]) -> str:
    """Return up to three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
