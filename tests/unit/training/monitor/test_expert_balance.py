"""Expert load balancing in a trainer, and its metrics."""

import pytest
import torch
from torch import Tensor

from models.blocks.experts import routers
from parallel.comm.groups import Groups
from tests.run_configs import MIXTURE, tiny_config
from training.build import build_trainer
from training.data.build_data import build_data
from training.loop import Hooks, Loop
from training.step import Trainer


def trainer_of(folder: str, world: Groups, **overrides) -> Trainer:
    """Return a trainer with a tiny mixture of experts."""
    config = tiny_config(folder, **MIXTURE, train__exit_step=5, **overrides)
    return build_trainer(config, world, *build_data(config))


def test_the_expert_bias_moves_and_max_vio_is_logged(folder: str, world: Groups) -> None:
    trainer = trainer_of(folder, world, model__layers=3, train__micro_batch=8)
    metrics = []
    Loop(trainer, Hooks(report=lambda values, step: metrics.append(values))).run()
    by_layer = [metrics[-1][f"moe/max_vio/{layer}"] for layer in (1, 2)]
    assert "moe/max_vio/0" not in metrics[-1] and metrics[-1]["moe/max_vio"] == max(by_layer)
    assert all(0 <= value <= 3 for value in by_layer)
    assert not any(name.endswith("loss") for name in metrics[-1] if name.startswith("moe/"))
    biases = [router.expert_bias for router in routers(trainer.model.chunks)]
    assert len(biases) == 2 and all(bias.abs().sum() > 0 for bias in biases)


def test_balancing_losses_are_logged_as_their_papers_define_them(folder, world) -> None:
    """The reference uses the logits of all four micro-batches, each with two sequences of 32
    tokens."""
    coefficients = {"sequence_aux_loss": 1e-2, "global_aux_loss": 3e-3, "z_loss": 1e-3}
    keys = {f"model__moe__{name}": value for name, value in coefficients.items()}
    trainer = trainer_of(folder, world, **keys)
    (router,) = routers(trainer.model.chunks)
    logits: list[Tensor] = []
    routing = router.routing

    def keep(values: Tensor, *rest: object, **named: object) -> object:
        logits.append(values.detach().clone())
        return routing(values, *rest, **named)

    router.routing = keep
    trainer.step(0)
    # Equal shares before the first step, of mean scores that sum to 1.
    found = trainer.experts.metrics(trainer.microbatches)
    assert found["moe/global_aux_loss"] == pytest.approx(1.0, rel=1e-6)
    before = torch.cat([each.flatten(0, 1) for each in logits])
    logits.clear()
    trainer.step(1)
    found = trainer.experts.metrics(trainer.microbatches)
    assert [tuple(each.shape) for each in logits] == [(32, 2, 4)] * 4
    z = torch.stack([each.logsumexp(-1).square().mean() for each in logits]).mean()
    assert found["moe/z_loss"] == pytest.approx(z.item(), rel=1e-5)

    sequences = torch.cat(logits, 1).transpose(0, 1)  # [8 sequences, 32 tokens, 4 experts]
    expected = torch.stack([imbalance(each) for each in sequences]).mean().item()
    assert found["moe/sequence_aux_loss"] == pytest.approx(expected, rel=1e-5)
    # The scores of the step are combined with the load of the previous step.
    scores = torch.cat([each.flatten(0, 1) for each in logits])
    expected = imbalance(scores, before).item()
    assert found["moe/global_aux_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["global_aux_loss", "sequence_aux_loss", "z_loss"])
def test_no_balancing_loss_depends_on_micro_batches(loss: str, folder: str, world: Groups) -> None:
    norms = []
    for micro_batch in (8, 2):
        keys = {f"model__moe__{loss}": 0.1, "train__micro_batch": micro_batch}
        trainer = trainer_of(folder, world, **keys)
        norms.append([trainer.step(step).norm.total.item() for step in range(3)])
    # Sums of float32 in another order.
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_a_step_that_is_not_taken_leaves_the_load(folder: str, world: Groups) -> None:
    trainer = trainer_of(folder, world, model__moe__global_aux_loss=0.1)
    (router,) = routers(trainer.model.chunks)
    trainer.step(0)
    load = router.earlier_load.clone()
    assert load.sum() == 8 * 32 * 2
    next(iter(trainer.model.parameters.values())).data.fill_(torch.nan)
    assert not trainer.step(1).active and torch.equal(router.earlier_load, load)


def imbalance(logits: Tensor, load_of: Tensor | None = None) -> Tensor:
    """For logits `[tokens, experts]`, return the number of experts times the sum over experts of
    (share of the load) x (mean score), which is 1 for an equal load. The load is computed from the
    logits `load_of`."""
    source = logits if load_of is None else load_of
    chosen = source.sigmoid().topk(2, dim=1).indices
    share = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    scores = logits.sigmoid()
    return 4 * (share * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
