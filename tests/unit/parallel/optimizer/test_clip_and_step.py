"""The distributed optimizer's step as a CUDA graph needs it, in one process.

It is a fixed sequence of operations on fixed memory that never reads a value on the host. The tests
of several ranks are in tests/distributed.
"""

import pytest
import torch

from parallel.optimizer.clip_and_step import Update
from tests.step_trace import on_meta, traced
from tests.update_cases import KINDS, built, fill

FAST = [("adamw", "none"), ("muon", "none"), ("spectral_sphere", "materialized")]
EVERY_KIND = pytest.mark.parametrize(
    ("rule", "pc"),
    [pytest.param(*kind, marks=[] if kind in FAST else pytest.mark.slow) for kind in KINDS],
)


@EVERY_KIND
def test_a_step_asks_the_host_for_nothing_and_no_tensor_of_the_host_enters_it(world, rule, pc):
    _, update = built(world, rule, pc)
    on_meta(update)
    allowed = torch.empty((), dtype=torch.bool, device="meta")
    update(0.5, allowed)
    operations = traced(lambda: update(0.25, allowed))
    assert {device for _, kinds in operations for _, _, device in kinds} == {"meta"}
    assert len(operations) > 100


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_changes_no_bit(world, poison):
    model, update = built(world, "muon", "none", recorded=False)
    fill(model, 0)
    model.domains[0].buffers.gradients[0].view(-1)[3] = poison
    before = [tensor.clone() for tensor in model.parameters.values()]
    norm, active = update(1.0, torch.tensor(True))
    assert not norm.total.isfinite() and not active
    after = model.parameters.values()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_matrices_may_be_left_out_of_the_clip(world):
    """The norm that is compared is then that of the other units, and only they are scaled."""
    for matrices in (True, False):
        model, update = built(world, "muon", "none", recorded=False)
        fill(model, 0)
        optimizer = update.optimizer
        before = [(kind, g.clone()) for kind, _, g in optimizer._gradients()]
        squares = [sum(g.square().sum() for k, g in before if k == kind) for kind in (0, 1)]
        compared = sum(squares) if matrices else squares[0]
        norm = optimizer.clip(0.25, clip_matrix_roles=matrices)
        torch.testing.assert_close(norm.total, sum(squares).sqrt(), rtol=1e-5, atol=0)
        expected = (0.25 / (compared.sqrt() + 1e-6)).clamp(max=1.0)
        torch.testing.assert_close(norm.coefficient, expected, rtol=1e-5, atol=0)
        for (kind, old), (_, _, new) in zip(before, optimizer._gradients(), strict=True):
            factor = norm.coefficient if matrices or kind == 0 else torch.ones(())
            assert torch.equal(new, old * factor)


def test_what_cannot_be_recorded_is_refused(world):
    model, update = built(world, "muon", "none")
    update.optimizer.overlap_gather = True
    with pytest.raises(ValueError, match="overlap_gather must be False"):
        Update(update.optimizer, max_norm=1.0, cuda_graph=True)
    _, early = built(world, "spectral_sphere", "none", early_exit=True, recorded=False)
    with pytest.raises(ValueError, match="early_exit of rule spectral_sphere must not be True"):
        Update(early.optimizer, max_norm=1.0, cuda_graph=True)


def test_a_replay_counts_the_bytes_that_it_sends(world):
    model, update = built(world, "muon", "none")
    before = model.comm_volume.copy()
    update(1.0, torch.tensor(True))
    once = model.comm_volume.difference(before)
    update._captured = lambda: False  # what a replay returns, without running anything
    update(1.0, torch.tensor(True))
    twice = model.comm_volume.difference(before)
    assert once.calls["all-gather"] > 0
    assert twice.calls == once.calls + once.calls
