"""A training run: its configuration, data, loop, checkpoints and reports.

    build.py, run.py   build or restore a run from its config, and run it
    loop.py, step.py   train step by step, and report, validate and save between steps
    config/      the run config               data/     token sets and the order of samples
    checkpoint/  saving and resuming          monitor/  metrics of weights, gradients and updates
    machine/     device, kernels, environment report/   metrics, the console and trackers
    lifecycle/   stop requests, heartbeat, pace, the run folder

No folder imports run.py or loop.py, and config/ imports no other folder. Start with run.py.
"""
