"""Train recipes in bfloat16 and in float32 with several seeds, and compare what they reach.

    python scripts/bench/precision.py configs/tiny_sso.yaml "configs/tiny_sso.yaml pc.level=4" \
        --seeds 1 2 3 4 5 --output benchmarks/results/precision.json

A recipe is a file and overrides of it. Each run is recorded as soon as it ends, and a call with the
same output goes on with what is missing, seed by seed. The table has, per recipe, the mean
validation loss in nats of both precisions, and over the seeds the largest of the differences;
`below unigram` counts the runs all of whose validation sets are below their unigram entropy.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.bench.record import record, write_json
from scripts.command import command
from training.errors import InputError
from training.json_file import read_json
from training.report.table import markdown_table

PRECISIONS = ("bf16", "fp32")


@dataclass(frozen=True)
class Run:
    """One run: mean validation loss in nats, whether each set's is below its unigram entropy, and
    how many steps were skipped and updates refused."""

    recipe: str
    seed: int
    precision: str
    loss: float
    below_unigram: bool
    skipped: int
    refused: int


def train(recipe: str, seed: int, precision: str) -> Run:
    """Train a recipe to its end in a process of its own."""
    config, *overrides = shlex.split(recipe)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--config", config, *overrides, f"run.dir={folder}/run"]
        arguments += [f"seed={seed}", f"train.precision={precision}", "log.interval=1"]
        arguments += ["validation.interval=0", "monitors.interval=0", "checkpoint.interval=0"]
        done = subprocess.run(
            [sys.executable, "pretrain.py", *arguments],
            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise InputError(f"{recipe}, seed {seed}, {precision}: {done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    loss = next(each["val/loss"] for each in reversed(metrics) if "val/loss" in each)
    refused = sum(each.get("optim/refused", 0) for each in metrics)
    skipped = max(each.get("optim/skipped_steps", 0) for each in metrics)
    below = "NOT below" not in done.stdout and " is below its unigram" in done.stdout
    return Run(recipe, seed, precision, loss, below, int(skipped), int(refused))


def table(runs: Sequence[Run]) -> str:
    """Return a row per recipe."""
    rows = []
    for recipe in dict.fromkeys(run.recipe for run in runs):
        losses = {
            precision: {
                r.seed: r.loss for r in runs if (r.recipe, r.precision) == (recipe, precision)
            }
            for precision in PRECISIONS
        }
        both = sorted(losses["bf16"].keys() & losses["fp32"].keys())
        if not both:
            continue
        mine = [run for run in runs if run.recipe == recipe and run.seed in both]
        low, full = (sum(losses[p][seed] for seed in both) / len(both) for p in PRECISIONS)
        worst = max((losses["bf16"][s] - losses["fp32"][s] for s in both), key=abs)
        name = recipe.removeprefix("configs/").replace(".yaml", "")
        below = f"{sum(run.below_unigram for run in mine)} of {len(mine)}"
        lost = str(sum(run.skipped + run.refused for run in mine))
        rows.append(
            (name, str(len(both)), f"{low:.3f}", f"{full:.3f}", f"{worst:+.3f}", below, lost)
        )
    header = ("recipe", "seeds", "bf16", "fp32", "largest difference", "below unigram", "refused")
    return markdown_table(header, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="+", metavar="'CONFIG [key=value ...]'")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {options.jobs}")
    return options


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, then print the table."""
    options = parse(arguments)
    runs: list[Run] = []
    if options.output.exists():
        try:
            runs = [Run(**run) for run in read_json(options.output)["runs"]]
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(
                f"--output must name a file that this command wrote, got {options.output}"
            ) from error
    known = {(run.recipe, run.seed, run.precision) for run in runs}
    missing = [
        (recipe, seed, precision)
        for seed in options.seeds
        for recipe in options.recipes
        for precision in PRECISIONS
        if (recipe, seed, precision) not in known
    ]
    with ThreadPoolExecutor(options.jobs) as pool:
        started = [pool.submit(train, *each) for each in missing]
        try:
            for done in as_completed(started):
                print(done.result(), flush=True)
                runs = sorted([*runs, done.result()], key=attrgetter("seed", "recipe", "precision"))
                content = record(
                    "scripts/bench/precision.py", arguments, torch.device("cpu"),
                    {"runs": [asdict(run) for run in runs]},
                )  # fmt: skip
                write_json(options.output, content)
        finally:
            pool.shutdown(cancel_futures=True)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
