"""`torch.optim.Optimizer` classes over the update rules, for one process and any `nn.Module`.

    matrices, others = split_parameters(model, elementwise=[model.head])
    optimizer = SpectralSphere(
        [{"params": matrices}, {"params": others, "rule": "adamw", "lr": 3e-4}]
    )

Every hyper-parameter of a group's rule is a plain value in the group, so schedulers and state_dict
see all of them. Parameters of equal shape are stepped together, also those of groups that differ
only in their learning rate. Whole-matrix rules see a convolution weight `[out, in, ...]` as
`[out, in * ...]`.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from . import kernels
from .polar import chunk_size, stack_size
from .rules import RULES, Report, Rule, State
from .rules.base import COPY, Rate, Stack

MASTER = "master"
"""Entry of the state of a 16-bit parameter: its weight in float32."""
COMMON = ("params", "rule", "lr", "weight_decay")


def split_parameters(
    module: nn.Module, *, elementwise: Iterable[nn.Module] = ()
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable parameters into `(matrices, others)` for two kinds of rules.

    Others, for an elementwise rule, are parameters with fewer than two dimensions, every embedding
    table, and all parameters of the modules given in `elementwise` (typically the output head).
    Shared parameters appear once; one shared with an embedding counts as an embedding.
    """
    apart = [m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    excluded = {id(p) for m in (*apart, *elementwise) for p in m.parameters()}
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.ndim >= 2 and id(p) not in excluded]
    chosen = {id(p) for p in matrices}
    return matrices, [p for p in trainable if id(p) not in chosen]


