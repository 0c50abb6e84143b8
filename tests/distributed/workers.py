"""Functions that the ranks run in the distributed tests."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from models.initialize import normal_
from models.units import Unit
from parallel.comm import groups as process_groups
from parallel.comm.collectives import CommVolume, all_gather_, from_all
from parallel.comm.groups import Axis
from parallel.model import ParallelModel, named_buffers
from parallel.observe import weight_watch
from parallel.observe.weight_watch import check_replicas
from parallel.optimizer.distributed_optimizer import (
    DisagreementError,
    Update,
    build_optimizer,
    check_agreement,
)
from spectral.polar import WORKSPACE_ELEMENTS
from tests.run_configs import tiny_config
from tests.run_results import without_times
from tests.stepped_models import TINY, assign_matrices, gradient_of, parallel_model
from training.build import build_trainer
from training.config.schema import ParallelConfig
from training.data.build_data import build_data
from training.data.tasks import Request, made_task
from training.evaluation import log_likelihoods
from training.loop import Hooks, Loop
from training.run import all_owners
from training.samples import next_tokens
from training.step import StepResult, Trainer


def start(layout: dict[str, int]) -> process_groups.Groups:
    """Create the process groups of a layout, given as keys of config section `parallel`."""
    return process_groups.initialize(ParallelConfig(**layout).layout)


def sizes_of_ends(layouts: list[dict[str, int]]) -> list[int | None]:
    """For each layout, return the size of the axis that joins the first and the last stage, or
    None."""
    sizes = []
    for layout in layouts:
        ends = start(layout).dense.ends
        sizes.append(None if ends is None else ends.size)
        process_groups.shutdown()
    return sizes


Case = tuple[dict[str, int], str, dict[str, Any]]
"""Layout, rule, and keys of the config."""


def built(folder: str, groups: process_groups.Groups, case: Case) -> Trainer:
    """Return the trainer of a case, with its config and run in this rank's own folder."""
    layout, rule, keys = case
    own = Path(folder) / f"rank{dist.get_rank()}"
    own.mkdir(exist_ok=True)
    placed: dict[str, Any] = {f"parallel__{key}": value for key, value in layout.items()}
    placed |= {f"data__{kind}__walk__path": f"{folder}/tokens" for kind in ("train", "validation")}
    keys = {k: v.format(folder=folder) if k.endswith("path") else v for k, v in keys.items()}
    config = tiny_config(str(own), rule, **{**placed, **keys})
    return build_trainer(config, groups, *build_data(config))


def runs(
    folder: str, cases: dict[str, Case], *, products: bool = False
) -> dict[str, dict[str, Any]]:
    """Return `followed` for the run of every case. With `products`, linear layers accumulate the
    gradients of their weights themselves, as on GPUs."""
    found = {}
    for name, case in cases.items():
        groups = start(case[0])
        trainer = built(folder, groups, case)
        trainer.model.sum_in_products(products)
        found[name] = followed(trainer)
        dist.barrier(groups.host)
        process_groups.shutdown()
    return found


