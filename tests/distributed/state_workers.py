"""Functions that the ranks run in the checkpoint tests."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from models.blocks.experts import balance_, routers, token_counts
from models.config import ModelConfig
from models.layout import Layout
from parallel.checkpoint.state import StateError, load_state
from parallel.comm import groups as process_groups
from parallel.comm.collectives import from_all
from parallel.comm.groups import Axis, Groups
from parallel.optimizer.domain_optimizer import DomainOptimizer
from tests.distributed.workers import joined, start
from tests.models import tokens_of
from tests.run_results import same_state
from tests.saved_state import save_state
from tests.stepped_models import TINY, assign_matrices, figures_of, stepped_model
from tests.tiny_families import mixture

BATCH, LENGTH = 4, 16

Sizes = dict[str, int]
Tensors = dict[str, Tensor]


class Trained:
    """A tiny model and its optimizer, with a fixed global batch."""

    def __init__(
        self, groups: Groups, rule: str, model: ModelConfig = TINY, **options: Any
    ) -> None:
        own: dict[str, Any] = {"sequence_length": LENGTH, "dtype": torch.float32}
        own["optimizer"] = {"exchange_dtype": options.get("dtype", torch.float32)}
        self.groups = groups
        self.model, self.optimizer = stepped_model(
            model, groups, assign_matrices(rule), **(own | options)
        )

    def steps(self, count: int) -> list[float]:
        """Take `count` steps, and return each step's mean loss before the update, on every rank."""
        return [self.step() for _ in range(count)]

    def step(self) -> float:
        """Take a step and return the mean loss over the global batch, which is always the same."""
        data = self.groups.data
        tokens, labels = tokens_of(BATCH, LENGTH, 60)
        mine = slice(data.rank * BATCH // data.size, (data.rank + 1) * BATCH // data.size)
        batch = {"tokens": tokens[mine], "labels": labels[mine]}
        self.model.zero_gradients()
        figures = figures_of(self.model, batch)
        loss = sum((figure["loss"] for figure in figures), torch.zeros(()))
        dist.all_reduce(loss, group=self.groups.pipeline.group)
        dist.all_reduce(loss, group=data.group)
        self.optimizer.step(1.0, torch.tensor(True))
        counts = token_counts(self.model.chunks)
        dist.all_reduce(counts, group=self.groups.dense.stage.group)
        balance_(self.model.chunks, counts, rate=0.1)
        return loss.item() / data.size

    def parameters(self) -> Tensors:
        """Return this rank's parameters after the last step, by name."""
        self.model.wait_for_weights()
        return {name: p.detach().clone() for name, p in self.model.parameters.items()}

    def state(self) -> Tensors:
        """Return the state of this pipeline stage as whole tensors, by unit.

        The state is collected without the code under test: whole buckets are gathered, and units
        are the views used by initialisation and the forward pass.
        """
        self.model.wait_for_weights()
        found: Tensors = {}
        for router in routers(self.model.chunks):
            assert router.expert_bias is not None
            found[f"router {router.layer_number} bias"] = router.expert_bias.clone()
        for domain in self.optimizer.domains:
            found |= elementwise_state(domain)
        for batch in self.optimizer.stacks:
            for i, unit in enumerate(batch.units):
                for name, value in batch.state.items():
                    found[f"{unit.name} {name}"] = value[i].clone()
        return found


def elementwise_state(domain: DomainOptimizer) -> Tensors:
    """Return the weight, elementwise state and counters of each unit of a domain on this rank."""
    found: Tensors = {}
    names = sorted({name for region in domain.regions for name in region.state})
    shards = {"weight": [master.detach() for master in domain.model.masters]}
    for name in sorted(set().union(*from_all(names))):
        shards[name] = [torch.full_like(master, torch.nan) for master in domain.model.masters]
        for region in domain.regions:
            if name in region.state:
                region.of(shards[name]).copy_(region.state[name].expand(1, region.length))
    for name, parts in shards.items():
        buckets = [gathered(part, domain.domain.replicas) for part in parts]
        for unit in domain.model.units:
            bucket, slot = domain.model.bucket_layout.slots[unit.parameter]
            flat = buckets[bucket.index].narrow(0, slot.offset, slot.numel)
            whole = joined(unit, unit.view(flat), domain.domain.tensor)
            if not whole.isnan().all():
                found[f"{unit.name} {name}"] = whole
    return found


def gathered(shard: Tensor, axis: Axis) -> Tensor:
    """Return the whole bucket from the axis's shards."""
    parts = [torch.empty_like(shard) for _ in range(axis.size)]
    dist.all_gather(parts, shard.contiguous(), group=axis.group)
    return torch.cat(parts)


def started(layouts: Sequence[Sizes]) -> Iterator[tuple[Sizes, Groups]]:
    """Yield each layout with its process groups, which exist until the next layout is requested."""
    for layout in layouts:
        yield layout, start(layout)
        process_groups.shutdown()


def label(layout: Sizes) -> str:
    """Return a name for a layout that includes the number of ranks."""
    rest = "".join(f" {key}{size}" for key, size in layout.items())
    return f"ranks{dist.get_world_size()}{rest}"


def checkpoints(
    folder: str, stops: list[tuple[Sizes, list[str], list[tuple[str, str]]]], refuse: bool
) -> dict[str, dict[str, Any]]:
    """Save and load runs on each layout in `stops`, given the runs to save and the (layout, run)
    pairs to load.

    A run is named "rule dtype", followed by " moe" for a mixture of experts, or by " tied" for a
    tied embedding and biases. The keys of the results are "layout run" and "saving layout run ->
    layout". With `refuse`, the result of `refusals` is included.
    """
    found: dict[str, dict[str, Any]] = {"saved": {}, "loaded": {}}
    for (layout, groups), (_, saves, loads) in zip(
        started([layout for layout, *_ in stops]), stops, strict=True
    ):
        for name in saves:
            place = f"{label(layout)} {name}"
            found["saved"][place] = save_and_continue(f"{folder}/{place}", groups, name)
        for source, name in loads:
            place = f"{source} {name} -> {label(layout)}"
            found["loaded"][place] = load_and_continue(f"{folder}/{source} {name}", groups, name)
    if refuse:
        found["refused"] = refusals(folder)
    return found


def save_and_continue(folder: str, groups: Groups, name: str) -> dict[str, Any]:
    """Save a run after two steps, load it into a new model, and take two more steps with both
    models.

    Returns the saved state, the losses, the final state, and all bitwise differences between the
    continued and the loaded run.
    """
    run, other = trained(groups, name), trained(groups, name, seed=4)
    run.steps(2)
    saved = run.state()
    assert same_state(saved, other.state())
    save_state(folder, run.model, run.optimizer, {"step": 2})
    extra = load_state(folder, other.model, other.optimizer)
    different = same_state(saved, other.state()) + same_state(run.parameters(), other.parameters())
    losses, again = run.steps(2), other.steps(2)
    after = run.state()
    different += same_state(after, other.state()) + same_state(run.parameters(), other.parameters())
    return {
        "saved": saved,
        "losses": losses,
        "after": after,
        "different": different,
        "losses again": again,
        "extra": extra,
    }


def load_and_continue(folder: str, groups: Groups, name: str) -> dict[str, Any]:
    """Return the loaded state, and the losses and the state of two more steps.

    The bucket layout differs from that of the saved model.
    """
    run = trained(groups, name, seed=4, alignment=1)
    load_state(folder, run.model, run.optimizer)
    return {
        "loaded": run.state(),
        "rounded": rounded(run),
        "losses": run.steps(2),
        "after": run.state(),
    }


def rounded(run: Trained) -> bool:
    """Return whether every parameter on this rank equals its rounded master weight."""
    return all(
        torch.equal(flat, gathered(master.detach(), domain.domain.replicas).to(flat.dtype))
        for domain in run.optimizer.domains
        for flat, master in zip(domain.model.parameters, domain.model.masters, strict=True)
    )


def trained(groups: Groups, name: str, **options: Any) -> Trained:
    """Return the model of a run before its first step."""
    rule, dtype, *rest = name.split()
    tied = replace(TINY, tie_embeddings=True, attention_bias="all")
    models = {"moe": mixture(), "tied": tied, "": TINY}
    model = models["".join(rest)]
    return Trained(groups, rule, dtype=getattr(torch, dtype), model=model, **options)


def refusals(folder: str) -> dict[str, dict[str, str]]:
    """Return `load_state`'s errors for checkpoints that do not match the model, on two pipeline
    stages."""
    groups = process_groups.initialize(Layout(pipeline=2))
    small = Trained(groups, "adamw", model=replace(TINY, layers=2))
    save_state(f"{folder}/two layers", small.model, small.optimizer)
    cases = {
        "missing unit": Trained(groups, "adamw", model=replace(TINY, layers=4)),
        "other shape": Trained(groups, "adamw", model=replace(TINY, ffn=64)),
        "other rule": Trained(groups, "spectral_sphere"),
        "other dtype": Trained(groups, "adamw", dtype=torch.float64),
    }
    said = {case: refusal(load_state, f"{folder}/two layers", run) for case, run in cases.items()}
    large = cases["missing unit"]
    save_state(f"{folder}/four layers", large.model, large.optimizer)
    said["unit too many"] = refusal(load_state, f"{folder}/four layers", small)
    process_groups.shutdown()
    return {case: {"said": answer} for case, answer in said.items()}


def refusal(call: Callable[..., Any], folder: str, run: Trained) -> str:
    """Return the message of the error that `call` raises for a run, "changed" if the run's state
    changed, or "accepted" if there was no error."""
    before = run.state()
    try:
        call(folder, run.model, run.optimizer)
    except StateError as error:
        return "changed" if same_state(before, run.state()) else str(error)
    return "accepted"
