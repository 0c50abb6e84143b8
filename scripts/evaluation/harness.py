"""Run lm-eval on sets of tasks in its own environment, and read its results."""

import math
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.huggingface.model_folder import read_settings
from training.errors import InputError
from training.json_file import read_json
from training.report.table import markdown_table

TaskSet = Mapping[str, tuple[str, ...]]
"""Tasks that a paper reports together, each with its metrics. The paper's mean is over each task's
first metric, an accuracy."""

TASK_SETS: Final[Mapping[str, TaskSet]] = {
    "pc_paper": {
        "arc_easy": ("acc_norm",),
        "arc_challenge": ("acc_norm",),
        "hellaswag": ("acc_norm",),
        "openbookqa": ("acc_norm",),
        "lambada_openai": ("acc",),
        "winogrande": ("acc",),
        "piqa": ("acc",),
        "boolq": ("acc",),
        "commonsense_qa": ("acc",),
    },
    "sso_paper": {
        "lambada_openai": ("acc", "perplexity"),
        "commonsense_qa": ("acc",),
        "piqa": ("acc",),
        "hellaswag": ("acc",),
        "winogrande": ("acc",),
        "arc_easy": ("acc",),
        "arc_challenge": ("acc",),
        "boolq": ("acc",),
    },
}
"""Sets by name. pc_paper is table 3 (section 4.2) of the PC paper. sso_paper combines the SSO
paper's tables of its dense model and of its mixture of experts, which report plain accuracy and do
not state the number of examples in the prompt."""


ENVIRONMENT = "python3.11 -m venv .venv-eval"
INSTALL = f"{ENVIRONMENT} && .venv-eval/bin/pip install -r requirements/other/eval.txt"

STANDARD_ERROR = "_standard_error"
"""Suffix of local metrics that are standard errors, which lm-eval does not compute."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One evaluation: the model folder, the tasks by lm-eval's names, and the settings.

    options   further options for lm-eval, placed at the end of the command
    """

    model: Path
    tasks: Sequence[str]
    python: Path
    output: Path
    task_folder: Path | None = None
    dtype: str = "float32"
    options: Sequence[str] = ()

    def command(self) -> list[str]:
        """Return the command line.

        Raises InputError for a path with a comma, as lm-eval splits its arguments at commas.
        """
        if "," in str(self.model):
            raise InputError(
                f"a model to evaluate must have no comma in its path, got {self.model}"
            )
        settings = [f"pretrained={self.model}", f"dtype={self.dtype}"]
        end = end_token(self.model)
        if end is not None:  # the token before each document in training
            settings.append(f"prefix_token_id={end}")
        # with -P a module of this name in the working directory is ignored
        command = [str(self.python), "-P", "-m", "lm_eval", "run", "--model", "hf"]
        command += ["--model_args", ",".join(settings), "--tasks", ",".join(self.tasks)]
        command += ["--output_path", str(self.output), "--batch_size", "8"]
        if self.task_folder is not None:
            command += ["--include_path", str(self.task_folder)]
        return [*command, *self.options]


def end_token(folder: Path) -> int | None:
    """Return `eos_token_id` of a model's config.json. Raises InputError unless it is an integer or
    null."""
    end = read_settings(folder).get("eos_token_id")
    if end is not None and type(end) is not int:
        raise InputError(
            f"{folder / 'config.json'}: eos_token_id must be an integer, got {end!r:.60}"
        )
    return end


def evaluate(run: Run, *, offline: bool) -> dict[str, Any]:
    """Run lm-eval and return its JSON: `results` by task, `versions`, `config`.

    Raises InputError if lm-eval is not installed, ends without results, or another evaluation wrote
    results to the same folder.
    """
    if not run.python.exists():
        raise InputError(f"no {run.python}: create lm-eval's environment with\n    {INSTALL}")
    environment = dict(os.environ)
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before = {*run.output.rglob("results_*.json")}
    done = subprocess.run(run.command(), env=environment)
    files = sorted({*run.output.rglob("results_*.json")} - before)
    if done.returncode or not files:
        raise InputError(
            f"lm-eval exited with code {done.returncode} and wrote no results: see its output"
        )
    if len(files) > 1:
        raise InputError(
            f"another evaluation wrote to {run.output} meanwhile: {files[0].name} and "
            f"{files[-1].name}; give each an --output"
        )
    results: dict[str, Any] = read_json(files[0])
    return results


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    task: str
    metric: str
    value: float
    error: float | None


def rows(results: Mapping[str, Mapping[str, Any]], sets: Iterable[TaskSet] = ()) -> list[Row]:
    """Return the rows of each task: the metrics that its set names, or all metrics if no set
    contains the task."""
    lines = []
    for task, values in results.items():
        there = [key.removesuffix(",none") for key in values if key.endswith(",none")]
        there = [name for name in there if not name.endswith(("_stderr", STANDARD_ERROR))]
        metrics = dict.fromkeys(name for each in sets for name in each.get(task, ()))
        for metric in [name for name in metrics if name in there] or there:
            error = values.get(
                f"{metric}{STANDARD_ERROR},none", values.get(f"{metric}_stderr,none")
            )
            number = error if isinstance(error, float) and math.isfinite(error) else None
            lines.append(Row(task, metric, float(values[f"{metric},none"]), number))
    return lines


def table(lines: Sequence[Row], sets: Mapping[str, TaskSet] | None = None) -> str:
    """Return the table in Markdown, with the mean accuracy of each set whose tasks are complete."""
    cells = []
    for row in lines:
        error = "" if row.error is None else f"{row.error:.4f}"
        cells.append((row.task, row.metric, f"{row.value:.4f}", error))
    by_name = {(row.task, row.metric): row for row in lines}
    for name, each in (sets or {}).items():
        mine = [by_name.get((task, metrics[0])) for task, metrics in each.items()]
        there = [row for row in mine if row is not None]
        if len(there) == len(mine):
            mean = sum(row.value for row in there) / len(there)
            spread = sum((row.error or 0.0) ** 2 for row in there) ** 0.5 / len(there)
            cells.append((f"mean of {name}", "accuracy", f"{mean:.4f}", f"{spread:.4f}"))
    return markdown_table(("task", "metric", "value", "standard error"), cells)
