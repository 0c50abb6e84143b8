"""Requirements that the step of the distributed optimizer meets for CUDA graphs, tested in one
process.

A step is a fixed sequence of operations on fixed memory, and the host never reads a value. Tests on
several ranks are in tests/distributed.
"""

from dataclasses import dataclass

import pytest
import torch

from parallel.optimizer.routing import Assignment
from spectral.rules import RULES, AdamWRule, MuonRule
from tests.slow_cases import slow_but
from tests.step_trace import on_meta, traced, without_eigensolvers
from tests.stepped_models import TINY, assign_matrices, gradient_of, stepped_model
from tests.update_cases import KINDS, built, fill

FAST = [("adamw", "none"), ("muon", "none"), ("spectral_sphere", "materialized")]
EVERY_KIND = pytest.mark.parametrize(("rule", "pc"), slow_but(FAST, KINDS))


@EVERY_KIND
def test_a_step_asks_the_host_for_nothing_and_no_tensor_of_the_host_enters_it(world, rule, pc):
    _, update = built(world, rule, pc)
    on_meta(update)
    allowed = torch.empty((), dtype=torch.bool, device="meta")
    update(0.5, allowed)
    operations = traced(lambda: update(0.25, allowed))
    assert {device for _, kinds in operations for _, _, device in kinds} == {"meta"}
    assert len(operations) > 100


def lasting(model, optimizer) -> list[torch.Tensor]:
    """Return copies of everything that the next step reads: weights, master weights and state."""
    groups = [group for domain in optimizer.domains for group in domain.step_groups]
    tensors = [
        *model.parameters.values(),
        *(m for d in optimizer.domains for m in d.model.masters),
    ]
    tensors += [
        value for d in optimizer.domains for region in d.regions for value in region.state.values()
    ]
    tensors += [value for stack in optimizer.stacks for _, _, value in stack.saved()]
    tensors += [weight for group in groups for weight in group.kept.values()]
    tensors += [buffer for effective in model.in_graph for buffer in effective.buffers()]
    return [tensor.detach().clone() for tensor in tensors]


IN_GRAPH = [*FAST, ("muon", "in_graph"), ("muon_plus_plus", "none")]


@pytest.mark.parametrize(("rule", "pc"), slow_but(IN_GRAPH, KINDS))
def test_a_gradient_that_is_not_finite_or_a_step_not_allowed_changes_no_bit(world, rule, pc):
    with without_eigensolvers():  # which find the same vectors again
        model, update = built(world, rule, pc, recorded=False)

        def changes(poison: float | None, allowed: bool) -> list[bool]:
            before = lasting(model, update.optimizer)
            fill(model, 0)
            if poison is not None:
                model.domains[0].gradients[0].view(-1)[3] = poison
            norm = update(1.0, torch.tensor(allowed))
            assert norm.total.isfinite() == (poison is None)
            assert norm.active == (allowed and poison is None)
            after = lasting(model, update.optimizer)
            return [not torch.equal(*pair) for pair in zip(before, after, strict=True)]

        for _ in range(2):
            some = changes(None, allowed=True)
            assert sum(some) > len(some) / 2
            for poison in (torch.inf, -torch.inf, torch.nan):
                assert not any(changes(poison, allowed=True)), poison
            assert not any(changes(None, allowed=False))


@pytest.mark.parametrize("rule", [name for name, kind in RULES.items() if kind.whole_matrix])
def test_a_refused_unit_keeps_its_weight_bit_for_bit(world, rule):
    model, optimizer = stepped_model(TINY, world, assign_matrices(rule))
    fill(model, 0)
    units = {unit.name: unit for unit in model.units}
    weights = {name: unit.view(model.parameters[unit.parameter]) for name, unit in units.items()}
    before = {name: weight.clone() for name, weight in weights.items()}
    gradient_of(model, units["layers.0.down"]).view(-1)[3] = torch.nan
    optimizer.step(1.0, torch.tensor(True))
    refused = {name for name, count in optimizer.refused() if count}
    same = {name for name, weight in weights.items() if torch.equal(weight, before[name])}
    assert refused == same == {"layers.0.down"}