class SpectralOptimizer(torch.optim.Optimizer):
    """An optimizer whose groups each follow one of `spectral.rules.RULES`.

    Args:
        params: parameters, or groups
            `{"params": ..., "rule": name, "lr": ..., <fields of the rule>}`.
        rule: the rule of groups that name none.
        lr, weight_decay: defaults of the groups; lr may be a 0-d tensor.
        nonfinite: what happens on a NaN or infinite gradient: "raise" FloatingPointError before
            anything has changed, which waits for the device, or "skip" the whole step on the device
            and count it in `skipped_steps`, a 0-d tensor.
        master_weights: step a float32 copy of every 16-bit parameter, kept in the state, and round
            it to the parameter, in the same pass where a kernel can. Otherwise such a parameter
            loses every update below its own rounding.
        options: fields of the default rule.

    Raises:
        ValueError: unknown rule, invalid field, or a parameter that its rule cannot take.
        TypeError: an option that the rule does not have.
    """

    default_rule: ClassVar[str] = "spectral_sphere"
    default_lr: ClassVar[float] = 5e-3

    def __init_subclass__(cls, *, rule: str | None = None, lr: float | None = None) -> None:
        super().__init_subclass__()
        cls.default_rule = rule or cls.default_rule
        cls.default_lr = cls.default_lr if lr is None else lr

    def __init__(
        self,
        params: Any,
        *,
        rule: str | None = None,
        lr: float | Tensor | None = None,
        weight_decay: float = 0.1,
        nonfinite: Literal["raise", "skip"] = "raise",
        master_weights: bool = False,
        **options: Any,
    ) -> None:
        if nonfinite not in ("raise", "skip"):
            raise ValueError(f"nonfinite must be raise or skip, got {nonfinite!r}")
        name = self.default_rule if rule is None else rule
        defaults = {
            "rule": name,
            "lr": self.default_lr if lr is None else lr,
            "weight_decay": weight_decay,
            "nonfinite": nonfinite,
            "master_weights": master_weights,
            **options,
        }
        _check_options(name, set(options))
        self._reset_figures()
        super().__init__(params, defaults)

    def _reset_figures(self) -> None:
        # Figures of the last step, per chunk of equal parameters; and 0-d counts on their devices.
        self.last_reports: list[tuple[list[Tensor], Report]] = []
        self.skipped_steps = torch.zeros((), dtype=torch.int64)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_figures()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group with all fields of its rule and initialise its state."""
        name = param_group.get("rule", self.defaults["rule"])
        _check_options(name, set(param_group) - set(COMMON))
        own = {f.name: f.default for f in fields(RULES[name])}
        inherited = own.keys() & self.defaults.keys() if name == self.defaults["rule"] else set()
        common = {k: self.defaults[k] for k in ("rule", "lr", "weight_decay")}
        group = {**own, **common, **{k: self.defaults[k] for k in inherited}, **param_group}
        _check_group(group)
        rule = rule_of(group)
        super().add_param_group(group)
        for key in self.defaults.keys() - own.keys() - set(COMMON):
            group.pop(key, None)
        try:
            masters = self.defaults.get("master_weights", False)
            for parameter in group["params"]:
                self.state[parameter] = _initial_state(rule, parameter, masters)
        except ValueError:
            for parameter in self.param_groups.pop()["params"]:
                self.state.pop(parameter, None)
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as `torch.optim.Optimizer` does, in the dtypes it was saved in."""
        super().load_state_dict(state_dict)
        names = (name for group in state_dict["param_groups"] for name in group["params"])
        mine = (p for group in self.param_groups for p in group["params"])
        for name, parameter in zip(names, mine, strict=True):
            for key, value in state_dict["state"].get(name, {}).items():
                if value.dtype != self.state[parameter][key].dtype:  # cast to the parameter's
                    self.state[parameter][key] = value.detach().to(parameter.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns the closure's result, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = self._gate()
        self.last_reports = []
        for rule, groups in _groups_by_rule(self.param_groups):
            rates = {p: group["lr"] for group in groups for p in group["params"]}
            for chunks in _joined(_chunks(rates, rule), rule):
                self._step_chunks(rule, chunks, rates, groups[0]["weight_decay"], active)
        return loss

    def _gate(self) -> Tensor | None:
        """Return None to step, or whether to step as a 0-d bool; counts skipped steps.

        Raises FloatingPointError on a gradient that is not finite with `nonfinite="raise"`.
        """
        grads = [
            p.grad for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        for grad in grads:
            if grad.is_sparse:
                raise ValueError("gradients must be dense, got a sparse one")
        if not grads:
            return None
        device = grads[0].device
        finite = torch.stack([torch.isfinite(g).all().to(device) for g in grads]).all()
        if self.defaults["nonfinite"] == "raise":
            if not finite:
                raise FloatingPointError("a gradient is not finite; nothing was updated")
            return None
        if self.skipped_steps.device != device:  # at the first step only
            self.skipped_steps = self.skipped_steps.to(device)
        self.skipped_steps.add_(~finite)
        return finite

    def _step_chunks(
        self,
        rule: Rule,
        chunks: list[list[Tensor]],
        rates: dict[Tensor, Rate],
        weight_decay: Rate,
        active: Tensor | None,
    ) -> None:
        """Step chunks of parameters of equal shape by one rule, a parameter a unit of a batch."""
        stacks = [self._stack(rule, chunk, rates) for chunk in chunks]
        gate = None if active is None else active.to(stacks[0].weight.device)
        reports = rule.step_many(stacks, weight_decay=weight_decay, active=gate)
        for chunk, stack, report in zip(chunks, stacks, reports, strict=True):
            self._write_back(rule, chunk, stack.weight, stack.state)
            self.last_reports.append((chunk, report))

    def _stack(self, rule: Rule, chunk: list[Tensor], rates: dict[Tensor, Rate]) -> Stack:
        """Stack weights, gradients, states and rates; of a single parameter they are views."""
        views = [_unit(p, rule) for p in chunk]
        grads = [_reshaped(p.grad, rule) for p in chunk if p.grad is not None]
        states = [self.state[p] for p in chunk]
        state: State = {
            k: states[0][k][None] if len(chunk) == 1 else torch.stack([s[k] for s in states])
            for k in states[0]
        }
        weight = views[0][None] if len(chunk) == 1 else torch.stack(views)
        if MASTER in state:
            if rule.writes_copy:
                state[COPY] = weight
            weight = state.pop(MASTER)
        lr = _rate_of_stack([rates[p] for p in chunk], weight)
        # A stack of its own, for rules may overwrite gradients.
        return Stack(weight, torch.stack(grads).to(weight.dtype), state, lr)

    def _write_back(self, rule: Rule, chunk: list[Tensor], weight: Tensor, state: State) -> None:
        """Copy a stack after its step to the parameters and states of its chunk."""
        model = state.pop(COPY, weight)
        for i, parameter in enumerate(chunk):
            view, own = _unit(parameter, rule), self.state[parameter]
            if view.data_ptr() != model.data_ptr():
                view.copy_(model[i])
            if len(chunk) > 1:
                for key, value in own.items():
                    value.copy_(weight[i] if key == MASTER else state[key][i])
            if view.data_ptr() != parameter.data_ptr():  # no view as a matrix exists
                parameter.copy_(view.view(parameter.shape))


def rule_of(group: dict[str, Any]) -> Rule:
    """Return the rule of a parameter group with the fields that the group has."""
    kind = RULES[group["rule"]]
    return kind(**{f.name: group[f.name] for f in fields(kind)})


def _groups_by_rule(
    groups: Iterable[dict[str, Any]],
) -> Iterator[tuple[Rule, list[dict[str, Any]]]]:
    """Yield rules with their groups; groups that differ in nothing but lr come together."""
    found: dict[tuple[Rule, Any], list[dict[str, Any]]] = {}
    for group in groups:
        decay = group["weight_decay"]
        key = rule_of(group), id(decay) if isinstance(decay, Tensor) else decay
        found.setdefault(key, []).append(group)
    for (rule, _), together in found.items():
        yield rule, together


def _rate_of_stack(rates: Sequence[Rate], weight: Tensor) -> Rate:
    """Return the rate of a stack: one for all if its parameters have the same, else `[batch]`."""
    device = weight.device
    numbers = [rate for rate in rates if not isinstance(rate, Tensor)]
    if (
        all(rate is rates[0] for rate in rates)
        or len(numbers) == len(rates)
        and len({*numbers}) == 1
    ):
        return rates[0]
    if len(numbers) == len(rates):
        found = torch.tensor(numbers, dtype=torch.float64)
        # From pinned memory, so that the host does not wait.
        pinned = found.pin_memory() if device.type == "cuda" else found
        return pinned.to(device, non_blocking=True)
    wide = torch.promote_types(weight.dtype, torch.float32)
    tensors = [r if isinstance(r, Tensor) else weight.new_full((), r, dtype=wide) for r in rates]
    return torch.stack([tensor.to(device, wide) for tensor in tensors])


def _chunks(parameters: Iterable[Tensor], rule: Rule) -> Iterable[list[Tensor]]:
    """Yield parameters with gradients by shape, dtype and device, in slices of bounded size."""
    buckets: dict[tuple[Any, ...], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            shape = _reshaped(parameter, rule).shape
            buckets.setdefault((shape, parameter.dtype, parameter.device), []).append(parameter)
    for (shape, _, device), bucket in buckets.items():
        rows = shape[0] if shape else 1
        size = chunk_size(rows, shape.numel() // max(rows, 1), device)
        for first in range(0, len(bucket), size):
            yield bucket[first : first + size]


def _joined(chunks: Iterable[list[Tensor]], rule: Rule) -> Iterator[list[list[Tensor]]]:
    """Yield the chunks, several at a time where the rule joins their products on their device."""
    found: list[list[Tensor]] = []
    size = 0
    for chunk in chunks:
        first, numel = chunk[0], len(chunk) * chunk[0].numel()
        joins = rule.joins_shapes and kernels.listed(kernels.device_name(first.device))
        full = size + numel > stack_size(1, 1, first.device)
        if found and (not joins or full or _kind(found[0][0]) != _kind(first)):
            yield found
            found, size = [], 0
        found.append(chunk)
        size += numel
    if found:
        yield found


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _reshaped(tensor: Tensor, rule: Rule) -> Tensor:
    """Detach `tensor`, as `[rows, cols]` for a whole-matrix rule; a scalar becomes `[1]`."""
    tensor = tensor.detach()
    if tensor.ndim == 0:
        return tensor.view(1)
    return tensor.flatten(1) if rule.whole_matrix and tensor.ndim > 2 else tensor


def _unit(parameter: Tensor, rule: Rule) -> Tensor:
    if rule.whole_matrix and parameter.ndim < 2 - rule.takes_vectors:
        raise ValueError(
            f"{type(rule).__name__} needs parameters with at least 2 dimensions, got shape "
            f"{tuple(parameter.shape)}; put it into a group with an elementwise rule"
        )
    return _reshaped(parameter, rule)


def _initial_state(rule: Rule, parameter: Tensor, masters: bool) -> State:
    if not parameter.is_floating_point():
        raise ValueError(f"parameters must be real floating point, got {parameter.dtype}")
    with torch.no_grad():
        weight = _unit(parameter, rule)
        own = {}
        if masters and parameter.dtype in (torch.bfloat16, torch.float16):
            own = {MASTER: weight.float()}
        state = rule.init_state(own.get(MASTER, weight)[None])
        return own | {k: v[0].clone() for k, v in state.items()}


def _check_options(rule: str, names: set[str]) -> None:
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    known = [f.name for f in fields(RULES[rule])]
    for name in sorted(names - set(known)):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"rule {rule!r} has no field {name!r}{hint}")


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay"):
        value = group.get(name)
        if isinstance(value, (int, float)) and not value >= 0:
            raise ValueError(f"{name} must not be negative, got {value}")


class AdamW(SpectralOptimizer, rule="adamw", lr=1e-3):
    """AdamW; see `spectral.rules.adamw.AdamWRule`."""


class Muon(SpectralOptimizer, rule="muon", lr=2e-2):
    """Muon; see `spectral.rules.muon.MuonRule`."""


class MuonSphere(SpectralOptimizer, rule="muon_sphere", lr=5e-3):
    """Muon retracted to the sphere; see `spectral.rules.muon_sphere.MuonSphereRule`."""


class SpectralSphere(SpectralOptimizer, rule="spectral_sphere", lr=5e-3):
    """The Spectral Sphere Optimizer; see `spectral.rules.spectral_sphere.SpectralSphereRule`."""


class MuonPlusPlus(SpectralOptimizer, rule="muon_plus_plus", lr=5e-3):
    """Muon++; see `spectral.rules.muon_plus_plus.MuonPlusPlusRule`."""


class SpectralDescent(SpectralOptimizer, rule="spectral_descent", lr=1e-3):
    """The nuclear-norm step; see `spectral.rules.spectral_descent.SpectralDescentRule`."""
