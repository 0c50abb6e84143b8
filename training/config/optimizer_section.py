"""The optimizer section of a run config: rules, learning rates, and distribution over ranks."""

from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, Field

from models.config import ModelConfig
from models.layout import QKVUnits
from models.section import AtLeast0, Check, Positive, Section, problems
from spectral.rules import RULES, Rule
from spectral.rules.muon_sphere import RadiusRule
from spectral.sharded.placement import Strategy
from training.config.binding import InvalidConfigError

Group = Literal["matrix", "embedding", "head", "scalar"]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)
"""Sections of `optimizer` with a learning rate; each rate is logged under its section's name."""

ROUTERS: Final = ("router", "shared_router")
"""Roles whose matrices score tokens. AdamW steps them unless a config sets another rule; the
published code of SSO steps them with SSO."""


def groups_of(model: ModelConfig) -> list[Group]:
    """Return the groups of the model's weights; a tied head is in the embedding's group."""
    return [group for group in GROUPS if not (group == "head" and model.tie_embeddings)]


class MissingRuleError(InvalidConfigError):
    """A saved config with rules of packages that are not installed."""


LARGEST_OF_RULES: Final = 1000
"""Largest number in the settings of rules."""


def bounded(rule: Rule) -> Rule:
    """Return `rule`. Raises ValueError if a number is so large that a step would never end."""
    sizes = {key: abs(x) for key, x in vars(rule).items() if isinstance(x, int | float)}
    limit = f"must be at most {LARGEST_OF_RULES}"
    too_large = ((key, size > LARGEST_OF_RULES, limit) for key, size in sizes.items())
    if lines := list(problems(rule, too_large)):
        raise ValueError("\n".join(lines))
    return rule


if TYPE_CHECKING:
    RuleName = str

    class RulesConfig:
        """Settings of the update rules, one section per rule."""

else:
    RuleName = Literal[tuple(RULES)]
    RulesConfig = type(
        "RulesConfig",
        (Section,),
        {name: rule() for name, rule in RULES.items()}
        | {"__doc__": "Settings of the update rules, one section per rule.", "__module__": __name__}
        | {"__annotations__": {n: Annotated[r, AfterValidator(bounded)] for n, r in RULES.items()}},
    )


class ClipConfig(Section):
    """Clipping of the gradient to a global norm."""

    max_norm: Positive | None = 1.0
    """Largest global gradient norm; null does not clip."""


class GroupConfig(Section):
    """Rule and rates of the roles in one group."""

    rule: RuleName
    """Update rule."""
    lr: AtLeast0
    """Peak learning rate."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay: a step multiplies the weight by 1 - lr * weight_decay."""


class RoleConfig(Section):
    """Settings of one role, where they differ from the settings of its group."""

    rule: RuleName | None = None
    """Update rule; null = the group's, or adamw for routers."""
    lr: AtLeast0 | None = None
    """Peak learning rate; null = the group's."""
    weight_decay: AtLeast0 | None = None
    """Decoupled weight decay; null = the group's."""
    radius_scaler: Positive | None = None
    """Factor of the radius, in steps and for initial weights; null = the rule's factor in steps,
    model.init's for initial weights."""


class DistributedConfig(Section):
    """Distribution of the optimizer's work and memory over ranks.

    It does not affect results, except with `tensor_mode: shardwise`.
    """

    placement: Strategy = "auto"
    """How to choose the owner rank of each matrix. ping_pong: by ascending size, up and down the
    ranks, as in the SSO paper; auto: for balanced loads and little communication."""
    tensor_mode: Literal["owner", "shardwise"] = "owner"
    """How to step matrices that tensor parallelism splits. owner: one rank steps the whole matrix;
    shardwise: each rank steps its shard as if it were a matrix, which changes the mathematics."""
    step_groups: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """Number of groups of buckets, stepped in turn; a group's new weights are gathered while the
    next group is stepped. null = the smallest number, at most four, with at most 2^27 elements per
    rank and group."""
    exchange_dtype: Literal["bf16", "fp32"] | None = None
    """Data type in which ranks exchange momentum and updates of split matrices; null =
    train.precision."""
    gradient_dtype: Literal["bf16", "fp32"] | None = None
    """Data type in which gradients are accumulated and reduced; null = fp32."""
    momentum_dtype: Literal["bf16", "fp32"] | None = None
    """Data type of the momentum of spectral rules; null = the type of the master weights."""
    overlap_reduce: bool = True
    """Reduce a bucket's gradients as soon as the backward pass has completed them."""
    overlap_gather: bool = True
    """Gather new weights during the next forward pass."""
    cuda_graph: bool = False
    """Record clipping and update as one CUDA graph; needs a GPU and `overlap_gather: false`, and
    keeps the step's scratch memory allocated."""

    def checks(self) -> Iterator[Check]:
        """Check that a step can be recorded."""
        yield (
            "overlap_gather",
            self.cuda_graph and self.overlap_gather,
            "must be false with cuda_graph",
        )


