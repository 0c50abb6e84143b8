"""In a run started by the script alone, no code uses CUDA before the run has set CUDA's environment
variables."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.run_configs import tiny_config

DRIVER = """
import json, os, runpy, sys, traceback
import torch

ASKS = ("is_available", "device_count", "init", "_lazy_init", "current_device",
        "get_device_name", "get_device_capability", "get_device_properties")

def recorded(name):
    real = getattr(torch.cuda, name)
    def call(*arguments, **options):
        at = traceback.extract_stack()[-2]
        calls.append([name, f"{at.filename}:{at.lineno}", os.environ.get(VARIABLE)])
        return real(*arguments, **options)
    return call

calls = []
VARIABLE, OUTPUT, *sys.argv = sys.argv[1:]
for name in ASKS:
    setattr(torch.cuda, name, recorded(name))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    open(OUTPUT, "w").write(json.dumps(calls))
"""
"""A program that runs a script and writes every CUDA query, with the value of an environment
variable at that time."""


def test_the_script_trains_and_sets_the_environment_before_it_asks_for_cuda(folder: str) -> None:
    tiny_config(folder, "adamw")
    variable, value = "PYTORCH_ALLOC_CONF", "expandable_segments:True"
    command = [sys.executable, "-c", DRIVER, variable, f"{folder}/calls.json"]
    keys = ["run.device=auto", "train.exit_step=1", "validation.samples=2"]
    variables = {key: each for key, each in os.environ.items() if key != variable}
    command += ["pretrain.py", "--config", f"{folder}/config.yaml", *keys]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "done: step 1 of 20" in done.stdout
    calls = json.loads(Path(folder, "calls.json").read_text())
    assert calls
    early = [call for call in calls if call[2] != value]
    assert not early, early
