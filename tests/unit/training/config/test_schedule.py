"""The learning-rate factor, compared with torch's schedulers, and its properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from training.config.schedule import ScheduleConfig, learning_rate_factor


def torch_rates(kind: str, steps: int, ratio: float) -> list[float]:
    """Return the learning rates of torch's scheduler for `steps` + 1 steps, starting from a peak of
    1."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    if kind == "cosine":
        scheduler = CosineAnnealingLR(optimizer, T_max=steps, eta_min=ratio)
    else:
        scheduler = LinearLR(optimizer, start_factor=1.0, end_factor=ratio, total_iters=steps)
    rates = []
    for _ in range(steps + 1):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("ratio", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 1, 13])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_equals_torch_after_the_warm_up(kind, warmup, ratio) -> None:
    total = 120
    schedule = ScheduleConfig(kind=kind, warmup_steps=warmup, min_ratio=ratio)  # type: ignore[arg-type]
    ours = [learning_rate_factor(step, total, schedule) for step in range(warmup, total + 1)]
    # torch multiplies its rate from step to step, which rounds at each of 120 steps.
    theirs = torch_rates(kind, total - warmup, ratio)
    assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)


def test_wsd_is_constant_and_then_a_line() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_steps=2, min_ratio=0.2, cooldown_fraction=0.4)
    factors = [learning_rate_factor(step, 10, schedule) for step in range(12)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])


@given(
    kind=st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    total=st.integers(1, 400),
    warmup_share=st.floats(0, 0.5),
    ratio=st.floats(0, 1),
    cooldown=st.floats(0.01, 0.5),
)
def test_every_schedule_rises_to_one_and_then_falls(kind, total, warmup_share, ratio, cooldown):
    warmup = int(warmup_share * total)
    schedule = ScheduleConfig(
        kind=kind, warmup_steps=warmup, min_ratio=ratio, cooldown_fraction=cooldown
    )
    factors = [learning_rate_factor(step, total, schedule) for step in range(total + 3)]
    rise, fall = factors[: warmup + 1], factors[warmup:]
    assert rise == sorted(rise)
    # One rounding of a sum can lift a plateau by an ulp.
    assert all(after <= before + 1e-15 for before, after in zip(fall, fall[1:], strict=False))
    assert max(factors) == 1.0
    assert all(0 < factor <= 1 for factor in factors[:total]), "no step of the run is wasted"
    assert all(factor >= ratio - 1e-15 for factor in fall)
    if kind != "constant":
        assert factors[total:] == [pytest.approx(ratio)] * 3