def followed(trainer: Trainer) -> dict[str, Any]:
    """Train, and return everything that must not depend on the layout.

    loss, norm       of every step
    validation       metrics of the last
    tokens           most probable tokens after some positions, before the first step
    initial, units   weights of this rank's whole units, before and after
    kept             number of weights that this rank keeps in float32 as their owner
    owned, owners    matrices that this rank steps, and the ranks that the routing table names
    copies, named    names of weights with copies on another rank, and of those found changed later
    logged, lines    metrics and the monitors' lines by step, on the first rank
    """
    groups, vocab = trainer.groups, trainer.config.model.vocab_size
    length = trainer.config.train.sequence_length
    found: dict[str, Any] = {"loss": [], "norm": [], "logged": {}, "lines": {}}

    def keep(step: int, result: StepResult) -> None:
        assert result.active, f"step {step} was skipped"
        found["loss"].append(result.loss.item())
        found["norm"].append(result.norm.total.item())

    hooks = Hooks(
        on_step=keep,
        report=lambda metrics, step: found["logged"].update({step: without_times(metrics)}),
        record=lambda line, step: found["lines"].update({step: line}),
    )
    windows = torch.stack(
        [torch.from_numpy(trainer.validation[0].set.window(i)[:-1]) for i in range(3)]
    )
    found["tokens"] = [
        next_tokens(trainer.model, groups, windows, place, vocab, [None] * 3).tolist()
        for place in (length // 4, length - 1)
    ]
    found["initial"] = whole_units(trainer.model, groups)
    found["validation"] = Loop(trainer, hooks).run().validation
    found["units"] = whole_units(trainer.model, groups)
    check_replicas(trainer.model)
    found["kept"] = checked_kept(trainer)
    units = [unit for stack in trainer.optimizer.stacks for unit in stack.units]
    found["owned"] = {unit.name for unit in units if not unit.is_copy}
    found["owners"] = all_owners(trainer.optimizer)
    found["copies"], found["named"] = changed_copies(trainer.model)
    return found


def changed_copies(model: ParallelModel) -> tuple[set[str], set[str]]:
    """Return the names of all weights with an equal copy on another rank, and the names in the
    error raised after all copies on the last rank have changed."""
    units = {unit.name: unit for unit in model.units}
    copies = {name: unit.view(model.parameters[unit.parameter]) for name, unit in units.items()}
    copies |= dict(named_buffers(model.chunks, model.parameters))
    mine = {name: value.detach().float().numpy().tobytes() for name, value in copies.items()}
    others = [each for rank, each in enumerate(from_all(mine)) if rank != dist.get_rank()]
    equal = {name for name in mine if any(each.get(name) == mine[name] for each in others)}
    for name in equal if dist.get_rank() == len(others) else ():
        copies[name].data[..., -1] += 1
    weight_watch.SHOWN = len(copies)
    named = set[str]()
    try:
        check_replicas(model)
    except DisagreementError as error:
        named = set(str(error).removeprefix("copies of weights differ between ranks: ").split(", "))
    parameters = {name: unit.parameter for name, unit in units.items() if not unit.tied_stage}
    twice = {  # tied weights are compared with replicas too, under the name of the parameter
        unit.parameter
        for part in model.domains
        for unit in part.units
        if unit.tied_stage and part.domain.replicas.size > 1
    }
    return {parameters.get(name, name) for name in equal} | twice, named


def task_scores(
    folder: str, cases: list[Case], requests: list[dict[str, Any]]
) -> list[tuple[list[float], dict[str, float]]]:
    """For each case, return the log-likelihood of each request, and the metrics of two random
    tasks."""
    found, asked = [], [Request(**each) for each in requests]
    for case in cases:
        groups = start(case[0])
        trainer = built(folder, groups, case)
        vocab = trainer.config.model.vocab_size
        options = {"vocab_size": vocab, "most_tokens": 64}
        likelihoods = log_likelihoods(trainer.model, groups, asked, **options)
        trainer.tasks = [made_task(name, window=32, vocab_size=vocab) for name in ("a", "b")]
        found.append((likelihoods, Loop(trainer).score()))
        process_groups.shutdown()
    return found


def checked_kept(trainer: Trainer) -> int:
    """Check that the float32 weights kept by owners equal the master weights bit for bit, and
    return the number of kept weights."""
    count = 0
    for domain in trainer.optimizer.domains:
        kept = [dict(group.kept) for group in domain.step_groups]
        before = [{name: weight.clone() for name, weight in each.items()} for each in kept]
        domain.reload_kept()
        for old, group in zip(before, domain.step_groups, strict=True):
            for name, weight in old.items():
                assert torch.equal(weight, group.kept[name]), name
                assert not torch.equal(weight, weight.bfloat16().float()), name
                count += 1
    return count


def whole_units(
    model: ParallelModel, layout_groups: process_groups.Groups
) -> dict[str, torch.Tensor]:
    """Return the logical matrix of each unit that is on this rank, whole or in part."""
    return {unit.name: whole_unit(model, layout_groups, unit).clone() for unit in model.units}


def whole_unit(model: ParallelModel, layout: process_groups.Groups, unit: Unit) -> torch.Tensor:
    """Return the logical matrix of a unit, gathered over tensor-parallel ranks."""
    model.wait_for_weights()
    local = unit.view(model.parameters[unit.parameter].detach())
    domain = layout.experts if unit.domain == "expert" else layout.dense
    return joined(unit, local, domain.tensor)


def whole_gradients(model: ParallelModel) -> dict[str, torch.Tensor]:
    """Return the mean gradient of each unit on this rank, gathered over all ranks that share the
    unit."""
    gradients = {}
    for part in model.domains:
        flats = [flat.clone() for flat in part.gradients]
        for flat in flats:
            handle = all_gather_(flat, part.domain.replicas, CommVolume())
            if handle is not None:
                handle.wait()
        for unit in part.units:
            bucket, slot = part.bucket_layout.slots[unit.parameter]
            local = unit.view(flats[bucket.index].narrow(0, slot.offset, slot.numel))
            gradients[unit.name] = joined(unit, local, part.domain.tensor)
    return gradients


def joined(unit: Unit, local: torch.Tensor, tensor: Axis) -> torch.Tensor:
    """Gather the whole unit `[*shape]` from the pieces on tensor-parallel ranks."""
    local = local.contiguous()
    if unit.shard_axis is None:
        return local.reshape(unit.shape)
    pieces = [torch.empty_like(local) for _ in range(tensor.size)]
    dist.all_gather(pieces, local, group=tensor.group)
    return torch.cat(pieces, unit.shard_axis).reshape(unit.shape)


def sent_in_one_step(
    folder: str, layout: dict[str, int], runs: list[dict[str, Any]]
) -> list[dict[str, int]]:
    """For each run, given as overrides, return the bytes that this rank sends in one training step,
    by kind.

    `stage` is this rank's pipeline rank. `held` is the number of bytes of master weights and state,
    without counters, and `gradients` that of gradient buckets.
    """
    layout_groups = start(layout)
    found = []
    for overrides in runs:
        trainer = built(folder, layout_groups, (layout, "spectral_sphere", overrides))
        comm_volume = trainer.model.comm_volume
        comm_volume.clear()
        trainer.step(0)
        trainer.model.wait_for_weights()
        # Counters of AdamW, 4 bytes for each range of a shard, are not planned.
        counters = sum(
            "step" in region.state for d in trainer.optimizer.domains for region in d.regions
        )
        held = trainer.optimizer.memory_bytes() - 4 * counters
        gradients = sum(g.nbytes for d in trainer.model.domains for g in d.gradients)
        sizes = {"held": held, "gradients": gradients}
        found.append({"stage": layout_groups.pipeline.rank, **sizes, **comm_volume})
        torch.distributed.barrier()
    process_groups.shutdown()
    return found


def optimizer_steps(
    layout: dict[str, int], variants: list[dict[str, Any]], steps: int
) -> list[dict[str, torch.Tensor]]:
    """For every variant (see `units_after`), return this rank's whole units after `steps` steps.

    On several ranks, the workspace holds two heads, or one larger matrix.
    """
    layout_groups = start({**layout, "sequence": False})
    if dist.get_world_size() > 1:
        WORKSPACE_ELEMENTS["cpu"] = 600
    found = [units_after(layout_groups, steps, **variant) for variant in variants]
    process_groups.shutdown()
    return found


def units_after(
    layout_groups: process_groups.Groups,
    steps: int,
    *,
    stepped: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    refused: bool = False,
    tied: bool = False,
    **assigned: Any,
) -> dict[str, torch.Tensor]:
    """Return all whole units after `steps` float64 steps with gradients that depend only on names.

    The gradients are averaged over ranks as after a backward pass, with a different share for each
    rank. If roles are `penalised`, the penalty's metrics in the last step are returned as an
    additional unit. With `refused`, the last rank refuses each step at first, as if its copy of the
    loss were NaN, and the step is then repeated. Each stage with a copy of a `tied` embedding has
    half of the embedding's gradient. A model with a tied embedding also has biases.

    stepped, model, assigned   options of `build_optimizer`, `parallel_model`, `assign_matrices`
    """
    assign = assign_matrices(**assigned)
    tiny = replace(TINY, tie_embeddings=tied, attention_bias="all" if tied else "none")
    parallel = parallel_model(tiny, layout_groups, assign, **(model or {}))
    declared = parallel.units  # the optimizer may cut this option
    optimizer = build_optimizer(parallel, assign, **{"step_groups": 2, **(stepped or {})})
    tensor, replicas = layout_groups.tensor, layout_groups.dense.replicas
    share = 2.0 * (replicas.rank + 1) / (replicas.size + 1)  # 1 on average
    extra = {}
    for step in range(steps):
        for unit in declared:
            whole = named_gradient(unit, step) * share / (2 if unit.tied_stage else 1)
            gradient_of(parallel, unit).copy_(unit.piece(whole, tensor.rank, tensor.size))
        parallel.finish_gradients()
        if "penalised" in assigned:
            figures = optimizer.add_penalty(enabled=True, measured=step == steps - 1)
            if figures is not None:
                extra["penalty"] = torch.tensor(astuple(figures), dtype=torch.float64)
        if refused:
            allowed = torch.tensor(dist.get_rank() != dist.get_world_size() - 1)
            assert not Update(optimizer, max_norm=1.0)(1.0, allowed).active
        optimizer.clip(1.0)
        optimizer.step(1.0, torch.tensor(True))
    return extra | {unit.name: whole_unit(parallel, layout_groups, unit) for unit in parallel.units}


def named_gradient(unit: Unit, step: int) -> torch.Tensor:
    """Return the float64 gradient `[*shape]` of a whole unit, drawn like its initial value."""
    cols = unit.shape[-1]
    draws = unit.draws or ((unit.name, 1),)
    rows = [
        normal_(torch.empty(count, cols), f"gradient {step} {name}", 0) for name, count in draws
    ]
    return torch.cat(rows).double().reshape(unit.shape)


def disagree() -> str:
    """Return this rank's error if the placement on rank 1 differs."""
    layout_groups = start({})
    digest = ["same", "other" if dist.get_rank() == 1 else "same"]
    try:
        check_agreement(digest, layout_groups.dense.stage)
    except DisagreementError as error:
        return str(error)
    finally:
        process_groups.shutdown()
    return "agreed"
