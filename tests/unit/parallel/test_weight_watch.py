"""Sums of weights that are taken between steps."""

from parallel.observe.weight_watch import WeightWatch
from tests.update_cases import built


def test_weights_of_a_checkpoint_are_taken_as_they_are(world) -> None:
    """Also after others had changed, which the run has left."""
    model, update = built(world, "muon", "none", recorded=False)
    watch = WeightWatch(update.optimizer)
    watch.note()
    model.domains[0].buffers.parameters[0].add_(1)
    watch.compare()
    watch.forget()
    watch.check()
