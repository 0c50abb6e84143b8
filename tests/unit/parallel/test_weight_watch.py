"""Sums of weights between steps."""

from parallel.observe.weight_watch import WeightWatch
from tests.update_cases import built


def test_weights_of_a_checkpoint_are_taken_as_they_are(world) -> None:
    """Test it also after a change of the weights before loading."""
    model, update = built(world, "muon", "none", recorded=False)
    watch = WeightWatch(update.optimizer)
    watch.note()
    model.domains[0].buffers.parameters[0].add_(1)
    watch.compare()
    watch.forget()
    watch.check()
