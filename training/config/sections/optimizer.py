"""Which rule updates which weights, and how the work is spread over ranks."""

from collections.abc import Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from models.section import Section, at_least, named, positive
from models.units import QKVUnits
from spectral.rules import RULES, Rule

ROUTERS: Final = ("router", "shared_router")
"""Roles whose matrices score tokens. The published code of SSO sends them to SSO."""


@dataclass(frozen=True, kw_only=True)
class ClipConfig(Section):
    """Clipping of the gradient to a global norm."""

    max_norm: float | None = 1.0
    """Largest global gradient norm; null = do not clip."""
    matrix_roles: bool = True
    """Whether units of spectral rules count in the norm and are clipped."""

    def problems(self) -> Iterator[str]:
        """What is wrong with clipping."""
        yield from positive(self, "max_norm")


@dataclass(frozen=True, kw_only=True)
class GroupConfig(Section):
    """How the roles of one group are optimized."""

    rule: str
    """Update rule, a name under `optimizer.rules`."""
    lr: float
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step multiplies the weight by 1 - lr * weight_decay."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings of a group, or with a role's overrides of them."""
        if self.rule is not None and self.rule not in RULES:
            yield f"rule must be {named(self.rule, RULES)}"
        yield from at_least(self, 0, "lr", "weight_decay")
        if (self.lr or 0) * (self.weight_decay or 0) >= 1:
            yield (
                f"weight_decay times lr must be below 1, "
                f"got {self.weight_decay} times {self.lr}: one step would erase the weight"
            )


@dataclass(frozen=True, kw_only=True)
class RoleConfig(Section):
    """What one role does otherwise than its group; what is left out is the group's."""

    rule: str | None = None
    """Update rule; null = the group's, for routers adamw."""
    lr: float | None = None
    """Peak learning rate; null = the group's."""
    lr_factor: float = 1.0
    """Factor of the peak learning rate, the role's own or its group's; with `auto_rule` also of
    that under AdamW."""
    weight_decay: float | None = None
    """Decoupled weight decay; null = the group's."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the settings of a group, or with a role's overrides of them."""
        if self.rule is not None and self.rule not in RULES:
            yield f"rule must be {named(self.rule, RULES)}"
        yield from at_least(self, 0, "lr", "lr_factor", "weight_decay")
        if (self.lr or 0) * (self.weight_decay or 0) >= 1:
            yield (
                f"weight_decay times lr must be below 1, "
                f"got {self.weight_decay} times {self.lr}: one step would erase the weight"
            )


@dataclass(frozen=True, kw_only=True)
class LayerRatesConfig(Section):
    """Factors of the learning rates by layer."""

    factors: tuple[float, ...] | None = None
    """One factor per layer, first layer first; null = by `depth_power`."""
    depth_power: float | None = None
    """Layer number i, counted from 1, has the factor i ** depth_power: with -0.5 the rates fall as
    the inverse root of depth, with 0 all are 1; null = by `factors`."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the factors."""
        if (self.factors is None) == (self.depth_power is None):
            yield (
                "depth_power and factors exclude each other: exactly one must be set, got "
                f"{self.depth_power} and {self.factors}"
            )
        for index, factor in enumerate(self.factors or ()):
            if factor < 0:
                yield f"factors must be at least 0, got {factor} for layer {index + 1}"

    def factor(self, layer: int | None) -> float:
        """Return the factor of a layer, counted from 0; 1 for what belongs to no layer."""
        if layer is None:
            return 1.0
        if self.factors is not None:
            return self.factors[layer]
        return float((layer + 1) ** (self.depth_power or 0.0))


if TYPE_CHECKING:

    class RulesConfig:
        """One section of settings per update rule."""

        def __init__(self, **rules: Rule) -> None: ...
        def __getattr__(self, name: str) -> Rule: ...

else:
    RulesConfig = make_dataclass(
        "RulesConfig",
        [(name, rule, field(default_factory=rule)) for name, rule in RULES.items()],
        frozen=True,
        kw_only=True,
        namespace={"__doc__": "One section of settings per update rule."},
    )


class RoleSettings(NamedTuple):
    """How one role is optimized: by a rule, at the peak rate `lr * lr_factor`."""

    rule: str
    lr: float
    weight_decay: float
    lr_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DistributedConfig(Section):
    """How the optimizer's work and memory are spread over ranks; but for `tensor_mode: shardwise`
    no result depends on it."""

    storage: Literal["auto", "even", "owner"] = "auto"
    """Shards of a bucket: equal bytes (even), aligned to matrices (owner), or per bucket (auto)."""
    placement: Literal["auto", "ping_pong", "longest_processing_time", "round_robin"] = "auto"
    """Which rank steps which matrix; auto takes the one with the smallest predicted load."""
    tensor_mode: Literal["owner", "duplicated", "shardwise"] = "owner"
    """Who steps a matrix cut by tensor parallelism: one owner, every rank of it (duplicated, for
    comparison), or each rank its own piece as a matrix by itself (shardwise, other mathematics)."""
    bucket_elements: int | None = None
    """Elements of a gradient bucket; null = one or two layers."""
    step_groups: int = 4
    """Groups of buckets that are stepped and sent one after the other."""
    exchange_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which momentum and updates of cut matrices travel; null = train.precision."""
    gradient_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which gradients are accumulated and reduced; null = fp32, or wider weights' own."""
    momentum_dtype: Literal["bf16", "fp32"] | None = None
    """Type in which matrix rules keep their momentum; null = that of the masters."""
    overlap_reduce: bool = True
    """Reduce a bucket's gradients as soon as backward has completed it."""
    overlap_gather: bool = True
    """Let new weights arrive during the next forward pass."""
    cuda_graph: bool = False
    """Record clipping and update as one CUDA graph and replay it, so that a step costs the host one
    launch; needs a GPU and `overlap_gather: false`, and holds the step's scratch all the time."""

    def problems(self) -> Iterator[str]:
        """What is wrong with how the optimizer is spread."""
        yield from at_least(self, 1, "bucket_elements", "step_groups")
        if self.cuda_graph and self.overlap_gather:
            yield "overlap_gather must be false with cuda_graph, which ends with the step, got true"


