"""A state is trusted as long as nobody but its rule writes it."""

import torch

from parallel.optimizer.state_watch import StateWatch
from spectral.rules import AdamWRule
from spectral.rules.base import Stack, State


def start() -> tuple[AdamWRule, torch.Tensor, State, StateWatch]:
    rule, weight = AdamWRule(), torch.ones(1, 8)
    state = rule.init_state(weight)
    return rule, weight, state, StateWatch(rule, state)


def step(rule: AdamWRule, weight: torch.Tensor, state: State, watch: StateWatch) -> bool:
    trusted = watch.check()
    stack = Stack(weight, torch.ones_like(weight), state, 0.1, trusted)
    rule.step_many([stack], weight_decay=0.1, active=torch.tensor(True))
    watch.note()
    return trusted


def test_steps_of_the_rule_keep_the_trust() -> None:
    rule, weight, state, watch = start()
    assert [step(rule, weight, state, watch) for _ in range(3)] == [True] * 3


def test_what_others_write_is_noticed_also_through_a_view() -> None:
    for write in (
        lambda state: state["momentum"].view(-1)[3].fill_(2.0),
        lambda state: state["step"].copy_(torch.ones(1)),
        lambda state: state.update(variance=torch.ones(1, 8)),
    ):
        rule, weight, state, watch = start()
        assert step(rule, weight, state, watch)
        write(state)
        # Nobody knows what was written, so it is not trusted later either.
        assert [step(rule, weight, state, watch) for _ in range(2)] == [False, False]


def test_a_sound_state_is_trusted_again_once_it_was_read() -> None:
    rule, weight, state, watch = start()
    state["momentum"].fill_(0.1)
    state["variance"].fill_(0.1)
    watch.inspect()
    assert step(rule, weight, state, watch)
    state["momentum"][0, 0] = torch.nan
    watch.inspect()
    before = weight.clone()
    assert not step(rule, weight, state, watch)
    assert torch.equal(weight, before)
