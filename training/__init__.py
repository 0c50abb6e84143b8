"""What surrounds the model: configuration, data, loop, checkpoints, reports.

    run.py, loop.py  build a run from its config, and train
    config/     the run config             data/       the order of tokens
    checkpoint/ saving and resuming        monitor/    figures of weights, gradients, updates
    control/    what acts on a step        report/     metrics and trackers
    lifecycle/  stopping, signs of life, the run folder

No wing imports run.py or loop.py, and config/ imports no other wing. Start with run.py.
"""
