"""Config section `optimizer`: rules, learning rates and distribution over ranks."""

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
"""Subsections of `optimizer` with a learning rate, which is logged under the subsection's name."""

ROUTERS: Final = ("router", "shared_router")
"""Roles of router matrices. Their default rule is AdamW; the published code of SSO uses SSO."""


def groups_of(model: ModelConfig) -> list[Group]:
    """Return the parameter groups of the model. A tied head is in the embedding's group."""
    return [group for group in GROUPS if not (group == "head" and model.tie_embeddings)]


class MissingRuleError(InvalidConfigError):
    """Error for a saved config that uses a rule of a package that is not installed."""


LARGEST_OF_RULES: Final = 1000
"""Largest absolute value of a number in a rule's settings."""


def bounded(rule: Rule) -> Rule:
    """Return `rule`. Raise ValueError if a number in it is so large that a step would not end."""
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
    """Maximum global gradient norm; null disables clipping."""


class GroupConfig(Section):
    """Rule and rates of the roles in one group."""

    rule: RuleName
    """Update rule."""
    lr: AtLeast0
    """Peak learning rate."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay: every step multiplies the weight by 1 - lr * weight_decay."""


class RoleConfig(Section):
    """Settings of one role that override the settings of its group."""

    rule: RuleName | None = None
    """Update rule; null = the group's rule, or adamw for routers."""
    lr: AtLeast0 | None = None
    """Peak learning rate; null = the group's learning rate."""
    weight_decay: AtLeast0 | None = None
    """Decoupled weight decay; null = the group's weight decay."""
    radius_scaler: Positive | None = None
    """Factor that multiplies the radius of updates and initial weights; null = the rule's
    radius_scaler for updates, the factor in model.init for initial weights."""


class DistributedConfig(Section):
    """Distribution of the optimizer's work and memory over ranks.

    The distribution does not affect results, except with `tensor_mode: shardwise`.
    """

    placement: Strategy = "auto"
    """Assignment of matrices to owner ranks. ping_pong: by ascending size, to ranks in ascending,
    then descending order, as in the SSO paper; auto: balanced load and little communication."""
    tensor_mode: Literal["owner", "shardwise"] = "owner"
    """Update of matrices that tensor parallelism splits. owner: one rank updates the whole matrix;
    shardwise: each rank updates its shard like a whole matrix, which changes the mathematics."""
    step_groups: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """Number of step groups. Buckets are updated group by group; the new weights of a group are
    gathered while the next group is updated. null = the smallest number with which a group
    has at most 2^27 elements per rank, but at most four."""
    exchange_dtype: Literal["bf16", "fp32"] | None = None
    """Data type in which ranks exchange momentum and updates of split matrices; null =
    train.precision."""
    gradient_dtype: Literal["bf16", "fp32"] | None = None
    """Data type in which gradients are accumulated and reduced; null = fp32."""
    momentum_dtype: Literal["bf16", "fp32"] | None = None
    """Data type of the momentum of spectral rules; null = the data type of the master weights."""
    overlap_reduce: bool = True
    """Reduce the gradients of each bucket during the backward pass, as soon as they are complete.
    """
    overlap_gather: bool = True
    """Gather new weights during the next forward pass."""
    cuda_graph: bool = False
    """Capture clipping and update as one CUDA graph. Requires a GPU and `overlap_gather: false`,
    and keeps the temporary memory of the step allocated."""

    def checks(self) -> Iterator[Check]:
        """Check that a step can be captured as a CUDA graph."""
        wrong = self.cuda_graph and self.overlap_gather
        yield "overlap_gather", wrong, "must be false with cuda_graph"


class OptimizerConfig(Section):
    """Update rules and learning rates of the weights."""

    qkv_units: QKVUnits = "head"
    """Split of the fused QKV weight into matrices. head: one matrix per head; group: one matrix per
    set of query heads that share a KV head, one per key head and one per value head; component: one
    matrix each for q, k and v; fused: one matrix."""
    split_gate_up: bool = True
    """Update the fused gate and up projections as two matrices."""
    clip: ClipConfig = ClipConfig()
    matrix: GroupConfig
    """Matrices of the transformer layers."""
    embedding: GroupConfig
    """Token embedding; with model.tie_embeddings, also the output head."""
    head: GroupConfig
    """Output head; has no effect with model.tie_embeddings."""
    scalar: GroupConfig
    """Norm gains, biases, and the gamma of PC layers."""
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Settings of a role, which override its group's; the model must have this role. The rule of
    router and shared_router is adamw by default."""
    rules: RulesConfig = RulesConfig()
    distributed: DistributedConfig = DistributedConfig()

    def settings_for(self, role: str) -> GroupConfig:
        """Return the settings of `role`: the settings of its group with the role's overrides.

        Routers are in group `matrix`, but their default rule is adamw.
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
        """Return the rule of `role` with its configured settings and the role's radius factor."""
        rule = self.rule(self.settings_for(role).rule)
        scaler = self.radius_scalers().get(role)
        if scaler is None or not isinstance(rule, RadiusRule):
            return rule
        return replace(rule, radius_scaler=scaler)

    def radius_scalers(self) -> dict[str, float]:
        """Return the radius factors that the sections of roles set, by role."""
        scalers = {role: overrides.radius_scaler for role, overrides in self.roles.items()}
        return {role: scaler for role, scaler in scalers.items() if scaler is not None}

    def checks(self) -> Iterator[Check]:
        """Check the settings of groups and roles, and their rules."""
        for role in ("gain", "bias") if "bias" in self.roles else ("gain",):
            rule = self.settings_for(role).rule
            place = f"roles.{role}.rule" if role in self.roles else "scalar.rule"
            kind = "gains" if role == "gain" else "biases"
            problem = f"must be an elementwise rule, because {kind} are vectors, got {rule!r}"
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
            problem = f"must be null with rule {rule}, which has no radius, got {scaler}"
            wrong = not isinstance(self.rule(rule), RadiusRule)
            yield f"roles.{role}.radius_scaler", wrong, problem
        for name in RULES if self.distributed.cuda_graph else ():
            field_name = self.rule(name).waiting_field
            problem = (
                "must not be true with distributed.cuda_graph, because it makes the host wait for "
                "the device"
            )
            yield f"rules.{name}.{field_name}", field_name, problem


def without_gone_keys(content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a saved config without obsolete keys, which never affected results."""
    match content:
        case {"optimizer": {"distributed": {"storage": str(), **others}, **sections}}:
            return {**content, "optimizer": {**sections, "distributed": others}}
    return content


def of_installed_rules(content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a saved config without the settings of unused rules that are not installed.

    Raises MissingRuleError if a used rule is not installed.
    """
    match content:
        case {"optimizer": {"rules": dict() as rules, **others} as optimizer}:
            roles = optimizer.get("roles") or {}
            sections = [*others.values(), *(roles.values() if isinstance(roles, dict) else ())]
            used = {str(each.get("rule")) for each in sections if isinstance(each, dict)}
            missing = rules.keys() - RULES.keys()
            if names := sorted(used & missing):
                raise MissingRuleError(
                    [f"no installed package contains rule {name}" for name in names]
                )
            installed = {name: section for name, section in rules.items() if name not in missing}
            return {**content, "optimizer": {**optimizer, "rules": installed}}
    return content


def group_of(role: str) -> Group:
    """Return the group of `role`.

    All roles except the embedding, the output head and vectors are in group `matrix`.
    """
    if role in ("gain", "bias", "gamma"):
        return "scalar"
    return "embedding" if role == "embedding" else "head" if role == "head" else "matrix"