@dataclass(frozen=True, kw_only=True)
class AutoRuleConfig(Section):
    """When a matrix takes its steps from its spectral rule and when from AdamW: as the nuclear rank
    of its gradient is above the stable rank of its inputs, or below."""

    lr: float
    """Peak learning rate under AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay under AdamW."""
    interval: int = 20
    """Steps between measurements."""
    smoothing: float = 0.9
    """Weight of earlier measurements in the mean of the ratio's logarithm, in [0, 1)."""
    hysteresis: float = 0.1
    """Change to the spectral rule at a ratio of 1 + this, and back at 1 / (1 + this)."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the choice of rules."""
        yield from positive(self, "lr")
        yield from at_least(self, 0, "weight_decay", "hysteresis")
        yield from at_least(self, 1, "interval")
        if not 0 <= self.smoothing < 1:
            yield f"smoothing must be in [0, 1), got {self.smoothing}"


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """Which rule updates which weights, and how."""

    qkv_units: QKVUnits = "head"
    """What of attention's input is one matrix: a head, the heads of one key, all of q, or all."""
    split_gate_up: bool = True
    """Whether gate and up, fused in one parameter, are two matrices to the optimizer."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    matrix: GroupConfig
    embedding: GroupConfig
    head: GroupConfig
    scalar: GroupConfig
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Overrides by role; a role that the model does not have is an error. The roles router and
    shared_router have the rule adamw unless they are given another here."""
    layer_rates: LayerRatesConfig | None = None
    """Factors of the peak learning rates by layer, from one of the keys; null = all layers learn at
    the same rate. A factor multiplies the rates of everything in its transformer layer: matrices,
    gains, gamma of PC layers, and the rates under AdamW of `auto_rule`. Embedding, final norm and
    head belong to no layer and keep their rates. Weight decay per step changes with the rate, as it
    is lr * weight_decay; `lr/<group>` in the metrics is the rate before these factors."""
    auto_rule: AutoRuleConfig | None = None
    """Let each matrix of a spectral rule choose between it and AdamW; null = no."""
    rules: RulesConfig = field(default_factory=RulesConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)

    def settings_for(self, role: str) -> RoleSettings:
        """Return how `role` is optimized: its overrides, for the rest its group.

        Routers are matrices with a rule of their own, AdamW.
        """
        group: GroupConfig = getattr(self, group_of(role))
        own = self.roles.get(role, RoleConfig())
        default = "adamw" if role in ROUTERS else group.rule
        return RoleSettings(
            rule=default if own.rule is None else own.rule,
            lr=group.lr if own.lr is None else own.lr,
            weight_decay=group.weight_decay if own.weight_decay is None else own.weight_decay,
            lr_factor=own.lr_factor,
        )

    def rate_factor(self, role: str, layer: int | None) -> float:
        """Return the factor of the rates of a unit, by its role and its layer, counted from 0."""
        by_layer = 1.0 if self.layer_rates is None else self.layer_rates.factor(layer)
        return self.settings_for(role).lr_factor * by_layer

    def rule(self, name: str) -> Rule:
        """The configured rule of that name."""
        rule: Rule = getattr(self.rules, name)
        return rule

    def problems(self) -> Iterator[str]:
        """What is wrong with the routing of roles to rules."""
        rule = self.settings_for("gain").rule
        if rule in RULES and RULES[rule].whole_matrix:
            place = "roles.gain.rule" if "gain" in self.roles else "scalar.rule"
            yield f"{place} must be an elementwise rule, as gains are vectors, got {rule!r}"
        matrix = self.matrix
        if self.auto_rule is not None and matrix.rule in RULES:
            if not RULES[matrix.rule].whole_matrix:
                yield f"auto_rule needs a spectral matrix.rule, got {matrix.rule}"
            elif not matrix.lr > 0:
                yield f"auto_rule needs matrix.lr above 0, got {matrix.lr}"
        for name in RULES if self.distributed.cuda_graph else ():
            if not self.rule(name).capturable:
                yield (
                    f"rules.{name}.{self.rule(name).sync_field} must not be true with "
                    "distributed.cuda_graph, as it waits for the device"
                )


def group_of(role: str) -> Literal["matrix", "embedding", "head", "scalar"]:
    """The section of `optimizer` that `role` belongs to; every role not named here is a matrix."""
    match role:
        case "embedding":
            return "embedding"
        case "head":
            return "head"
        case "gain" | "gamma":
            return "scalar"
        case _:
            return "matrix"
