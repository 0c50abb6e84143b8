"""Launches of a step on a stack: their number is what a GPU waits for on small matrices."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spectral.rules import RULES, Stack, Step, take_step
from training.rehearsal.operations import kind_of


class Launches(TorchDispatchMode):
    """Counts the operations that a device would launch."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not kind_of(function).silent
        return function(*args, **(kwargs or {}))


def launches(name, shape, **options):
    """Launches of a step on the meta device, which takes a stack in one slice as a GPU does."""
    rule = RULES[name](**options)
    weight, grad = torch.empty(2, *shape, device="meta").unbind()
    state = {key: x.to("meta") for key, x in rule.init_state(torch.randn(shape)).items()}
    active = torch.ones((), dtype=torch.bool, device="meta")
    take_step(rule, weight, grad, state, lr=0.01, active=active)
    with Launches() as counter:
        take_step(rule, weight, grad, state, lr=0.01, active=active)
    return counter.count


SHAPES = {"heads": (3, 128, 256), "square": (1, 600, 600)}
CEILINGS = {
    ("muon_sphere", "heads"): 234,
    ("muon_sphere", "square"): 218,
    ("spectral_sphere", "heads"): 397,
    ("spectral_sphere", "square"): 399,
}
"""Launches of a stack's step in float32, a twentieth more than counted; products of 8 steps of
msign, one after the other, are 24 to 40 of them."""


@pytest.mark.parametrize(("name", "shape"), CEILINGS)
def test_a_step_stays_below_its_ceiling(name, shape):
    options = {"early_exit": False} if name == "spectral_sphere" else {}
    assert launches(name, SHAPES[shape], **options) <= CEILINGS[name, shape]


@pytest.mark.parametrize("name", ["muon_sphere", "spectral_sphere"])
def test_more_units_take_no_more_launches(name):
    options = {"early_exit": False} if name == "spectral_sphere" else {}
    few, many = (launches(name, (batch, 64, 96), **options) for batch in (2, 9))
    assert few == many


def test_no_operation_makes_a_tensor_of_a_constant():
    """`torch.where` with a number launches a fill for it."""
    rule = RULES["spectral_sphere"](early_exit=False)
    weight = torch.randn(2, 40, 48)
    state = rule.init_state(weight)
    names = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    stack = Stack(weight, torch.randn(2, 40, 48), state, Step(0.1))
    rule.update([stack])
    with Names():
        rule.solve([stack._replace(grad=torch.randn(2, 40, 48))])
    assert "scalar_tensor" not in names


JOINED = 53
"""Launches that a stack adds to the solve of others with its shorter side, a twentieth more than
counted: passes over its matrices, and products, 25 of them those of its msign."""


def solver_launches(*shapes):
    """Launches of one joined solve, once what is copied to a device once is there."""
    rule = RULES["spectral_sphere"](early_exit=False, msign_dtype="float16")
    for _ in range(2):
        momenta = [torch.empty(shape, device="meta") for shape in shapes]
        states = [{"u": x[:, :, 0].clone(), "v": x[:, 0].clone()} for x in momenta]
        stacks = [Stack(m, m, state, Step(0.1)) for m, state in zip(momenta, states, strict=True)]
        with Launches() as counter:
            rule.solve(stacks)
    return counter.count


def test_a_joined_stack_adds_only_what_has_its_columns():
    one = solver_launches((2, 600, 600))
    two = solver_launches((2, 600, 600), (3, 600, 800))
    three = solver_launches((2, 600, 600), (3, 600, 800), (1, 900, 600))
    assert two - one <= JOINED + 8 and three - two <= JOINED  # 8 that join
    assert one > 3 * JOINED
