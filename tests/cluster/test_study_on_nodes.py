"""A study as a SLURM array: its tasks divide the runs, and the result is the same as in one
process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.network import until
from tests.cluster.test_slurm_on_nodes import RUN

pytestmark = pytest.mark.timeout(1200)


def test_the_tasks_of_an_array_share_a_study(cluster: Cluster, clone: Path) -> None:
    short = [word for word in RUN if not word.startswith(("train.steps", "checkpoint.", "log."))]
    variants = {
        "sso": {"config": "configs/tiny_sso.yaml"},
        "muon": {"config": "configs/tiny_muon.yaml", "against": "sso"},
    }
    overrides = [*short, "train.steps=8", "checkpoint.interval=0"]
    study = {"title": "array", "seeds": [1, 2], "overrides": overrides, "variants": variants}
    (clone / "array.yaml").write_text(yaml.safe_dump(study))
    options = ["--array=0-1", "--job-name=array", "--gpus-per-node=1", "--cpus-per-task=1"]
    number = cluster.submit(
        clone, "scripts/slurm/study.sbatch", "array.yaml", "runs/array", options=options
    )
    queue = ("squeue", "--noheader", f"--jobs={number}")
    until(lambda: not cluster.head.run(*queue).stdout.strip(), "end of the array", 600)
    printed = [(clone / f"array-{number}_{task}.out").read_text() for task in (0, 1)]
    trained = [sum(line.endswith(" s)") for line in text.splitlines()) for text in printed]
    assert sum(trained) == 4, printed  # each run once, by any task
    alone = [sys.executable, "scripts/study.py", "array.yaml", "runs/alone"]
    subprocess.run(alone, cwd=clone, check=True)
    found = [
        json.loads((clone / "runs" / f / "results.json").read_text()) for f in ("array", "alone")
    ]
    assert found[0] == found[1] and found[0]["complete"]
