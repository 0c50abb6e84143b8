"""PC layers in a model of one process, compared with singular value decompositions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.blocks.in_graph_pc import GAMMA, with_gammas
from models.families import all_units
from models.pc_config import PCConfig, PCOverride
from parallel.comm import groups as process_groups
from parallel.model import ParallelModel
from parallel.optimizer.distributed_optimizer import DistributedOptimizer
from parallel.optimizer.materialized_pc import MaterializedStack
from spectral.odd_polynomial import evaluate
from tests.models import tokens_of
from tests.stepped_models import TINY, assigned, figures_of, stepped_model
from tests.tiny_families import tiny_model
from training.config.optimizer_section import GroupConfig, OptimizerConfig

GROUP = GroupConfig(rule="muon", lr=0.02, weight_decay=0.1)
SCALAR = GroupConfig(rule="adamw", lr=0.02)
OPTIMIZER = OptimizerConfig(matrix=GROUP, embedding=SCALAR, head=SCALAR, scalar=SCALAR)


def built(
    world: process_groups.Groups, pc: PCConfig | None, **options: Any
) -> tuple[ParallelModel, DistributedOptimizer]:
    """Return a tiny model and its optimizer."""
    return stepped_model(TINY, world, assigned(OPTIMIZER, TINY, pc), pc=pc, **options)


def loss_of(model: ParallelModel, train: bool = False) -> Tensor:
    """Return the mean loss of a fixed batch. With `train`, also accumulate gradients."""
    model.zero_gradients()
    model.wait_for_weights()
    tokens, labels = tokens_of(4, 8, 60)
    (figures,) = figures_of(model, {"tokens": tokens, "labels": labels}, train=train)
    return figures["loss"]


def batches(optimizer: DistributedOptimizer) -> list[MaterializedStack]:
    return [b for b in optimizer.stacks if isinstance(b, MaterializedStack)]


def test_the_models_weight_has_the_mapped_singular_values(world):
    pc = PCConfig(blocks=["v", "o", "gate", "up", "down"], level=4)
    model, optimizer = built(world, pc)
    for _ in range(3):
        loss_of(model, train=True)
        optimizer.clip(1.0)
        optimizer.step(1.0, torch.tensor(True))
    model.wait_for_weights()
    seen = 0
    for batch in batches(optimizer):
        for i, unit in enumerate(batch.units):
            values = torch.linalg.svdvals(batch.weight[i])
            mapped = batch.gamma[i] * values[0] * evaluate(values / values[0], 4)
            effective = unit.view(model.parameters[unit.parameter]).reshape(unit.shape)
            # The tracked norm is known to about 1e-4; g' is at most 3.6.
            found = torch.linalg.svdvals(effective)
            expected = mapped.sort(descending=True)[0]
            torch.testing.assert_close(found, expected, rtol=3e-3, atol=1e-6)
            assert batch.gamma[i] != 1
            seen += 1
    assert seen == 2 * (2 + 1 + 3)


def test_under_bfloat16_no_master_stays_beside_the_owners_weights(world):
    """The run equals a run with master weights bit for bit, and stores only W, gamma, u, v and
    optimizer state."""
    runs = {}
    for apart in (False, True):
        model, optimizer = built(world, PCConfig(level=4), dtype=torch.bfloat16, apart=apart)
        for _ in range(3):
            loss_of(model, train=True)  # unclipped, as the norm sums over buckets, which differ
            optimizer.step(1.0, torch.tensor(True))
        runs[apart] = memory(model, optimizer), optimizer.memory_bytes()
    torch.testing.assert_close(runs[True][0], runs[False][0], rtol=0, atol=0)
    plain, without = built(world, None, dtype=torch.bfloat16)
    spare = sum(d.bucket_layout.padding for m in (model, plain) for d in m.domains) * 12
    kept = sum(t.nbytes for b in batches(optimizer) for t in (b.u, b.v, b.gamma))
    kept += sum(b.gamma.nbytes for b in batches(optimizer))  # its gradient
    kept += sum(t.nbytes for b in batches(optimizer) for t in b.gamma_state.values())
    assert abs(runs[True][1] - without.memory_bytes() - kept) <= spare
    covered = sum(b.weight.numel() for b in batches(optimizer))
    assert abs(runs[False][1] - runs[True][1] - 4 * covered) <= spare


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_gammas_gradient_is_summed_over_tensor_ranks_where_its_layers_is(sequence_parallel):
    """For a split layer, every rank has the whole gradient. For a replicated layer, a rank's
    gradient covers only the rank's tokens."""
    pc = PCConfig(level=4, evaluator="in_graph", blocks=["q_a", "v_b", "o"])
    units = with_gammas(all_units(tiny_model("deepseek"), tensor_size=2), pc)
    summed = {u.name: u.summed_over_tensor(sequence_parallel) for u in units}
    gammas = [unit for unit in units if unit.role == "gamma"]
    assert {summed[gamma.name] for gamma in gammas} == {False, sequence_parallel}
    for gamma in gammas:
        assert summed[gamma.name] == summed[gamma.name.removesuffix(GAMMA)], gamma.name
    # kv_b also contains k_b, which has no gammas.
    values = [gamma.index for gamma in gammas if gamma.name.startswith("layers.0.v_b")]
    assert values == [(slice(i, i + 1),) for i in range(len(values))] and len(values) > 1


def test_the_last_override_that_names_a_unit_decides():
    overrides = {
        "late": PCOverride(layers=(1, 1), level=2),
        "down": PCOverride(roles=["down"], level=0),
    }
    pc = PCConfig(level=4, overrides=overrides, gamma_weight_decay=0.5)
    units = [unit for unit in all_units(TINY) if unit.role in ("o", "down")]
    levels = {unit.name.removeprefix("layers."): pc.preconditioner(unit).level for unit in units}
    assert levels == {"0.o": 4, "0.down": 0, "1.o": 2, "1.down": 0}
    assert (pc.gamma_decay(0.1), PCConfig(level=4).gamma_decay(0.1)) == (0.5, 0.1)


def test_a_step_that_is_not_taken_changes_nothing(world):
    for evaluator in ("materialized", "in_graph"):
        model, optimizer = built(world, PCConfig(level=4, evaluator=evaluator))
        loss_of(model, train=True)
        before = [t.clone() for t in memory(model, optimizer)]
        for flat in (f for part in model.domains for f in part.gradients):
            flat.fill_(torch.nan)
        optimizer.clip(1.0)
        optimizer.step(1.0, torch.tensor(False))
        after = memory(model, optimizer)
        torch.testing.assert_close(after, before, rtol=0, atol=0, equal_nan=True)


def memory(model: ParallelModel, optimizer: DistributedOptimizer) -> list[Tensor]:
    """Return all tensors that a step may change."""
    model.wait_for_weights()
    found = [p.detach() for p in model.parameters.values()]
    for batch in batches(optimizer):
        found += [batch.weight, batch.u, batch.v, batch.gamma, *batch.state.values()]
    for effective in model.in_graph:
        found += [each for i in range(len(effective.units)) for each in effective.pair(i)]
    return found
