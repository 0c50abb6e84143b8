"""What the ranks of the PC layer tests run."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.blocks.in_graph_pc import GAMMA, with_gammas
from models.config import ModelConfig
from models.pc_config import PCConfig
from models.size import all_units
from models.units import Unit
from parallel.checkpoint.state import StateError, load_state
from parallel.comm import groups as process_groups
from parallel.comm.collectives import CommVolume, all_gather_
from parallel.model import ModelOptions, ParallelModel, build_model
from parallel.optimizer.build import build_optimizer
from parallel.optimizer.exchange import assemble
from parallel.optimizer.materialized_pc import MaterializedStack
from parallel.optimizer.optimizer import DistributedOptimizer
from tests.distributed.workers import named_gradient, rank_folder, start
from tests.run_configs import tiny_config
from tests.saved_state import save_state
from training.assignments import assignments
from training.build import build_data, build_trainer
from training.config.sections.optimizer import GroupConfig, OptimizerConfig
from training.loop import Trainer

STEPS = 4
HALF = 2
BLOCKS = ["k", "o", "gate", "up", "down"]
EXPERT_BLOCKS = ["o", "expert_gate", "expert_up", "expert_down"]
MIXTURE = {
    "model__family": "moe",
    "model__moe__experts": 4,
    "model__moe__top_k": 2,
    "model__moe__expert_ffn": 32,
    "model__moe__dense_layers": 1,
}
GROUP = GroupConfig(rule="adamw", lr=1e-3)
OPTIMIZER = OptimizerConfig(matrix=GROUP, embedding=GROUP, head=GROUP, scalar=GROUP)
TINY = ModelConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_size=60)


def runs(
    folder: str,
    layouts: list[dict[str, int]],
    cases: list[tuple[str, str]],
    kept: list[tuple[str, str]],
    loads: list[tuple[str, str, str]],
    experts: list[dict[str, int]],
) -> dict[str, Any]:
    """Losses of four steps of every (rule, evaluator) of `cases` on every layout.

    They are under `layout rule evaluator`; the float64 gradients of the first step are under
    `layout evaluator`, what a weight that is not finite does under `layout unsound`. The runs in
    `kept` are saved after two steps. `loads` are (saved run, rule, evaluator): such runs begin with
    the state that another one saved and have the losses of the steps after it. On the layouts
    `experts` a mixture of experts trains with PC layers in its experts under Muon.
    """
    found: dict[str, Any] = {}
    for layout in experts:
        groups = start(layout)
        for evaluator in ("materialized", "in_graph"):
            trainer = tiny_trainer(
                folder, layout, groups, "muon", evaluator, EXPERT_BLOCKS, MIXTURE
            )
            run = " ".join([f"experts on ranks{dist.get_world_size()}", *layout, evaluator])
            found[run] = steps(trainer, 0, STEPS)
        process_groups.shutdown()
    for layout in layouts:
        groups = start(layout)
        name = " ".join([f"ranks{dist.get_world_size()}", *layout])
        for evaluator in ("materialized", "in_graph"):
            found[f"{name} {evaluator}"] = first_gradients(groups, evaluator)
        found[f"{name} unsound"] = unsound_owner(groups)
        for rule, evaluator in cases:
            trainer = tiny_trainer(folder, layout, groups, rule, evaluator)
            run = f"{name} {rule} {evaluator}"
            found[run] = steps(trainer, 0, HALF)
            if (rule, evaluator) in kept:
                save_state(Path(folder) / run, trainer.model, trainer.optimizer)
            found[run] += steps(trainer, HALF, STEPS)
        for source, rule, evaluator in loads:
            trainer = tiny_trainer(folder, layout, groups, rule, evaluator)
            load_state(Path(folder) / source, trainer.model, trainer.optimizer)
            for _ in range(HALF * trainer.microbatches):
                next(trainer.batches)
            found[f"{source} -> {name} {rule} {evaluator}"] = steps(trainer, HALF, STEPS)
        if kept:
            found[f"{name} refused"] = refusal(folder, layout, groups, f"{name} adamw materialized")
        process_groups.shutdown()
    return found


def refusal(folder: str, layout: dict[str, int], groups: process_groups.Groups, saved: str) -> str:
    """What a model without PC layers says of a checkpoint with them."""
    keys = {f"parallel__{key}": value for key, value in layout.items()}
    config = tiny_config(rank_folder(folder), "adamw", **keys)
    trainer = build_trainer(config, groups, *build_data(config))
    try:
        load_state(Path(folder) / saved, trainer.model, trainer.optimizer)
    except StateError as error:
        return str(error)
    return "loaded"


def steps(trainer: Trainer, first: int, last: int) -> list[float]:
    """Losses of some steps."""
    return [trainer.step(step).loss.item() for step in range(first, last)]


def tiny_trainer(
    folder: str,
    layout: dict[str, int],
    groups: process_groups.Groups,
    rule: str,
    evaluator: str,
    blocks: list[str] = BLOCKS,
    model: Mapping[str, Any] = MappingProxyType({}),
) -> Trainer:
    """Trainer of a tiny run with PC layers and two micro-batches, or one.

    `model` are keys of its config.
    """
    pc = {"evaluator": evaluator, "blocks": blocks, "level": 4 if rule == "adamw" else 2}
    config = tiny_config(
        rank_folder(folder),
        rule,
        train__global_batch=16,
        train__micro_batch=8,
        pc=pc,
        **{f"parallel__{key}": value for key, value in layout.items()},
        **model,
    )
    return build_trainer(config, groups, *build_data(config))


def first_gradients(groups: process_groups.Groups, evaluator: str) -> dict[str, Tensor]:
    """Float64 gradients of whole PC layers and their gammas, given those of PC(W).

    (The engine's loss is float32, so a whole backward pass is not float64.)
    """
    model, optimizer = built(groups, evaluator)
    if evaluator == "in_graph":
        return dict(in_graph(model, groups))
    return dict(materialized(model, optimizer, groups))


def unsound_owner(groups: process_groups.Groups) -> dict[str, tuple[bool, bool]]:
    """Whether each unit of each rank is finite and has moved after a step in which owners hold
    NaN for the weights of `down`."""
    model, optimizer = built(groups, "materialized")
    views = {unit.name: unit.view(model.parameters[unit.parameter]) for unit in model.units}
    before = {name: view.clone() for name, view in views.items()}
    for unit in model.units:
        model.gradient(unit).copy_(upstream(unit, groups))
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


def built(
    groups: process_groups.Groups, evaluator: str
) -> tuple[ParallelModel, DistributedOptimizer]:
    """A tiny model with PC layers in float64, and its optimizer."""
    pc = PCConfig(level=4, blocks=BLOCKS, evaluator=evaluator, init_compensation=True)
    assign = assignments(OPTIMIZER, with_gammas(all_units(TINY), pc), pc)
    model = build_model(
        TINY,
        groups,
        ModelOptions(
            seed=3,
            sequence_length=8,
            dtype=torch.float64,
            elementwise=lambda unit: not assign(unit).whole_matrix,
            sequence_parallel=groups.tensor.size > 1,
            pc=pc,
        ),
    )
    return model, build_optimizer(model, assign)


def upstream(unit: Unit, groups: process_groups.Groups) -> Tensor:
    """Gradient of this rank's piece of an effective weight, a function of names alone."""
    return unit.piece(named_gradient(unit, 0), groups.tensor.rank, groups.tensor.size)


def materialized(
    model: ParallelModel, optimizer: DistributedOptimizer, groups: process_groups.Groups
) -> Iterator[tuple[str, Tensor]]:
    """Name and whole gradient of the units owned here, and of their gammas."""
    for unit in model.units:
        model.gradient(unit).copy_(upstream(unit, groups))
    model.finish_gradients()
    for domain in optimizer.domains:
        for units in domain.materialized:
            for batch, gradients in units.gradients():
                for i, transfer in enumerate(batch.transfers):
                    yield transfer.unit.name, assemble(transfer, gradients[i]).clone()
                    yield f"{transfer.unit.name}.gamma", batch.gamma_gradient[i].clone()


def in_graph(model: ParallelModel, groups: process_groups.Groups) -> Iterator[tuple[str, Tensor]]:
    """The same of the units that this rank holds a piece of, after the reduction."""
    loss = torch.zeros((), dtype=torch.float64)
    for effective in model.in_graph:
        out = effective(model.parameters[effective.units[0].parameter])
        parts = [(unit.view(out) * upstream(unit, groups)).sum() for unit in effective.units]
        loss = loss + torch.stack(parts).sum()
    loss.backward()
    model.finish_gradients()
    for flat in (flat for part in model.domains for flat in part.buffers.gradients):
        replicas = groups.dense.replicas
        handle = all_gather_(flat, replicas, CommVolume())
        if handle is not None:
            handle.wait()
    preconditioned = {unit.name for effective in model.in_graph for unit in effective.units}
    for unit in model.units:
        if unit.name.removesuffix(GAMMA) not in preconditioned:
            continue
        gradient = model.gradient(unit).contiguous()
        if unit.shard_axis is not None:
            pieces = [torch.empty_like(gradient) for _ in range(groups.tensor.size)]
            dist.all_gather(pieces, gradient, group=groups.tensor.group)
            gradient = torch.cat(pieces, unit.shard_axis)
        yield unit.name, gradient.reshape(unit.shape).clone()