class OptimizerConfig(Section):
    """Update rules and learning rates of the weights."""

    qkv_units: QKVUnits = "head"
    """Split of the fused QKV weight into matrices. head: one per head; group: one per set of query
    heads that share a key head, one per key head and one per value head; component: one each for q,
    k and v; fused: no split."""
    split_gate_up: bool = True
    """Step gate and up, which share one parameter, as two matrices."""
    clip: ClipConfig = ClipConfig()
    matrix: GroupConfig
    """The matrices of the transformer layers."""
    embedding: GroupConfig
    """The token embedding, and with model.tie_embeddings also the head."""
    head: GroupConfig
    """The output head; has no effect with model.tie_embeddings."""
    scalar: GroupConfig
    """Norm gains, biases, and the gamma of PC layers."""
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Overrides by role; a role that the model does not have is an error. router and shared_router
    use adamw unless overridden here."""
    rules: RulesConfig = RulesConfig()
    distributed: DistributedConfig = DistributedConfig()

    def settings_for(self, role: str) -> GroupConfig:
        """Return the settings of `role`: its own, or else its group's.

        Routers are in the group of matrices, but their default rule is adamw.
        """
        group: GroupConfig = getattr(self, group_of(role))
        default = {"rule": "adamw"} if role in ROUTERS else {}
        overrides = vars(self.roles[role]) if role in self.roles else {}
        values = {key: overrides[key] for key in vars(group) if overrides.get(key) is not None}
        return replace(group, **default | values)

    def rule(self, name: str) -> Rule:
        """Return the rule `name` with its configured settings."""
        rule: Rule = getattr(self.rules, name)
        return rule

    def rule_for(self, role: str) -> Rule:
        """Return the rule of `role` with its configured settings, and the radius of the role."""
        rule = self.rule(self.settings_for(role).rule)
        scaler = self.radius_scalers().get(role)
        if scaler is None or not isinstance(rule, RadiusRule):
            return rule
        return replace(rule, radius_scaler=scaler)

    def radius_scalers(self) -> dict[str, float]:
        """Return the radius factor of each role whose section sets one."""
        scalers = {role: overrides.radius_scaler for role, overrides in self.roles.items()}
        return {role: scaler for role, scaler in scalers.items() if scaler is not None}

    def checks(self) -> Iterator[Check]:
        """Check groups and roles, and their rules."""
        for role in ("gain", "bias") if "bias" in self.roles else ("gain",):
            rule = self.settings_for(role).rule
            place = f"roles.{role}.rule" if role in self.roles else "scalar.rule"
            kind = "gains" if role == "gain" else "biases"
            problem = f"must be an elementwise rule, as {kind} are vectors, got {rule!r}"
            yield place, RULES[rule].whole_matrix, problem
        groups = {name: getattr(self, name) for name in GROUPS}
        roles = {f"roles.{role}": self.settings_for(role) for role in self.roles}
        for place, settings in (groups | roles).items():
            key, decay, lr = f"{place}.weight_decay", settings.weight_decay, settings.lr
            product = f"{decay} times {lr}: one step would erase the weight"
            yield key, lr * decay >= 1, f"times lr must be below 1, got {product}"
            decay_rule = self.rule(settings.rule).decay_problem(decay)
            yield key, decay_rule, str(decay_rule).removeprefix("weight_decay ")
        for role, scaler in self.radius_scalers().items():
            rule = self.settings_for(role).rule
            yield (
                f"roles.{role}.radius_scaler",
                not isinstance(self.rule(rule), RadiusRule),
                f"must be null with rule {rule}, which keeps no radius, got {scaler}",
            )
        for name in RULES if self.distributed.cuda_graph else ():
            field_name = self.rule(name).waiting_field
            problem = (
                "must not be true with distributed.cuda_graph, as it makes the host wait for "
                "the device"
            )
            yield f"rules.{name}.{field_name}", field_name, problem


def without_gone_keys(content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Remove obsolete keys, which never affected results, from a config of an earlier version."""
    match content:
        case {"optimizer": {"distributed": {"storage": str(), **others}, **sections}}:
            return {**content, "optimizer": {**sections, "distributed": others}}
    return content


def of_installed_rules(content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Remove settings of rules that are neither used nor installed from a saved config.

    Raises MissingRuleError for a rule that is used and not installed.
    """
    match content:
        case {"optimizer": {"rules": dict() as rules, **others} as optimizer}:
            roles = optimizer.get("roles") or {}
            sections = [*others.values(), *(roles.values() if isinstance(roles, dict) else ())]
            used = {str(each.get("rule")) for each in sections if isinstance(each, dict)}
            missing = rules.keys() - RULES.keys()
            if names := sorted(used & missing):
                raise MissingRuleError(
                    [f"rule {name} is in no installed package" for name in names]
                )
            installed = {name: section for name, section in rules.items() if name not in missing}
            return {**content, "optimizer": {**optimizer, "rules": installed}}
    return content


def group_of(role: str) -> Group:
    """Return the section of `optimizer` that `role` belongs to.

    Every role that is not the embedding, the output head or a vector is a matrix.
    """
    if role in ("gain", "bias", "gamma"):
        return "scalar"
    return "embedding" if role == "embedding" else "head" if role == "head" else "matrix"
