"""What surrounds the model: configuration, data, schedule, loop and metrics."""
