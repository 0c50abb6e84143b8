"""A training run: its configuration, data, loop, checkpoints and reports.

    build.py, run.py, loop.py   build a run from its config, run it, and train step by step
    config/      the run config               data/     token sets and the order of samples
    checkpoint/  saving and resuming          monitor/  figures of weights, gradients and updates
    control/     which steps are taken, and when the Gram penalty is active
    lifecycle/   stop requests, heartbeat, pace, the run folder
    report/      metrics and trackers

No folder imports run.py or loop.py, and config/ imports no other folder. Start with run.py.
"""
