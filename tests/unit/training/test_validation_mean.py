"""The mean over validation sets: weighted as training is, where every set has its counterpart."""

import pytest

from training.evaluate import mean_over_sets

LOSSES = {"web": 4.0, "books": 5.0}


@pytest.mark.parametrize(
    ("mixture", "mean"),
    [
        ({"web": 3.0, "books": 1.0, "code": 9.0}, 4.25),
        ({"web": 3.0}, 4.5),
        ({}, 4.5),
    ],
    ids=["all named", "one named", "none named"],
)
def test_the_mean_over_sets_is_weighted_as_training_is(mixture, mean):
    assert mean_over_sets(LOSSES, mixture) == pytest.approx(mean, abs=1e-12)
