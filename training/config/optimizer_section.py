"""Config section `optimizer`: update rules, learning rates and distribution across ranks."""

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
"""Subsections of `optimizer` that configure parameter groups. Each group's learning rate is logged
as a metric under the group's name."""

ROUTERS: Final = ("router", "shared_router")
"""Roles of router matrices. The default rule for routers is AdamW, although the published code of
SSO uses SSO for routers."""


def groups_of(model: ModelConfig) -> list[Group]:
    """Return the model's parameter groups. A tied head belongs to the embedding group."""
    return [group for group in GROUPS if not (group == "head" and model.tie_embeddings)]


class MissingRuleError(InvalidConfigError):
    """Raised if a saved config uses a rule from a package that is not installed."""


LARGEST_OF_RULES: Final = 1000
"""Maximum absolute value of numbers in a rule's settings."""


def bounded(rule: Rule) -> Rule:
    """Return `rule`, or raise ValueError if a setting is so large that a step never finishes."""
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
    """Gradient clipping by global norm."""

    max_norm: Positive | None = 1.0
    """Maximum global gradient norm; null disables gradient clipping."""


class GroupConfig(Section):
    """Update rule, learning rate and weight decay for all roles in a group."""

    rule: RuleName
    """Update rule."""
    lr: AtLeast0
    """Peak learning rate."""
    weight_decay: AtLeast0 = 0.0
    """Decoupled weight decay: each step multiplies the weights by 1 - lr * weight_decay."""


class RoleConfig(Section):
    """Per-role overrides of the group settings."""

    rule: RuleName | None = None
    """Update rule; null = the group's rule, or adamw for routers."""
    lr: AtLeast0 | None = None
    """Peak learning rate; null = the group's peak learning rate."""
    weight_decay: AtLeast0 | None = None
    """Decoupled weight decay; null = the group's weight decay."""
    radius_scaler: Positive | None = None
    """Multiplier for the radius of updates and initial weights; null = the rule's radius_scaler for
    updates, and model.init.radius_scaler for initial weights."""


class DistributedConfig(Section):
    """Distribution of optimizer work and memory across ranks.

    The distribution does not affect results, except with `tensor_mode: shardwise`.
    """

    placement: Strategy = "auto"
    """Assignment of matrices to owner ranks. ping_pong: deal out matrices, sorted by ascending
    size, to ranks in ascending, then descending order, as in the SSO paper; auto: balance the load
    and minimize communication."""
    tensor_mode: Literal["owner", "shardwise"] = "owner"
    """How to update matrices split by tensor parallelism. owner: one rank updates the whole matrix;
    shardwise: each rank updates its shard as if it were a whole matrix, which changes the result.
    """
    step_groups: Annotated[int, Field(ge=1, le=1 << 16)] | None = None
    """Number of step groups. Buckets are updated group by group; a group's new weights are gathered
    while the next group is updated. null = the smallest number for groups of at most 2^27 elements
    per rank, but at most four."""
    exchange_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype in which ranks exchange the momentum and updates of split matrices; null =
    train.precision."""
    gradient_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype in which gradients are accumulated and reduced; null = fp32."""
    momentum_dtype: Literal["bf16", "fp32"] | None = None
    """Momentum dtype of spectral rules; null = same as the master weights."""
    overlap_reduce: bool = True
    """Overlap gradient reduction with the backward pass, reducing each bucket once it is complete.
    """
    overlap_gather: bool = True
    """Overlap the all-gather of new weights with the next forward pass."""
    cuda_graph: bool = False
    """Capture gradient clipping and the optimizer update in a single CUDA graph. Requires a GPU and
    `overlap_gather: false`; the step's temporary memory stays allocated."""

    def checks(self) -> Iterator[Check]:
        """Check that the optimizer step can be captured in a CUDA graph."""
        wrong = self.cuda_graph and self.overlap_gather
        yield "overlap_gather", wrong, "must be false with cuda_graph"


