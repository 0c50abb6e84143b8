"""A training run: configuration, data, training loop, checkpoints and logging.

    build.py, run.py   build or restore a run from its config, and run it
    loop.py, step.py   train step by step, with logging, validation and saving between steps
    config/      run config                   data/     token sets and sample order
    checkpoint/  saving and resuming          monitor/  metrics of weights, gradients and updates
    machine/     device, kernels, environment report/   metrics, console and trackers
    lifecycle/   stop requests, heartbeat, pace, run folder

No folder imports run.py or loop.py, and config/ imports no other folder. Read run.py first.
"""
