"""A `torch.optim.Optimizer` built on the update rules, for any `nn.Module`, sharded or not.

    optimizer = SpectralSphere(split_parameters(model), lr=5e-3)

A group holds every hyper-parameter of its rule as a plain value. Schedulers may change these
values, and `state_dict` saves them. Matrices with the same shape and rates are updated together. A
group's `units` divides its parameters into matrices (`spectral.division`). Without `units`, each
parameter is one matrix, and whole-matrix rules flatten a convolution weight `[out, in, ...]` to
`[out, in * ...]`. Parameters with three axes require `units`, because they may be convolutions or
stacked experts.

Parameters may be DTensors from FSDP2, HSDP and tensor parallelism; see
`spectral.sharded.shared_matrices`.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import compress
from numbers import Number
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from . import optimizer_checks as checks
from .batching import copy_all_, grouped
from .device_values import are_finite, is_known, surely_finite
from .division import Division
from .ieee_products import ieee_products
from .local_part import gradients_of, is_dtensor, local_gradient, local_of, placed_like
from .options import FIXED, check_options, fields_of, rate_of, rename_
from .parameter_split import ParameterSplit
from .parameter_state import (
    MASTER,
    Columns,
    Member,
    Snapshot,
    check_entries,
    complete_numbers,
    entry_names,
    follow,
    follow_names,
    follow_weight,
    forget,
    initial_state,
    listed_in,
    loaded,
    members_of,
    rule_of,
    same,
    saved_problems,
)
from .rules import RULES, AdamWRule, Report, Rule, Stack, Step
from .rules.base import check_fields, check_value
from .stepping import ParameterUnits, step_units

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from .sharded.ranks import RankGroup
    from .sharded.shared_matrices import SharedMatrices

FOREIGN = "foreign"
"""Key under which `state_dict` saves other programs' entries if their own keys are numbers, tensors
or this name. torch would mistake such keys for parameters."""


class SpectralOptimizer(torch.optim.Optimizer):
    """Applies one rule from `rules.RULES` to each group.

    If parameters are shared between ranks, all of these ranks must create the optimizer and call
    its methods collectively.

    Args:
        params: parameters, the result of `split_parameters`, or groups `{"params": ..., "rule":
            name, "lr": ..., "units": ..., <fields of the rule>}`.
        rule: default rule, for groups that do not set `rule`.
        lr: learning rate for groups that use the default rule and do not set `lr`: a number, a 0-d
            tensor, or None for the rule's default. Groups with another rule and no `lr` use that
            rule's default.
        weight_decay: decoupled weight decay, multiplied by lr, for groups that do not set
            `weight_decay`.
        nonfinite: on a NaN or infinite gradient, "raise" a FloatingPointError before anything is
            modified (requires a host sync), or "skip" the whole step on the device and count it in
            `skipped_steps`, a 0-d tensor.
        master_weights: whether the state keeps a float32 copy of every 16-bit parameter; the copy
            is updated and then rounded to the parameter. Without master weights, a 16-bit parameter
            loses every update below its rounding error: at lr 2e-3, half of Muon's updates are
            lost.
        replicas: process group of the ranks that replicate all plain parameters and gradients, as
            under DDP. Each matrix is then orthogonalised by only one of these ranks. None means the
            process group of the DDP model passed to `split_parameters`; without DDP, every rank
            updates all of its matrices.
        exchange_dtype: dtype in which momenta of sharded matrices are sent to owners, and updates
            are sent back; None means no conversion. bfloat16 halves Muon's communication volume.
            The option has no effect if no matrices are shared.
        options: fields of the default rule.

    Raises:
        ValueError: if a rule is unknown, a field is invalid, or a rule does not support a
            parameter.
        TypeError: if an option is not a field of the rule (the message suggests the closest field),
            or if a value has the wrong type.
    """

    default_rule: ClassVar[str] = "spectral_sphere"
    _chosen: Mapping[str, Any] = MappingProxyType({})  # fields set by the user
    _replicas: "ProcessGroup | None" = None  # None in a copied optimizer
    _exchange_dtype: torch.dtype | None = None
    # Names from `split_parameters` and their modules; sharding replaces the parameters.
    _frozen: Sequence[checks.Frozen] = ()
    _module: "ref[torch.nn.Module] | None" = None  # from `split_parameters`

    def __init__(
        self,
        params: Any,
        lr: float | Tensor | None = None,
        weight_decay: float | Tensor = 0.1,
        *,
        rule: str | None = None,
        nonfinite: Literal["raise", "skip"] = "raise",
        master_weights: bool = True,
        replicas: "ProcessGroup | None" = None,
        exchange_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        checks.check_params(params)
        check_value("nonfinite", Literal["raise", "skip"], nonfinite)
        check_value("master_weights", bool, master_weights)
        check_value("exchange_dtype", torch.dtype | None, exchange_dtype)
        if exchange_dtype is not None and not exchange_dtype.is_floating_point:
            raise ValueError(f"exchange_dtype must be a floating-point dtype, got {exchange_dtype}")
        if replicas is not None:
            from torch.distributed import ProcessGroup

            if not isinstance(replicas, ProcessGroup):
                raise TypeError(f"replicas must be a process group or None, got {replicas!r}")
        name = self.default_rule if rule is None else rule
        rename_(name, options)
        check_options(name, options)
        fixed = FIXED.keys() - fields_of(name).keys()
        options = {key: value for key, value in options.items() if key not in fixed}
        check_fields(RULES[name], options)
        defaults = {
            "rule": name,
            "lr": rate_of(name) if lr is None else lr,
            "weight_decay": weight_decay,
            "nonfinite": nonfinite,
            "master_weights": master_weights,
            **fields_of(name),
            **options,
        }
        checks.check_rates(defaults, least=0.0)
        self._chosen = options if lr is None else {"lr": defaults["lr"], **options}
        if "beta1" in defaults:  # read by schedulers that cycle the momentum
            defaults.setdefault("momentum", defaults["beta1"])
        self._reset_figures()
        # By parameter, including parameters that left their group, until their name is reused.
        self._members: dict[Tensor, Member] = {}
        self._replicas = replicas
        self._exchange_dtype = exchange_dtype
        if isinstance(params, ParameterSplit):
            self._replicas = replicas or params.replicas
            modules = dict(params.module.named_modules())
            holders = [(name, modules.get(name.rpartition(".")[0])) for name, _ in params.frozen]
            self._frozen = [(name, ref(module)) for name, module in holders if module is not None]
            self._module = ref(params.module)
        super().__init__(params, defaults)
        checks.warn_unnamed(self.param_groups)

    def _reset_figures(self) -> None:
        # Metrics from the last step, one entry per list of parameters that were updated together.
        self.last_reports: list[tuple[list[Tensor], Report]] = []
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device="cpu")
        # The matrices shared by several ranks, created on first use.
        self._matrices: SharedMatrices | None = None
        self._ranks: RankGroup | None = None
        self._present = 0  # hash of the parameters that had gradients in the last step
        self._snapshot: Snapshot | None = None  # of the last step

    @property
    def sent_bytes(self) -> int:
        """Bytes of momenta, weights and state that this rank has sent to other ranks."""
        return self._matrices.ranks.sent if self._matrices is not None else 0

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and return the closure's result, if any."""
        loss = None
        if closure is not None:
            if not callable(closure):
                raise TypeError(f"closure must be a function or None, got {closure!r:.60}")
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @_disable_dynamo  # parts of the step fail under torch.compile
    def _step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            rename_(group["rule"], group)  # values set by a scheduler or training loop
            checks.check_rates(group)
        if self._frozen:
            self._frozen = checks.warn_unfrozen(self._frozen, self.param_groups)
        snapshot = self._share()
        active = self._gate(snapshot)
        self.last_reports = []
        columns = zip(self.param_groups, snapshot.columns, strict=True)
        for rule, members in grouped(columns, lambda member: rule_of(member[0])).items():
            if type(rule) is AdamWRule:
                for group, group_columns in members:
                    self._step_adamw(rule, group, group_columns, snapshot, active)
            else:
                self._step_matrices(rule, [group for group, _ in members], snapshot, active)

    def _share(self) -> Snapshot:
        """Bring state and owners in line with the current parameters, which may have been replaced.

        Raises ValueError or TypeError, before anything is modified, if a state does not match its
        parameter and rule.
        """
        before = self._snapshot
        if before is not None and before.holds(self.param_groups, self.state):
            for parameter, master in before.masters:  # other code may have modified the parameter
                follow_weight(parameter, master)
            return before
        follow_names(self.param_groups, self._members)
        checks.check_kinds(self.param_groups, self._members, self.state)
        members = {m.parameter: m for m in members_of(self.param_groups)}
        check_entries(members.values(), self.state)
        self._initialise(members.values())
        departed = [old for parameter, old in self._members.items() if parameter not in members]
        forget(self.state, departed)
        now = Snapshot(self.param_groups, self.state, members)
        self._ranks = self._all_ranks(now.parameters)
        if before is None and self._ranks is None:
            checks.warn_alone(self.param_groups)
        if before is None or before.forms != now.forms:
            self._matrices = None
        shared, _ = self._by_sharing(members.values())
        parameters = [member.parameter for member in shared]
        if self._matrices is None or not same(parameters, [*self._matrices.index]):
            self._matrices = self._shared_matrices(shared)
        names = {member.name for member in members.values()}
        self._members = members | {m.parameter: m for m in departed if m.name not in names}
        self._snapshot = now
        return now

    def _gate(self, snapshot: Snapshot) -> Tensor | None:
        """Return None to take the step, or a 0-d bool that is False if the step must be skipped.

        Skipped steps are counted. All ranks that share parameters return the same value. Raises
        FloatingPointError on a nonfinite gradient with `nonfinite="raise"`. Raises ValueError if a
        parameter was replaced, and for the errors of `_agreed`.
        """
        parameters = snapshot.parameters
        grads = gradients_of(parameters, snapshot.shapes, sharded=snapshot.sharded)
        if len(grads) < len(parameters) and self._module is not None:
            checks.check_module(self._module(), self.param_groups)
        if not grads and self._ranks is None:
            return None
        raises = self.defaults["nonfinite"] == "raise"
        device = local_of(parameters[0]).device
        if raises and grads and surely_finite(grads):
            finite = torch.ones((), dtype=torch.bool, device=device)
        else:
            finite = are_finite(grads, device)
        finite = self._agreed(finite, snapshot, grads)
        if raises:
            if not finite:
                found = [
                    p
                    for p in parameters
                    if p.grad is not None and not are_finite([local_of(p.grad)])
                ]
                where = "a gradient on another rank"
                if found:
                    where = f"the gradient of {checks.names_of(found, self._members)}"
                raise FloatingPointError(f"{where} is not finite; no parameter was updated")
            return None
        if self.skipped_steps.device != device:  # only in the first step
            self.skipped_steps = self.skipped_steps.to(device)
        self.skipped_steps.add_(~finite)
        return finite

    def _agreed(self, finite: Tensor, snapshot: Snapshot, grads: Sequence[Tensor]) -> Tensor:
        """Return whether `finite` is True on all ranks that share parameters, a 0-d bool.

        Raises ValueError if ranks have gradients for different parameters, or if replicas have
        different gradients. Replicas are only compared in the first step, and in steps in which the
        set of parameters with gradients has changed.
        """
        if self._ranks is None:
            return finite
        stepped = [p.grad is not None for p in snapshot.parameters]
        present = hash(tuple(stepped))
        finite, same = self._ranks.agree(finite, present)
        # Ranks with gradients for different parameters would exchange different matrices, so this
        # check syncs with the host whenever the set of gradients has changed.
        changed = present != self._present
        if (self.defaults["nonfinite"] == "raise" or changed or is_known(same)) and not same:
            raise ValueError("all ranks must have gradients for the same parameters")
        compares = changed and grads and not snapshot.sharded
        if compares and finite:
            parameters = [*compress(snapshot.parameters, stepped)]
            checks.check_replicas(self._ranks, parameters, grads, self._members)
        if not compares or finite:  # otherwise, the next step compares
            self._present = present
        return finite

    def _step_adamw(
        self,
        rule: AdamWRule,
        group: dict[str, Any],
        columns: Columns,
        snapshot: Snapshot,
        active: Tensor | None,
    ) -> None:
        """Update a group's parameters with one call per dtype and device.

        One call per parameter would be slow for many small parameters.
        """
        stepped: list[Tensor] = []
        for (dtype, device), column in columns.items():
            grads: list[Any] = [p.grad for p in column[0]]
            present = [grad is not None for grad in grads]
            if not any(present):
                continue
            if not all(present):
                grads, *column = ([*compress(x, present)] for x in (grads, *column))
            parameters, weights, *state = column
            if snapshot.sharded:
                weights, grads = [*map(local_of, weights)], [*map(local_gradient, parameters)]
            if {grad.dtype for grad in grads} != {dtype}:
                grads = [grad.to(dtype) for grad in grads]
            rule.advance_([weights, grads, *state], _step_of(group, device, active))
            if snapshot.masters:
                copy_all_(
                    (local_of(p), weight)
                    for p, weight in zip(parameters, weights, strict=True)
                    if p.dtype != dtype
                )
            stepped += parameters
        self.last_reports.append((stepped, {}))

    @ieee_products()
    def _step_matrices(
        self,
        rule: Rule,
        groups: Sequence[dict[str, Any]],
        snapshot: Snapshot,
        active: Tensor | None,
    ) -> None:
        """Update the parameters of all groups that use `rule`."""
        steps = {
            p: _step_of(group, p.device, active)
            for group in groups
            for p in group["params"]
            if p.grad is not None
        }
        shared, alone = self._by_sharing(self._members[p] for p in steps)
        self._step_shared(rule, [member.parameter for member in shared], steps)
        units = [unit for m in alone for unit in snapshot.units(m.parameter, rule)]
        shapes = [*grouped(units, lambda u: (u.kind, steps[u.parameter].rates)).values()]
        stacks = [
            ParameterUnits(rule, stack, self.state, steps[stack[0].parameter]) for stack in shapes
        ]
        for stack, report in zip(shapes, step_units(rule, stacks), strict=True):
            self.last_reports.append(([unit.parameter for unit in stack], report))

    def _step_shared(
        self, rule: Rule, parameters: list[Tensor], steps: Mapping[Tensor, Step]
    ) -> None:
        """Update parameters whose matrices several ranks update together."""
        for dtype, members in grouped(parameters, lambda p: self._weight(p).dtype).items():
            assert self._matrices is not None  # created by `_share`
            parts = {
                p: Stack(
                    self._weight(p),
                    local_gradient(p).to(dtype, copy=True),  # rules may overwrite gradients
                    {k: local_of(self.state[p][k]) for k in entry_names(rule)},
                    steps[p],
                )
                for p in members
            }
            self.last_reports += self._matrices.step(rule, parts)
            for parameter, part in parts.items():
                if MASTER in self.state[parameter]:
                    local_of(parameter).copy_(part.weight)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, fill in all fields of its rule, and initialise its state."""
        group, defaults = self._completed(param_group), self.defaults
        rule, division = rule_of(group), Division.of(group["units"])
        decay = group["weight_decay"]
        problem = None if isinstance(decay, Tensor) else rule.decay_problem(decay)
        if problem is not None:
            checks.warn(problem)
        stepped = {*self.state}
        foreign = defaults.keys() - group.keys()  # fields of another rule, which torch would add
        super().add_param_group(group)
        for key in foreign:
            group.pop(key, None)
        try:
            checks.check_parameters(group, rule, division)
            members = {m.parameter: m for m in members_of([group])}
            check_entries(members.values(), self.state)
            self._initialise(members.values())
        except (ValueError, TypeError):
            for parameter in self.param_groups.pop()["params"]:
                if parameter not in stepped:
                    self.state.pop(parameter, None)
            raise
        self._members |= members

    def _completed(self, param_group: Mapping[str, Any]) -> dict[str, Any]:
        """Fill in all fields of a group's rule. Raises the same errors as `SpectralOptimizer`."""
        name = param_group.get("rule", self.defaults["rule"])
        settings = dict(param_group)
        rename_(name, settings)
        check_options(name, settings, foreign=True)
        params = settings["params"]
        if not isinstance(params, set):  # which torch rejects
            settings["params"] = [params] if isinstance(params, Tensor) else list(params)
        checks.check_names(settings, self.param_groups)
        rate: Any = rate_of(name)
        if isinstance(self.defaults["lr"], Tensor):
            rate = torch.full_like(self.defaults["lr"], rate)
        decay = self.defaults["weight_decay"]
        common = {"rule": name, "lr": rate, "weight_decay": decay, "units": None}
        chosen = self._chosen if name == self.defaults["rule"] else {}
        tensors = [p[1] if isinstance(p, tuple) else p for p in settings["params"]]
        exact = any(isinstance(p, Tensor) and p.dtype == torch.float64 for p in tensors)
        fields = fields_of(name, exact=exact)
        group = {**fields, **common, **chosen, **settings}
        checks.check_rates(group, least=0.0)
        return group

    def _initialise(self, members: Collection[Member]) -> None:
        """Bring the state of members in line with their parameters, and create missing entries."""
        masters = self.defaults["master_weights"]
        for member in members:
            follow(member.parameter, self.state[member.parameter], member.rule, masters=masters)
        self._complete(members)

    @ieee_products()
    def _complete(self, members: Iterable[Member]) -> None:
        """Create the missing state entries of members from their weights."""
        incomplete = [
            m for m in members if not {*entry_names(m.rule)} <= {*self.state[m.parameter]}
        ]
        shared, alone = self._by_sharing(incomplete)
        states = {
            m.parameter: initial_state(m.rule, m.division, m.parameter, self._weight(m.parameter))
            for m in alone
        }
        matrices = self._shared_matrices(shared)
        if matrices is not None:
            weights = [self._weight(m.parameter) for m in shared]
            entries = matrices.initial_states(weights)
            for member, weight, state in zip(shared, weights, entries, strict=True):
                p, names = member.parameter, member.rule.elementwise_state
                states[p] = {k: placed_like(torch.zeros_like(weight), p) for k in names} | state
        for parameter, state in states.items():
            entries = self.state[parameter]
            entries |= {name: x for name, x in state.items() if name not in entries}

    def _weight(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of the weight to update: the master, if any, or the parameter."""
        return local_of(self.state[parameter].get(MASTER, parameter))

    def _by_sharing(self, members: Iterable[Member]) -> tuple[list[Member], list[Member]]:
        """Split members into those whose matrices several ranks update together, and the others."""
        shared: list[Member] = []
        alone: list[Member] = []
        for member in members:
            among_ranks = self._replicas is not None or is_dtensor(member.parameter)
            (shared if member.rule.whole_matrix and among_ranks else alone).append(member)
        return shared, alone

    def _shared_matrices(self, members: Sequence[Member]) -> "SharedMatrices | None":
        """Return the matrices that several ranks update together, or None.

        Raises ValueError if parameters are on different meshes.
        """
        if not members:
            return None
        from .sharded.ranks import check_one_mesh
        from .sharded.shared_matrices import SharedMatrices

        parameters = [member.parameter for member in members]
        check_one_mesh(parameters)
        ranks = self._all_ranks(parameters)
        assert ranks is not None  # only replicas share plain parameters
        return SharedMatrices(ranks, members, exchange_dtype=self._exchange_dtype)

    def _all_ranks(self, parameters: Sequence[Tensor]) -> "RankGroup | None":
        """Return all ranks that hold a copy or a shard of a parameter, or None."""
        if self._replicas is None and not any(map(is_dtensor, parameters)):
            return None
        from .sharded.ranks import ranks_of

        return ranks_of(parameters, self._replicas)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as `torch.optim.Optimizer` does.

        Other programs may add entries whose keys are numbers or tensors that are not parameters.
        torch would mistake such keys for parameters, so these entries are saved under the key
        "foreign".
        """
        follow_names(self.param_groups, self._members)
        parameters = {*listed_in(self.param_groups, "params")}
        state: dict[Any, Any] = self.state  # keys of other programs may be of any type
        foreign = {
            key: value
            for key, value in state.items()
            if isinstance(key, Number)
            or (isinstance(key, Tensor) and key not in parameters)
            or (isinstance(key, str) and key == FOREIGN)
        }
        for key in foreign:
            del state[key]
        try:
            saved = super().state_dict()
        finally:
            state.update(foreign)
        numpy = sys.modules.get("numpy")
        if numpy is not None:  # torch.load(weights_only=True) rejects NumPy's numbers
            for group in saved["param_groups"]:
                group |= {k: v.item() for k, v in group.items() if isinstance(v, numpy.generic)}
        if foreign:
            saved["state"][FOREIGN] = foreign
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state as `torch.optim.Optimizer` does, but keep the saved dtypes.

        States saved by earlier versions may lack hyper-parameters. Missing hyper-parameters keep
        their current values if the group's rule is unchanged; otherwise, they are set to the rule's
        defaults. A state may contain momenta only: singular vectors and similar entries are then
        recomputed, and means of squares start from zero. Entries of other programs are loaded
        unchanged.

        Raises:
            ValueError: if, on any rank, the state is nonfinite, lacks the entries of a parameter,
                or does not match in rules, units, shapes or parameter order. The optimizer is then
                left unchanged.
            TypeError: if `state_dict` is not a mapping.
        """
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"state_dict must be a mapping, got {type(state_dict).__name__}")
        settings = [dict(group) for group in self.param_groups]
        saved: dict[str, Any] = {}

        def check(_: object, changed: dict[str, Any]) -> dict[str, Any]:
            saved.update(changed)  # hooks may have modified the state
            problem = next(saved_problems(self.param_groups, saved), None)
            parameters = listed_in(self.param_groups, "params")
            ranks, sound = self._all_ranks(parameters), problem is None
            if ranks is not None:
                flag = torch.tensor(sound, device=local_of(parameters[0]).device)
                sound = bool(ranks.agree(flag)[0])
            if not sound:
                raise ValueError(problem or "another rank cannot load its part of the state")
            return {**saved, "state": {}}

        def restore(_: object) -> None:
            for group, before in zip(self.param_groups, settings, strict=True):
                group.setdefault("units", before["units"])
                same_rule = group["rule"] == before["rule"]
                for name, default in fields_of(group["rule"], exact=True).items():
                    group.setdefault(name, before[name] if same_rule else default)
            entries = {**saved["state"]}
            self.state.update(entries.pop(FOREIGN, {}))
            ids = iter(listed_in(saved["param_groups"], "params"))
            members = [*members_of(self.param_groups)]
            for member, key in zip(members, ids, strict=False):
                parameter, shapes = member.parameter, member.shapes
                state = complete_numbers(entries.pop(key, {}), shapes, local_of(parameter).device)
                self.state[parameter] = {
                    name: loaded(value, parameter, own=name in shapes)
                    for name, value in state.items()
                }
            # Create the entries that an earlier version did not save.
            self._complete([member for member in members if self.state[member.parameter]])
            self.state.update(entries)
            self._members |= {member.parameter: member for member in members}

        # Registered so that users' pre-hooks run before these hooks, and users' post-hooks after
        # them.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(restore, prepend=True)
        with before, after:
            super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes to copy; see `torch.optim.Optimizer`."""
        follow_names(self.param_groups, self._members)
        kept = {"_chosen": self._chosen, "_exchange_dtype": self._exchange_dtype}
        return {**super().__getstate__(), **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_figures()
        if "defaults" in state:  # a copy; `load_state_dict` completes the groups later
            self._members = {m.parameter: m for m in members_of(self.param_groups)}


def _step_of(group: dict[str, Any], device: torch.device, active: Tensor | None) -> Step:
    """Return the rates and active flag for a group's parameters on a device."""
    gate = None if active is None else active.to(device)
    return Step(group["lr"], group["weight_decay"], gate)
