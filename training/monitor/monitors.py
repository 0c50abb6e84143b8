"""Monitors: metrics of weights, gradients, updates and activations, computed every few steps.

Only monitored steps are slowed down. Monitors do not modify what they measure, so runs with and
without them are bitwise identical. The metrics are defined in docs/monitors.md.
"""

from collections import Counter
from collections.abc import Set
from functools import cached_property
from itertools import chain
from typing import Any, Final

import torch
from torch import Tensor

from models.families import all_units
from models.units import Unit
from parallel.comm.collectives import on_first
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from parallel.observe.activations import ActivationWatch, Inputs
from parallel.observe.gradient_samples import GradientSamples
from parallel.observe.unit_gather import (
    MOMENTUM,
    Inspection,
    Shards,
    UnitGather,
    gradients,
    momenta,
    weights,
)
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from spectral.parameter_state import entry_names
from training.assignments import unit_options
from training.config import Config, group_of
from training.config.optimizer_section import ROUTERS
from training.config.schema import MonitorsConfig
from training.monitor import matrix_figures as figures
from training.monitor.expert_balance import ExpertBalance
from training.monitor.matrix_figures import Figures, Record, WholeMatrices
from training.monitor.update_history import UpdateHistory, Updates

DEFAULT_INTERVAL: Final = 100
"""Monitor interval in steps for runs without a plan, and the smallest interval that a plan
chooses."""

REPORTED: Final = {
    "sigma": "tracked_norm",
    "radius": "radius",
    "multiplier": "multiplier",
    "residual": "multiplier_residual",
    "removed": "rounding_removed",
    "evaluations": "msign_evaluations",
    "update_rms": "update_rms",
    "gap_exceeded": "gap_exceeded",
    "gamma": "gamma",
}
"""Maps metrics reported by rules to their names in monitors.jsonl. Metrics not listed get the
prefix `rule_`."""


