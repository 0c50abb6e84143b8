"""Functions that the ranks run in the PC layer tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.blocks.in_graph_pc import GAMMA, with_gammas
from models.families import all_units
from models.pc_config import PCConfig
from models.units import Unit
from parallel.checkpoint.state import StateError, load_state
from parallel.comm import groups as process_groups
from parallel.model import ParallelModel
from parallel.optimizer import materialized_pc
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from parallel.optimizer.materialized_pc import MaterializedStack
from tests.distributed.state_workers import label, started
from tests.distributed.workers import Case, built, named_gradient, whole_gradients
from tests.saved_state import save_state
from tests.stepped_models import TINY, gradient_of, stepped_model
from training.assignments import assignments
from training.config.optimizer_section import GroupConfig, OptimizerConfig
from training.step import Trainer

HALF, STEPS = 2, 4
BLOCKS = ["k", "o", "gate", "up", "down"]
GROUP = GroupConfig(rule="adamw", lr=1e-3)
OPTIMIZER = OptimizerConfig(matrix=GROUP, embedding=GROUP, head=GROUP, scalar=GROUP)


def gradients(layouts: list[dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Return `first_gradients` by layout and evaluator, and `unsound_owner` by layout."""
    found: dict[str, dict[str, Any]] = {}
    for layout, groups in started(layouts):
        for evaluator in ("materialized", "in_graph"):
            found[f"{label(layout)} {evaluator}"] = first_gradients(groups, evaluator)
        found[f"{label(layout)} unsound"] = unsound_owner(groups)
    return found


def saved(folder: str, cases: dict[str, Case]) -> dict[str, list[float]]:
    """Save each case's run in FOLDER/NAME after two steps, and return the losses of the next
    steps."""
    found = {}
    for name, case in cases.items():
        for _, groups in started([case[0]]):
            trainer = built(folder, groups, case)
            steps(trainer, 0, HALF)
            save_state(Path(folder) / name, trainer.model, trainer.optimizer)
            found[name] = steps(trainer, HALF, STEPS)
    return found


def loaded(folder: str, cases: list[tuple[str, Case]]) -> list[list[float] | str]:
    """Load FOLDER/NAME in each case. Return the losses of the next steps, or the error message."""
    found: list[list[float] | str] = []
    for name, case in cases:
        for _, groups in started([case[0]]):
            trainer = built(folder, groups, case)
            try:
                load_state(Path(folder) / name, trainer.model, trainer.optimizer)
            except StateError as error:
                found.append(str(error))
                continue
            for _ in range(HALF * trainer.microbatches):
                next(trainer.batches)
            found.append(steps(trainer, HALF, STEPS))
    return found


def steps(trainer: Trainer, first: int, last: int) -> list[float]:
    """Return the losses of steps `first` to `last` - 1."""
    return [trainer.step(step).loss.item() for step in range(first, last)]


def first_gradients(groups: process_groups.Groups, evaluator: str) -> dict[str, Tensor]:
    """Return the float64 gradients of whole PC layers and their gammas, given the gradients of
    PC(W).

    megatron-core's loss is float32, so a full backward pass would not be float64.
    """
    model, optimizer = preconditioned(groups, evaluator)
    if evaluator == "in_graph":
        return in_graph(model, groups)
    return dict(materialized(model, optimizer, groups))


def unsound_owner(groups: process_groups.Groups) -> dict[str, tuple[bool, bool]]:
    """For each unit on this rank, return whether it is finite and whether it has changed after a
    step in which the owners' weights of `down` contain NaN."""
    model, optimizer = preconditioned(groups, "materialized")
    views = {unit.name: unit.view(model.parameters[unit.parameter]) for unit in model.units}
    before = {name: view.clone() for name, view in views.items()}
    for unit in model.units:
        gradient_of(model, unit).copy_(upstream(unit, groups))
    model.finish_gradients()
    for batch in (b for b in optimizer.stacks if isinstance(b, MaterializedStack)):
        for unit, weight in zip(batch.units, batch.weight, strict=True):
            if unit.role == "down":
                weight.fill_(torch.nan)
    optimizer.step(1.0, torch.tensor(True))
    model.wait_for_weights()
    return {
        f"{name} on {dist.get_rank()}": (bool(x.isfinite().all()), not torch.equal(x, before[name]))
        for name, x in views.items()
    }


def preconditioned(
    groups: process_groups.Groups, evaluator: str
) -> tuple[ParallelModel, DistributedOptimizer]:
    """Return a tiny model with PC layers in float64, and its optimizer.

    The k of a layer is one unit, which is not contiguous in the fused QKV weight. The units of a
    stack are mapped one at a time.
    """
    materialized_pc.CHUNK_NUMEL = 1
    pc = PCConfig(level=4, blocks=BLOCKS, evaluator=evaluator, init_compensation=True)
    units = with_gammas(all_units(TINY, qkv_units="component"), pc)
    assign = assignments(OPTIMIZER, units, pc)
    return stepped_model(TINY, groups, assign, pc=pc, qkv_units="component")


def upstream(unit: Unit, groups: process_groups.Groups) -> Tensor:
    """Return the gradient of this rank's piece of an effective weight. It depends only on the
    unit's name."""
    return unit.piece(named_gradient(unit, 0), groups.tensor.rank, groups.tensor.size)


def materialized(
    model: ParallelModel, optimizer: DistributedOptimizer, groups: process_groups.Groups
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the whole gradient of each unit that this rank owns, and of the unit's
    gamma."""
    for unit in model.units:
        gradient_of(model, unit).copy_(upstream(unit, groups))
    model.finish_gradients()
    for domain in optimizer.domains:
        for units in domain.materialized:
            for batch, gradients in units.gradients():
                for i, transfer in enumerate(batch.transfers):
                    yield transfer.unit.name, transfer.whole(gradients[i]).clone()
                    yield f"{transfer.unit.name}.gamma", batch.gamma_gradient[i].clone()


def in_graph(model: ParallelModel, groups: process_groups.Groups) -> dict[str, Tensor]:
    """Return the whole gradients, after the reduction, of all units with a piece on this rank, by
    name."""
    loss = torch.zeros((), dtype=torch.float64)
    for effective in model.in_graph:
        out = effective(model.parameters[effective.units[0].parameter])
        parts = [(unit.view(out) * upstream(unit, groups)).sum() for unit in effective.units]
        loss = loss + torch.stack(parts).sum()
    loss.backward()
    model.finish_gradients()
    preconditioned = {unit.name for effective in model.in_graph for unit in effective.units}
    found = whole_gradients(model)
    return {name: x for name, x in found.items() if name.removesuffix(GAMMA) in preconditioned}
