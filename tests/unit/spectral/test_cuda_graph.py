"""Steps of single-process optimizers under the constraints of a CUDA graph, without a GPU."""

from unittest.mock import MagicMock

import pytest
import torch

from spectral import Muon, SpectralOptimizer, SpectralSphere
from spectral.cuda_graph import WARM_UP, CapturedCall, CapturedStep
from spectral.parameter_state import MASTER
from tests.live_bytes import held_and_peak_bytes
from tests.step_trace import traced, without_eigensolvers
from tests.update_cases import OPTIMIZERS, library_optimizer


def parameters(optimizer: SpectralOptimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_are_the_same_operations_on_the_same_memory_and_leave_nothing(kind):
    optimizer = library_optimizer(kind)
    step = CapturedStep(optimizer)
    with without_eigensolvers():
        step()

    def places() -> list[int]:
        states = [t for p in parameters(optimizer) for t in optimizer.state[p].values()]
        kept = [*parameters(optimizer), *states, optimizer.skipped_steps]
        return [t.data_ptr() for t in kept]

    first, reference = places(), None
    for finite in (True, False, True):
        for parameter in parameters(optimizer):
            parameter.grad.normal_()
        if not finite:
            parameters(optimizer)[0].grad[0, 0] = torch.nan
        operations = traced(step)
        reference = reference or operations
        assert operations == reference
    assert places() == first
    assert optimizer.skipped_steps == 1
    # The reports of the first step existed before counting began.
    (held, _), *later = held_and_peak_bytes(step, 3)
    assert later[0] == later[1] and later[0][0] == held


def test_a_call_runs_until_it_is_captured_and_is_replayed_later(monkeypatch):
    """Each replay of the graph repeats what ran during its capture."""
    made: list[str] = []

    class Graph:
        def replay(self) -> None:
            made.append("replay")

        def reset(self) -> None:
            made.append("reset")

    for name in ("Stream", "stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    for name in ("current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: MagicMock())
    call = CapturedCall(lambda: made.append("run"), torch.device("cuda"))
    ran = [call() for _ in range(WARM_UP + 3)]
    assert ran == [True] * (WARM_UP + 1) + [False] * 2
    assert made == ["run"] * (WARM_UP + 1) + ["replay"] * 3
    call.release()
    assert call() and made[-2:] == ["reset", "run"]


def test_it_follows_the_learning_rate_and_is_the_step(kind=Muon):
    captured, plain = library_optimizer(kind), library_optimizer(kind)
    step = CapturedStep(captured)
    for turn in range(4):
        for optimizer in (captured, plain):
            torch.manual_seed(turn)
            for parameter in parameters(optimizer):
                parameter.grad.normal_()
            optimizer.param_groups[0]["lr"].fill_(0.01 / (1 + turn))
        step()
        plain.step()
    torch.testing.assert_close(parameters(captured), parameters(plain), rtol=0, atol=0)


CHANGES = {
    "gradients": lambda optimizer, p: setattr(p, "grad", torch.zeros_like(p)),
    "parameters": lambda optimizer, p: setattr(p, "data", p.detach().clone()),
    "lr": lambda optimizer, p: optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
    "weight_decay": lambda optimizer, p: optimizer.param_groups[0].update(weight_decay=0.2),
    "momentum": lambda optimizer, p: optimizer.param_groups[0].update(momentum=0.8),
}
"""Changes that a replayed graph would not see."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_graph_would_not_see_is_an_error(name):
    optimizer = library_optimizer(Muon)
    step = CapturedStep(optimizer)
    step()
    optimizer.state[parameters(optimizer)[0]]["of another program"] = torch.ones(1)
    step()
    CHANGES[name](optimizer, parameters(optimizer)[0])
    with pytest.raises(RuntimeError, match=f"^{name} of group 0 must not be replaced after"):
        step()
    step.release()
    step()


def test_a_group_that_is_removed_or_added_is_an_error():
    optimizer = library_optimizer(Muon)
    step = CapturedStep(optimizer)
    step()
    last = optimizer.param_groups.pop()
    with pytest.raises(RuntimeError, match="parameters of group 1 must not be replaced after"):
        step()
    step.release()
    step()
    optimizer.param_groups.append(last)
    with pytest.raises(RuntimeError, match="parameters of group 1 must not be replaced after"):
        step()


def cast_(optimizer: SpectralOptimizer) -> None:
    """Cast parameters and gradients to bfloat16 and remove the state entries."""
    for parameter in parameters(optimizer):
        gradient, parameter.grad = parameter.grad.bfloat16(), None
        parameter.data = parameter.detach().bfloat16()
        parameter.grad = gradient
        optimizer.state[parameter].clear()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_entry_of_the_state_that_moves_is_an_error(kind):
    """Entries of the state move when a state is loaded. Master weights are entries, too."""
    optimizer = library_optimizer(kind)
    cast_(optimizer)
    step = CapturedStep(optimizer)
    step()
    for entries in map(optimizer.state.get, parameters(optimizer)):
        assert MASTER in entries
        for name, value in list(entries.items()):
            entries[name] = value.clone()
            with pytest.raises(RuntimeError, match="^states of group . must not be replaced after"):
                step()
            entries[name] = value
    step()


@pytest.mark.parametrize("released", [False, True])
@pytest.mark.parametrize("kind", [Muon, SpectralSphere])
def test_the_first_step_may_move_the_state(kind, released):
    """Before the first step, and after a release, parameters may be cast and state entries may be
    missing."""
    optimizer = library_optimizer(kind)
    step = CapturedStep(optimizer)
    if released:
        step()
        step.release()
    cast_(optimizer)
    step()
    step()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nonfinite": "raise"}, "nonfinite must be 'skip'"),
        ({"lr": 0.01}, "lr of group 0 must be a 0-d tensor on cpu"),
        ({"lr": torch.tensor(0.01, device="meta")}, "must be a 0-d tensor on cpu .*'meta'"),
        ({"early_exit": True}, "early_exit of group 0 must be False"),
    ],
)
def test_what_cannot_be_recorded_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        CapturedStep(library_optimizer(SpectralSphere, **fields))


def test_an_optimizer_of_torch_is_refused():
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="must be a SpectralOptimizer, got AdamW"):
        CapturedStep(other)