@dataclass(frozen=True, kw_only=True)
class Wary(AdamWRule):
    """AdamW that refuses to update a range if its gradient is not finite."""

    def update(self, stacks):
        """Report `refused`; see `Rule.update`."""
        sound = [stack.grad.isfinite().all(1) for stack in stacks]
        super().update([s for s, ok in zip(stacks, sound, strict=True) if ok])
        return [{"refused": (~ok).float()} for ok in sound]


@pytest.mark.parametrize("name", ["embedding", "layers.0.mlp_norm", "layers.1.q.1"])
def test_a_range_that_an_elementwise_rule_refuses_is_named_by_its_first_element(world, name):
    """The refused range in a bucket's shard is the range whose weights have not changed."""

    def assign(unit):
        return Assignment("all", "wary", Wary(), 0.01, 0.1 if unit.is_matrix else 0.0)

    model, optimizer = stepped_model(TINY, world, assign)
    fill(model, 0)
    (unit,) = (unit for unit in model.units if unit.name == name)
    gradient_of(model, unit)[..., -1] = torch.nan
    part = model.domains[0]
    before = [flat.clone() for flat in part.parameters]
    optimizer.step(1.0, torch.tensor(True))
    kept = []
    for bucket, old in zip(part.bucket_layout.buckets, before, strict=True):
        same = (part.parameters[bucket.index] == old)[: bucket.used].nonzero()[:, 0].tolist()
        if same:
            assert same == [*range(same[0], same[-1] + 1)] and same[0] + unit.numel <= same[-1] + 1
            kept.append(f"wary elements dense.{bucket.index}.{same[0]}")
    assert [name for name, count in optimizer.refused() if count] == kept and len(kept) == 1


def test_gradients_of_weights_and_gammas_of_pc_layers_are_measured_and_clipped(world):
    """The expected gradients are computed by autograd from the model's gradient of PC(W)."""
    assign = assign_matrices("muon", pc_level=4)
    model, optimizer = stepped_model(TINY, world, assign, apart=True)
    fill(model, 0)
    layers = {
        unit.name: (stack, i)
        for stack in optimizer.materialized
        for i, unit in enumerate(stack.units)
    }
    squares, gammas = [], {}
    for unit in model.units:
        gradients = [gradient_of(model, unit).clone()]
        if unit.name in layers:
            stack, i = layers[unit.name]
            inputs = [x[i].clone().requires_grad_() for x in (stack.weight, stack.gamma[:, 0])]
            effective = stack.pc.preconditioner.effective(
                inputs[0], stack.u[i], stack.v[i], inputs[1]
            )
            upstream = gradients[0].reshape(unit.shape)
            gradients = torch.autograd.grad(effective, inputs, upstream)
            gammas[unit.name] = gradients[1]
        squares += [gradient.square().sum() for gradient in gradients]
    before = [gradient.clone() for _, gradient in optimizer._gradients()]
    expected = sum(squares).sqrt()
    norm = optimizer.clip(0.25)
    torch.testing.assert_close(norm.total, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(norm.coefficient, 0.25 / (expected + 1e-6), rtol=1e-12, atol=0)
    for old, (_, new) in zip(before, optimizer._gradients(), strict=True):
        assert torch.equal(new, old * norm.coefficient)
    assert optimizer.clip(100.0).coefficient == 1  # shorter gradients are not enlarged
    for name, gradient in gammas.items():
        stack, i = layers[name]
        clipped = gradient * norm.coefficient
        torch.testing.assert_close(stack.gamma_gradient[i, 0], clipped, rtol=1e-10, atol=0)
    assert len(gammas) == 2 * (2 + 4)  # two keys, and o, gate, up and down


def test_a_pc_layer_whose_rule_refuses_its_step_counts_as_refused(world):
    model, optimizer = stepped_model(TINY, world, assign_matrices("muon", pc_level=4))
    stack = optimizer.materialized[0]
    stack.state["momentum"][-1, 0, 0] = torch.nan
    fill(model, 0)
    optimizer.step(1.0, torch.tensor(True))
    refused = {name for name, count in optimizer.refused() if count}
    assert refused == {stack.units[-1].name}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["muon", "spectral_sphere"])
