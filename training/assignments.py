"""Assign update rules, PC layers and penalties to units according to the config."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from models.blocks.in_graph_pc import with_gammas
from models.families import all_units
from models.pc_config import PCConfig
from models.units import Unit
from parallel.optimizer.routing import Assign, Assignment, PCAssignment, Penalty, Route, route
from spectral.rules.muon_sphere import RadiusRule
from training.config import Config, group_of
from training.config.optimizer_section import OptimizerConfig
from training.config.schema import GramPenaltyConfig

GAMMA = "gamma"
"""Role name of gamma, the scale factor of a PC layer."""


def unit_options(config: Config) -> dict[str, Any]:
    """Return the options that control how fused weights are split into units."""
    return {
        "qkv_units": config.optimizer.qkv_units,
        "split_gate_up": config.optimizer.split_gate_up,
    }


def config_units(config: Config) -> list[Unit]:
    """Return the units of the config's model."""
    units = all_units(config.model, **unit_options(config))
    return units if config.pc is None else with_gammas(units, config.pc)


def config_assignments(config: Config) -> Assign:
    """Return a function that maps each unit of the config's model to its `Assignment`."""
    return assignments(config.optimizer, config_units(config), config.pc, config.gram_penalty)


def config_routes(config: Config, owners: Mapping[str, int] | None = None) -> list[Route]:
    """Return the routing table for the whole model. `owners` maps each matrix to its owner rank."""
    assign = config_assignments(config)
    return [route(unit, assign(unit), owners or {}) for unit in config_units(config)]


def assignments(
    optimizer: OptimizerConfig,
    units: Iterable[Unit],
    pc: PCConfig | None = None,
    penalty: GramPenaltyConfig | None = None,
) -> Assign:
    """Return a function that maps each unit in `units` to its `Assignment`."""
    by_role: dict[tuple[str, int | None], Assignment] = {}
    for unit in units:
        if (unit.role, unit.layer) not in by_role:
            by_role[unit.role, unit.layer] = _assignment(optimizer, unit, pc, penalty)
    return lambda unit: by_role[unit.role, unit.layer]


def _assignment(
    optimizer: OptimizerConfig, unit: Unit, pc: PCConfig | None, penalty: GramPenaltyConfig | None
) -> Assignment:
    if unit.role == GAMMA and pc is not None:
        return _gamma_assignment(optimizer, pc)
    settings = optimizer.settings_for(unit.role)
    rule = optimizer.rule(settings.rule)
    scaler = optimizer.radius_scalers().get(unit.role)
    if scaler is not None and isinstance(rule, RadiusRule):
        rule = replace(rule, radius_scaler=scaler)
    pc_assignment = None
    preconditioner = None if pc is None else pc.preconditioner(unit)
    if pc is not None and preconditioner is not None and pc.evaluator != "in_graph":
        gamma = _gamma_assignment(optimizer, pc)
        pc_assignment = PCAssignment(
            preconditioner=preconditioner,
            gamma_rule=gamma.rule if pc.learnable_gamma else None,
            gamma_lr=gamma.lr,
            gamma_weight_decay=gamma.weight_decay,
        )
    unit_penalty = None
    if penalty is not None and unit.role in penalty.roles:
        assert penalty.coefficient is not None  # `load_config` has replaced null
        unit_penalty = Penalty(
            coefficient=penalty.coefficient,
            power=penalty.power,
            side=penalty.side,
            normalize=penalty.normalize,
        )
    return Assignment(
        group=group_of(unit.role),
        rule_name=settings.rule,
        rule=rule,
        lr=settings.lr,
        weight_decay=settings.weight_decay,
        pc=pc_assignment,
        penalty=unit_penalty,
    )


def _gamma_assignment(optimizer: OptimizerConfig, pc: PCConfig) -> Assignment:
    """Return the assignment for gamma. Gamma is a model parameter if PC(W) is computed in the
    graph."""
    settings = optimizer.settings_for(GAMMA)
    lr = settings.lr if pc.gamma_lr is None else pc.gamma_lr
    return Assignment(
        group=group_of(GAMMA),
        rule_name=settings.rule,
        rule=optimizer.rule(settings.rule),
        lr=lr if pc.learnable_gamma else 0.0,
        weight_decay=pc.gamma_decay(settings.weight_decay),
    )
