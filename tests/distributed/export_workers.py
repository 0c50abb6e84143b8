"""Functions that the ranks run in the export tests: a short training run."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from tests.distributed.workers import built, start
from tests.models import tokens_of
from training.checkpoint.saving import Saver
from training.loop import Loop

LENGTH, VOCABULARY = 32, 120


def saved_run(folder: str, keys: dict[str, Any]) -> Tensor:
    """Train for three steps with the given config keys, and save the run to `folder`/saved.

    Returns the losses of the last tokens, `[4, s]`, from the trained model on its layout.
    """
    groups = start({k.removeprefix("parallel__"): v for k, v in keys.items() if "parallel__" in k})
    keys = {**keys, "train__steps": 3, "run__dir": f"{folder}/saved"}
    trainer = built(folder, groups, ({}, "spectral_sphere", keys))
    Loop(trainer).run()
    Path(trainer.config.run.dir).mkdir(exist_ok=True)
    facts = {"identity": {"data": {}, "tokenizer": {}}, "versions": {}, "run_id": "0"}
    saver = Saver(trainer.config, groups, trainer.model, trainer.optimizer, facts)
    saver.begin(trainer.checkpoint())
    saver.wait(lambda failed: failed, lambda: None)
    losses = token_losses(trainer.model, groups)
    process_groups.shutdown()
    return losses


def token_losses(model: ParallelModel, groups: Groups) -> Tensor:
    """Return the loss of every token of a fixed batch, on every rank."""
    tokens, labels = tokens_of(4, LENGTH, VOCABULARY)
    batch = {"tokens": tokens, "labels": labels}
    figures = model.forward_backward(
        lambda: iter([batch] * groups.pipeline.size),
        lambda _: lambda losses: (losses.mean(), {"losses": losses.detach().clone()}),
        microbatches=groups.pipeline.size,
        micro_batch=4,
        train=False,
    )
    losses = figures[0]["losses"] if figures else torch.zeros(4, LENGTH)
    torch.distributed.all_reduce(losses, group=groups.pipeline.group)
    return losses
