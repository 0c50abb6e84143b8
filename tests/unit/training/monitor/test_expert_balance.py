"""Load balancing of experts by a trainer, and its metrics."""

import pytest
import torch
from torch import Tensor

from models.load_balance import routers
from parallel.comm.groups import Groups
from tests.run_configs import MIXTURE, tiny_config
from training.build import build_data, build_trainer
from training.loop import Trainer


def trainer_of(folder: str, world: Groups, **overrides) -> Trainer:
    """A trainer of a tiny mixture of experts."""
    config = tiny_config(folder, **MIXTURE, train__exit_step=5, **overrides)
    return build_trainer(config, world, *build_data(config))


def test_the_expert_bias_moves_and_max_vio_is_logged(folder: str, world: Groups) -> None:
    trainer = trainer_of(folder, world, model__layers=3)
    metrics = []
    trainer.report = lambda values, step: metrics.append(values)
    trainer.run()
    by_layer = [metrics[-1][f"moe/max_vio/{layer}"] for layer in (1, 2)]
    assert "moe/max_vio/0" not in metrics[-1]
    assert metrics[-1]["moe/max_vio"] == max(by_layer)
    assert all(0 <= value <= 3 for value in by_layer)
    assert not any(name.endswith("loss") for name in metrics[-1] if name.startswith("moe/"))
    biases = [router.expert_bias for router in routers(trainer.model.chunks)]
    assert len(biases) == 2 and all(bias.abs().sum() > 0 for bias in biases)


def test_balancing_losses_are_logged_as_their_papers_define_them(
    folder: str, world: Groups
) -> None:
    """From the logits of all four micro-batches of two sequences of 32 tokens."""
    coefficients = {"sequence_aux_loss": 1e-2, "global_aux_loss": 3e-3, "z_loss": 1e-3}
    trainer = trainer_of(
        folder, world, **{f"model__moe__{name}": value for name, value in coefficients.items()}
    )
    (router,) = routers(trainer.model.chunks)
    logits: list[Tensor] = []
    routing = router.routing

    def keep(values: Tensor, *rest: object, **named: object) -> object:
        logits.append(values.detach().clone())
        return routing(values, *rest, **named)

    router.routing = keep
    trainer.step(0)
    found = trainer.experts.metrics()
    assert [tuple(each.shape) for each in logits] == [(32, 2, 4)] * 4
    z = torch.stack([each.logsumexp(-1).square().mean() for each in logits]).mean()
    assert found["moe/z_loss"] == pytest.approx(z.item(), rel=1e-5)

    sequences = torch.cat(logits, 1).transpose(0, 1)  # [8 sequences, 32 tokens, 4 experts]
    assert found["moe/sequence_aux_loss"] == pytest.approx(
        torch.stack([imbalance(each) for each in sequences]).mean().item(), rel=1e-5
    )
    # Megatron compares the scores of each micro-batch with the load up to it.
    flat = [each.flatten(0, 1) for each in logits]
    parts = [imbalance(part, torch.cat(flat[: i + 1])) for i, part in enumerate(flat)]
    assert found["moe/global_aux_loss"] == pytest.approx(torch.stack(parts).mean().item(), rel=1e-5)


def imbalance(logits: Tensor, load_of: Tensor | None = None) -> Tensor:
    """Experts times the sum over experts of (share of the load) x (mean score), of logits
    `[tokens, experts]`; 1 for an even load. The load is that of the logits `load_of`."""
    source = logits if load_of is None else load_of
    chosen = source.sigmoid().topk(2, dim=1).indices
    share = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    scores = logits.sigmoid()
    return 4 * (share * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