class LayerSampling:
    """Selects the layers whose inputs are measured in a monitored step.

    All layers are selected if the Gram matrices of their inputs fit in `monitors.activation_gib`.
    Otherwise, each monitored step measures a different subset of the layers, in rotation. The
    selection depends on unsharded weight sizes, so it is the same on any layout.
    """

    def __init__(self, config: Config, interval: int) -> None:
        self.interval = interval
        self.count = config.model.layers
        sizes = {  # of the Gram matrices of all inputs, in bytes
            (unit.layer, unit.parameter): 4 * unit.axes[-1] ** 2
            for unit in all_units(config.model, **unit_options(config))
            if unit.is_matrix and unit.layer is not None
        }
        layers: Counter[int | None] = Counter()
        for (layer, _), size in sizes.items():
            layers[layer] += size
        largest = max(layers.values())
        together = max(1, int(config.monitors.activation_gib * 2**30 // largest))
        # Number of monitored steps it takes to measure all layers.
        self.rounds = -(-self.count // together)

    def layers(self, step: int) -> list[int]:
        """Return the layers to measure in monitored step `step`."""
        part = step // self.interval % self.rounds
        return [layer for layer in range(self.count) if layer % self.rounds == part]


class Monitors:
    """Runs the monitors on one rank."""

    def __init__(
        self,
        config: Config,
        groups: Groups,
        model: ParallelModel,
        optimizer: DistributedOptimizer,
        experts: ExpertBalance,
        interval: int | None,
    ) -> None:
        """Measure every `interval` steps; 0 disables monitors, None means `DEFAULT_INTERVAL`."""
        self.interval = DEFAULT_INTERVAL if interval is None else interval
        self.config = config
        self.groups = groups
        self.model = model
        self.optimizer = optimizer
        self._assign = optimizer.domains[0].assign
        self.experts = experts
        self.step = 0
        self.chosen: Set[str] = frozenset()
        self.records: dict[str, Record] = {}
        self.earlier: list[Shards] = []  # gradients of the previous step, or []
        self.history = UpdateHistory(optimizer, steps_compared(config.monitors))
        self.watch: ActivationWatch | None = None
        self.samples: GradientSamples | None = None
        self.inputs: dict[str, Inputs] = {}
        self.blocks: dict[str, dict[str, float]] = {}
        self.sampling = LayerSampling(config, self.interval)
        stages = (units for domain in optimizer.domains for units in domain.model.stage_units)
        self.whole_matrices = WholeMatrices(chain.from_iterable(stages))

    def due(self, step: int) -> bool:
        """Return whether `step`, counted from 1, is monitored."""
        return self.interval > 0 and step % self.interval == 0

    @cached_property
    def unit_gather(self) -> UnitGather:
        """Assignment of units to the ranks that inspect them, planned on first use."""
        section = self.config.monitors
        # Each rank gathers and stacks the weights, the gradients and the gradients of the previous
        # step, and later the weights before each compared step and after the last one.
        arrays = max(2 + ("gradients" in section.groups), steps_compared(section) + 1)
        elements = int(section.inspection_gib * 2**30 // (2 * 4 * arrays))
        return UnitGather(self.optimizer, elements)

    def forget(self) -> None:
        """Drop the tensors kept from earlier steps, e.g. after a rewind."""
        self.earlier = []
        self.history.forget()

    def before(self, step: int, microbatches: int) -> None:
        """Prepare to measure `step`, which has `microbatches` micro-batches per rank."""
        self.step = step
        self.records = {}
        self.chosen = set(self.config.monitors.groups) if self.due(step) else set()
        if "noise" in self.chosen:
            self.samples = GradientSamples(
                self.model,
                self.groups,
                microbatches=microbatches,
                samples=self.config.monitors.noise_samples,
            )
        if self.chosen & {"activations", "attention"}:
            self.watch = ActivationWatch(
                self.model,
                self.groups,
                self.sampling.layers(step),
                inputs="activations" in self.chosen,
                attention="attention" in self.chosen,
            )

    @torch.no_grad()
    def after_backward(self) -> None:
        """Measure weights, gradients and activations before the gradients are scaled."""
        if self.watch is not None:
            self.watch.stop()
            self.inputs, self.blocks = self.watch.inputs(), self.watch.blocks()
            self.watch = None
        if self.samples is not None and self.samples.count >= 2:
            units = {unit.name: unit for unit in self.model.units}
            for name, products in self.samples.products().items():
                measured = figures.noise_figures(products[None], "gradient")
                measured["noise_samples"] = torch.full((1,), float(self.samples.count))
                self._keep([units[name]], measured)
        self.samples = None
        if self.chosen:
            self._inspect_gradients_and_weights()
            self.inputs = {}
        keeps = "gradients" in self.config.monitors.groups and self.due(self.step + 1)
        self.earlier = [gradients(self.optimizer, copy=True)] if keeps else []
        if self.interval > 0:
            self.history.begin(-self.step % self.interval)

    @torch.no_grad()
    def after_step(self, factor: float, active: Tensor) -> None:
        """Record the metrics reported by the rules, and measure updates after the optimizer step.

        `factor` is the learning rate divided by its peak. `active` is True if the step was taken,
        and False if it was skipped.
        """
        self.history.end(factor, active)
        if self.due(self.step):
            for batch in self.optimizer.stacks:
                measured = {
                    REPORTED.get(name, f"rule_{name}"): figure.double()
                    for name, figure in batch.report.items()
                }
                if "radius" in measured:
                    measured["retraction_bias"] = measured["tracked_norm"] / measured["radius"] - 1
                self._keep(batch.units, measured)
            if self.chosen & {"updates", "noise", "spectra"}:
                self._inspect_updates()
            if "spectra" in self.chosen:
                self._inspect_momenta()

    def take(self, step: int, tokens: int) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the contents of the line for `step` in monitors.jsonl, and the aggregates to add
        to the metrics.

        `tokens` is the number of tokens seen so far. Both results are empty on ranks other than 0,
        and on all ranks if the step is not monitored. Collective.
        """
        if not self.due(step):
            return {}, {}
        maxvio = self.experts.violations()
        gathered = on_first((self.records, self.blocks), self.groups.host)
        if self.groups.rank > 0:
            return {}, {}
        units: dict[str, Record] = {}
        blocks: dict[str, dict[str, float]] = {}
        for records, parts in gathered:
            for name, record in records.items():
                units.setdefault(name, {}).update(record)
            blocks |= parts
        for layer, value in maxvio.items():
            blocks.setdefault(str(layer), {})["maxvio"] = value
        figures.pair(units)
        every = list(units.values())
        layers: dict[str, dict[str, float]] = {}
        inside = [record for record in every if record["layer"] is not None]
        for (layer, name), value in figures.means(inside, "layer"):
            layers.setdefault(str(layer), {})[name] = value
        line = {"tokens": tokens, "units": units, "blocks": blocks, "layers": layers}
        roles = figures.means(every, "role")
        matrix = {r["role"] for r in every if group_of(r["role"]) == "matrix"} - set(ROUTERS)
        aggregates = {
            **{f"monitor/{name}/{role}": value for (role, name), value in roles},
            **figures.global_figures(every, matrix),
            **figures.block_extremes(blocks),
        }
        return line, aggregates

    def _inspect_gradients_and_weights(self) -> None:
        arrays: dict[str, Shards] = {}
        self.whole_matrices.begin()
        if self.chosen & {"weights", "activations"}:
            arrays["weight"] = weights(self.optimizer, copy=False).shards
        if "gradients" in self.chosen:
            arrays["gradient"] = gradients(self.optimizer, copy=False)
            if self.earlier:
                arrays["previous"] = self.earlier[0]
        for inspection in self.unit_gather.inspections(arrays):
            if "weights" in self.chosen:
                measured = figures.weight_figures(inspection.matrices["weight"])
                effective = {u.name for u in inspection.units if self._assign(u).pc is not None}
                self._keep(inspection.units, measured, effective)
                self._keep_whole(inspection.units, inspection.matrices["weight"], effective)
            if self.inputs:
                self._keep_inputs(inspection)
            if "gradient" in inspection.matrices:
                measured = figures.gradient_figures(
                    inspection.matrices["gradient"], inspection.matrices.get("previous")
                )
                self._keep(inspection.units, measured)
        if "weights" in self.chosen:
            self._inspect_pc()

    def _keep_inputs(self, inspection: Inspection) -> None:
        """Record metrics of the weights' inputs and of the outputs of gate and up."""
        in_graph = {unit.name for layer in self.model.in_graph for unit in layer.units}
        measured: dict[str, Figures] = {}
        roots: dict[str, Tensor] = {}
        for unit, weight in zip(inspection.units, inspection.matrices["weight"], strict=True):
            inputs = self.inputs.get(unit.parameter)
            if inputs is None:
                continue
            if unit.parameter not in measured:
                measured[unit.parameter] = figures.input_figures(inputs.gram, inputs.tokens)
            own = dict(measured[unit.parameter])
            if unit.role.endswith(("gate", "up")) and unit.name not in in_graph:
                if unit.parameter not in roots:
                    roots[unit.parameter] = figures.gram_root(inputs.gram)
                own |= figures.output_figures(weight, roots[unit.parameter])
            self._keep([unit], {name: value[None] for name, value in own.items()})

    def _inspect_pc(self) -> None:
        """Record the metrics of PC layers that cannot be computed from the gathered parameters.
        These are the metrics of W if the parameter is PC(W), and the metrics of PC(W) if the
        parameter is W.
        """
        for stack in self.optimizer.materialized:
            measured = figures.weight_figures(stack.weight)
            if stack.pc.preconditioner.spectral_norm != "none":
                tracked = stack.pc.preconditioner.tracked_norm(stack.weight, stack.u, stack.v)
                measured["pc_tracked_norm"] = tracked
            self._keep(stack.units, measured)
        for unit, effective, gamma, tracked in self.model.effective_in_graph():
            measured = figures.weight_figures(effective[None])
            self._keep([unit], measured, {unit.name})
            self._keep_whole([unit], effective[None], {unit.name})
            record = self.records[unit.name]
            record["gamma"] = gamma.item()
            if self.config.pc is not None and self.config.pc.spectral_norm != "none":
                record["pc_tracked_norm"] = tracked.item()

    def _keep_whole(self, units: list[Unit], weights: Tensor, effective: set[str]) -> None:
        """Add the condition number of each whole matrix to the records of its units."""
        for names, matrix in self.whole_matrices.add(units, weights):
            value = figures.weight_figures(matrix[None])["condition_number"].item()
            # The weights of a matrix's units are either all effective weights or all plain ones.
            prefix = "effective_" if effective.intersection(names) else ""
            for name in names:
                self.records[name][f"{prefix}matrix_condition_number"] = value

    def _inspect_updates(self) -> None:
        """Record metrics of the most recent updates."""
        for updates in self.history.updates(self.unit_gather):
            if "updates" in self.chosen:
                self._keep_updates(updates)
            if "spectra" in self.chosen:
                self._keep(updates.units, figures.update_spectrum(updates.weights, updates.kept))
            if "noise" in self.chosen and len(updates.kept) == self.config.monitors.noise_samples:
                products = figures.update_products(updates.weights, updates.kept)
                self._keep(updates.units, figures.noise_figures(products, "update"))

    def _inspect_momenta(self) -> None:
        """For rules with momentum, record the spectra of the momentum after the step."""
        now = momenta(self.optimizer)
        for inspection in self.unit_gather.inspections({MOMENTUM: now.shards}):
            assigned = [self._assign(unit) for unit in inspection.units]
            kept = [
                i
                for i, each in enumerate(assigned)
                if each.pc is None and MOMENTUM in entry_names(each.rule)
            ]
            if kept:
                units = [inspection.units[i] for i in kept]
                self._keep(units, figures.momentum_spectrum(inspection.matrices[MOMENTUM][kept]))
        for batch in self.optimizer.materialized:
            if all(unit.name in now.whole for unit in batch.units):
                stack = torch.stack([now.whole[unit.name] for unit in batch.units])
                self._keep(batch.units, figures.momentum_spectrum(stack))

    def _keep_updates(self, updates: Updates) -> None:
        measured = figures.update_figures(updates.weights, updates.kept)
        self._keep(updates.units, measured)
        for unit, applied in zip(updates.units, measured["applied_rms"].tolist(), strict=True):
            lr = self.history.learning_rate(unit)
            if lr > 0 and not self._assign(unit).rule.whole_matrix:  # such rules report nothing
                self.records[unit.name]["update_rms"] = applied / lr

    def _keep(
        self, units: list[Unit], measured: Figures, effective: Set[str] = frozenset()
    ) -> None:
        """Add metrics to the units' records, with the prefix `effective_` for units named in
        `effective`."""
        if not units:
            return
        columns = {name: values.tolist() for name, values in measured.items()}
        for i, unit in enumerate(units):
            record = self.records.setdefault(unit.name, {"role": unit.role, "layer": unit.layer})
            prefix = "effective_" if unit.name in effective else ""
            record.update({prefix + name: values[i] for name, values in columns.items()})


def steps_compared(section: MonitorsConfig) -> int:
    """Return the number of consecutive updates to compare, up to and including the update of the
    monitored step."""
    noise = section.noise_samples if "noise" in section.groups else 0
    spectra = int("spectra" in section.groups)
    return max(2 if "updates" in section.groups else 0, spectra, noise)