class OptimizerConfig(Section):
    """Update rules, learning rates and distribution of the optimizer."""

    qkv_units: QKVUnits = "head"
    """How to split the fused QKV weight into matrices. head: one matrix per head; group: one per
    set of query heads sharing a KV head, one per key head and one per value head; component: one
    each for q, k and v; fused: a single matrix."""
    split_gate_up: bool = True
    """Treat the fused gate and up projections as two matrices."""
    clip: ClipConfig = ClipConfig()
    matrix: GroupConfig
    """Matrices in the transformer layers."""
    embedding: GroupConfig
    """Token embedding, and the output head if model.tie_embeddings is set."""
    head: GroupConfig
    """Output head; has no effect if model.tie_embeddings is set."""
    scalar: GroupConfig
    """Norm gains, biases, and the gamma of PC layers."""
    roles: dict[str, RoleConfig] = field(default_factory=dict)
    """Per-role overrides of the group settings; each role must exist in the model. The default rule
    for router and shared_router is adamw."""
    rules: RulesConfig = RulesConfig()
    distributed: DistributedConfig = DistributedConfig()

    def settings_for(self, role: str) -> GroupConfig:
        """Return the settings for `role`: its group's settings with the role's overrides applied.

        Routers are in the group `matrix`, but their default rule is adamw.
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

    def radius_scalers(self) -> dict[str, float]:
        """Return the radius scalers set in the section `roles`, keyed by role."""
        scalers = {role: overrides.radius_scaler for role, overrides in self.roles.items()}
        return {role: scaler for role, scaler in scalers.items() if scaler is not None}

    def checks(self) -> Iterator[Check]:
        """Check the settings of each group and role against the requirements of its update rule."""
        for role in ("gain", "bias") if "bias" in self.roles else ("gain",):
            rule = self.settings_for(role).rule
            key = f"roles.{role}.rule" if role in self.roles else "scalar.rule"
            kind = "gains" if role == "gain" else "biases"
            problem = f"must be an elementwise rule, got {rule!r}: {kind} are vectors"
            yield key, RULES[rule].whole_matrix, problem
        groups = {name: getattr(self, name) for name in GROUPS}
        roles = {f"roles.{role}": self.settings_for(role) for role in self.roles}
        for section, settings in (groups | roles).items():
            key, decay, lr = f"{section}.weight_decay", settings.weight_decay, settings.lr
            product = f"{decay} times {lr}: one step would erase the weight"
            yield key, lr * decay >= 1, f"times lr must be below 1, got {product}"
            decay_rule = self.rule(settings.rule).decay_problem(decay)
            yield key, decay_rule, str(decay_rule).removeprefix("weight_decay ")
        for role, scaler in self.radius_scalers().items():
            rule = self.settings_for(role).rule
            problem = f"must be null with rule {rule}, got {scaler}: the rule has no radius"
            wrong = not isinstance(self.rule(rule), RadiusRule)
            yield f"roles.{role}.radius_scaler", wrong, problem
        for name in RULES if self.distributed.cuda_graph else ():
            field_name = self.rule(name).waiting_field
            problem = (
                f"must be false with distributed.cuda_graph: {field_name} causes a host sync in "
                "every step"
            )
            yield f"rules.{name}.{field_name}", field_name, problem


def of_installed_rules(content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a saved config without the settings of rules that are neither used nor installed.

    Raises MissingRuleError if a rule in use is not installed.
    """
    match content:
        case {"optimizer": {"rules": dict() as rules, **others} as optimizer}:
            roles = optimizer.get("roles") or {}
            sections = [*others.values(), *(roles.values() if isinstance(roles, dict) else ())]
            used = {str(each.get("rule")) for each in sections if isinstance(each, dict)}
            missing = rules.keys() - RULES.keys()
            if names := sorted(used & missing):
                raise MissingRuleError(
                    [f"no installed package provides rule {name}" for name in names]
                )
            installed = {name: section for name, section in rules.items() if name not in missing}
            return {**content, "optimizer": {**optimizer, "rules": installed}}
    return content


def group_of(role: str) -> Group:
    """Return the parameter group of `role`.

    All roles other than the embedding, the output head and vectors are in the group `matrix`.
    """
    if role in ("gain", "bias", "gamma"):
        return "scalar"
    return "embedding" if role == "embedding" else "head" if role == "head" else "matrix"