def test_momenta_of_all_matrices_have_the_dtype_that_is_asked_for(world, rule, dtype):
    """Heads are updated from shards, and PC layers by their owners."""
    assign = assign_matrices(rule, pc_level=4)
    options = {"momentum_dtype": dtype}
    _, optimizer = stepped_model(TINY, world, assign, optimizer=options)
    regions = [
        r.state for d in optimizer.domains for r in d.regions if r.assigned.rule.whole_matrix
    ]
    states = [*regions, *(stack.state for stack in optimizer.materialized)]
    assert {state["momentum"].dtype for state in states} == {dtype}
    assert regions and optimizer.materialized


def test_gammas_of_pc_layers_have_their_own_rate_and_decay(world):
    """The first step of AdamW equals the learning rate for any gradient. The layers have learning
    rates 0.03 and 0.2."""
    factors = [0.37, 2.1]
    assign = assign_matrices("muon", pc_level=4, layer_factors=factors)
    model, optimizer = stepped_model(TINY, world, assign, apart=True)
    fill(model, 0)
    optimizer.clip(None)
    before = {
        unit.name: stack.gamma[i].item()
        for stack in optimizer.materialized
        for i, unit in enumerate(stack.units)
    }
    optimizer.step(0.5, torch.tensor(True))
    for stack in optimizer.materialized:
        for i, unit in enumerate(stack.units):
            lr = 0.5 * 0.03 * factors[unit.layer]
            moved = abs(stack.gamma[i].item() - before[unit.name] * (1 - lr * 0.2))
            assert moved == pytest.approx(lr, rel=1e-5), unit.name
    assert len(before) == 2 * (2 + 4)  # two keys, and o, gate, up and down


def test_gradients_of_16_bits_become_momentum_in_float32(world):
    options = {"dtype": torch.float32, "gradient_dtype": torch.bfloat16}
    model, optimizer = stepped_model(TINY, world, assign_matrices("muon"), **options)
    fill(model, 0)
    (domain,) = optimizer.domains
    gradients = [gradient_of(model, unit).double() for unit in model.units]
    exact = sum(gradient.square().sum() for gradient in gradients).sqrt()
    assert optimizer.clip(None).total.item() == pytest.approx(exact.item(), rel=1e-5)
    for group in domain.step_groups:
        regions = [r for r in group.regions if r.assigned.rule.whole_matrix]
        gradients = [r.of(domain.model.gradient_shards()).float() for r in regions]
        momenta = domain.step_regions(group, lambda peak: peak, torch.tensor(True))
        for region, gradient in zip(regions, gradients, strict=True):
            state = {"momentum": torch.zeros_like(gradient)}
            (along,) = MuonRule().accumulate([gradient], [state], None)
            assert torch.equal(region.state["momentum"], state["momentum"])
            assert torch.equal(region.of(momenta), along.bfloat16())


def test_a_replay_counts_the_bytes_that_it_sends(world):
    model, update = built(world, "muon", "none")

    def first() -> bool:
        update._run()
        model.comm_volume["all-gather"] += 8  # a single rank sends nothing
        return True

    update._captured = first
    norm = update(1.0, torch.tensor(True))
    assert update._done is not None
    update._done.total.fill_(-1)  # a replay writes to the memory of the recorded call
    update._done.active.logical_not_()
    assert norm.total >= 0 and norm.active
    update._captured = lambda: False  # set the result of a replay without running anything
    update(1.0, torch.tensor(True))
    assert model.comm_volume["all-gather"] == 16
