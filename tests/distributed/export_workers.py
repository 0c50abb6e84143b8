"""What the ranks of the export tests run: short trainings on several layouts."""

from typing import Any

import torch
from torch import Tensor

from parallel.comm import groups as process_groups
from parallel.comm.groups import Groups
from parallel.model import ParallelModel
from tests.distributed.workers import rank_folder, start
from tests.models import tokens_of
from tests.run_configs import tiny_config
from training.build import build_data, build_trainer
from training.checkpoint.saving import Saver

LENGTH, VOCABULARY = 32, 120


def saved_runs(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Tensor]:
    """Train every case (config keys) for three steps and save it to `folder`/name.

    Returns the losses of the last tokens by name, `[4, s]`, computed by the trained model itself on
    its layout.
    """
    found = {}
    for name, keys in cases.items():
        layout = {k.removeprefix("parallel__"): v for k, v in keys.items() if "parallel__" in k}
        groups = start(layout)
        keys = {**keys, "train__steps": 3, "run__dir": f"{folder}/{name}"}
        config = tiny_config(rank_folder(folder), **keys)
        trainer = build_trainer(config, groups, *build_data(config))
        trainer.run()
        facts = {"identity": {"data": {}, "tokenizer": {}}, "versions": {}, "run_id": "0"}
        saver = Saver(config, groups, trainer.model, trainer.optimizer, facts)
        saver.begin(trainer.checkpoint())
        saver.wait(lambda failed: failed, lambda: None)
        found[name] = token_losses(trainer.model, groups)
        process_groups.shutdown()
    return found


def token_losses(model: ParallelModel, groups: Groups) -> Tensor:
    """Loss of every token of a fixed batch, on every rank."""
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
