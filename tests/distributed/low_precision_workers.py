"""What ranks do in the tests of runs in 16 bits."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.checkpoint.state import load_state
from parallel.comm import groups as process_groups
from tests.distributed.workers import rank_folder, start
from tests.run_configs import tiny_config
from tests.saved_state import save_state
from training.build import build_data, build_trainer
from training.loop import Trainer

Case = tuple[str, dict[str, Any]]
"""Rule, and keys of the config."""

HALF, STEPS = 3, 6


def saved_runs(folder: str, cases: dict[str, Case], load_from: int | None) -> dict[str, Any]:
    """The losses of every case's steps, and of the steps after a checkpoint of its own and of the
    run on `load_from` ranks, if that is given."""
    groups = start({})
    here = dist.get_world_size()
    found: dict[str, Any] = {}
    for name, (rule, keys) in cases.items():
        config = tiny_config(rank_folder(folder), rule, **keys)

        def trainer(config=config) -> Trainer:
            return build_trainer(config, groups, *build_data(config))

        first = trainer()
        whole = list(losses(first, 0, HALF))
        save_state(Path(folder) / f"{name} on {here}", first.model, first.optimizer)
        found[name] = whole + list(losses(first, HALF, STEPS))
        for source in {here, load_from or here}:
            again = trainer()
            load_state(Path(folder) / f"{name} on {source}", again.model, again.optimizer)
            for _ in range(HALF * again.microbatches):
                next(again.batches)
            found[f"{name} from {source}"] = list(losses(again, HALF, STEPS))
    process_groups.shutdown()
    return found


def curves(
    folder: str, layouts: dict[str, dict[str, Any]], cases: dict[str, Case], last: int
) -> dict[str, list[float]]:
    """The losses of every case by `layout case`; a layout is keys of the config."""
    found: dict[str, list[float]] = {}
    for layout, keys in layouts.items():
        axes = {k.removeprefix("parallel__"): v for k, v in keys.items() if "parallel" in k}
        groups = start(axes)
        for name, (rule, more) in cases.items():
            config = tiny_config(rank_folder(folder), rule, **{**more, **keys})
            trainer = build_trainer(config, groups, *build_data(config))
            found[f"{layout} {name}"] = list(losses(trainer, 0, last))
            check_kept(trainer, expected=keys.get("parallel__tensor") == 2 and "PC" not in name)
        process_groups.shutdown()
    return found


def check_kept(trainer: Trainer, *, expected: bool) -> None:
    """Check that owners' float32 weights are the masters, bit for bit; `expected` is that some."""
    some = False
    for domain in trainer.optimizer.domains:
        kept = [dict(group.kept) for group in domain.step_groups]
        before = [{name: weight.clone() for name, weight in each.items()} for each in kept]
        domain.reload_kept()
        for old, group in zip(before, domain.step_groups, strict=True):
            for name, weight in old.items():
                some = True
                assert torch.equal(weight, group.kept[name]), name
                assert not torch.equal(weight, weight.bfloat16().float()), name
    assert some or not expected or trainer.config.optimizer.matrix.rule == "adamw"


def losses(trainer: Trainer, first: int, last: int) -> Iterator[float]:
    """The losses of some steps, each of which must be taken."""
    for step in range(first, last):
        result = trainer.step(step)
        assert bool(result.active), f"step {step} was skipped"
        yield result.loss.item()
    trainer.model.wait_for_weights()  # isfinite compares what it reads twice
    for flat in (flat for part in trainer.model.domains for flat in part.buffers.parameters):
        assert torch.isfinite(flat).all()
