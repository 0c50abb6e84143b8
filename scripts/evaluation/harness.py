"""Run lm-eval in a separate environment, on built-in tasks and on task files."""

import json
import math
import os
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scripts.huggingface.model_folder import read_settings
from training.data.tasks import read_examples
from training.errors import InputError
from training.json_file import read_json
from training.report.text import markdown_table

TaskSet = Mapping[str, tuple[str, ...]]
"""Tasks that a paper reports together, with the metrics for each task. The paper's mean is taken
over each task's first metric, which is an accuracy."""

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
"""Task sets by name. pc_paper contains the tasks in table 3 (section 4.2) of the PC paper.
sso_paper combines the SSO paper's tables for the dense model and the mixture of experts, which
report unnormalized accuracy and do not state the number of few-shot examples."""


TASK: Final = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: context
doc_to_choice: choices
doc_to_target: answer
metric_list:
  - {{metric: acc}}
  - {{metric: acc_norm}}
metadata: {{version: 1.0}}
"""
"""lm-eval config for a task file."""

ENVIRONMENT = "python3.11 -m venv .venv-eval"
INSTALL = f"{ENVIRONMENT} && .venv-eval/bin/pip install -r requirements/other/eval.txt"

SHORT: Final = {
    "-M": "--model", "-a": "--model_args", "-t": "--tasks", "-o": "--output_path",
    "-b": "--batch_size", "-f": "--num_fewshot", "-L": "--limit",
}  # fmt: skip
"""Short forms of lm-eval's options."""
MERGED: Final = ("--model_args", "--gen_kwargs", "--metadata")
"""Options that lm-eval merges if given repeatedly. For all other options, the last value wins."""

STANDARD_ERROR = "_standard_error"
"""Suffix of metrics that are the standard error of a local task's metric.

lm-eval does not compute standard errors for the metrics of local tasks.
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """An evaluation: the model folder, lm-eval task names, and settings.

    options   additional lm-eval options to append to the command; validated by `check_options`
    """

    model: Path
    tasks: Sequence[str]
    python: Path
    output: Path
    task_folder: Path | None = None
    dtype: str = "float32"
    options: Sequence[str] = ()

    def command(self) -> list[str]:
        """Return the lm-eval command line.

        Raises InputError for options that lm-eval would silently override, and for a model path
        with a comma, because lm-eval splits the argument at commas.
        """
        if "," in str(self.model):
            raise InputError(
                f"the path of a model to evaluate must not contain a comma, got {self.model}"
            )
        settings = [f"pretrained={self.model}", f"dtype={self.dtype}"]
        end = end_token(self.model)
        if end is not None:  # the token that precedes each document during training
            settings.append(f"prefix_token_id={end}")
        # -P: do not import an lm_eval module from the working directory.
        command = [str(self.python), "-P", "-m", "lm_eval", "run", "--model", "hf"]
        command += ["--model_args", ",".join(settings), "--tasks", ",".join(self.tasks)]
        command += ["--output_path", str(self.output)]
        if self.task_folder is not None:
            command += ["--include_path", str(self.task_folder)]
        names = check_options(self.options, command, settings)
        command += [] if "--batch_size" in names else ["--batch_size", "8"]
        return [*command, *self.options]


def check_options(options: Sequence[str], own: Sequence[str], settings: Sequence[str]) -> list[str]:
    """Return the names of the lm-eval `options` passed by the user.

    `own` is the command without these options, and `settings` are its --model_args as KEY=VALUE
    strings. Raises InputError if an option is given twice, or if the command already sets an option
    or a --model_args key. lm-eval would silently override these values.
    """
    names: list[str] = []
    fixed = {setting.partition("=")[0] for setting in settings}
    for text in options:
        if re.match("--?[A-Za-z]", text):
            name = text.partition("=")[0] if text.startswith("--") else text[:2]
            name = SHORT.get(name, name)
            if name not in MERGED and (name in own or name in names):
                by = "evaluate.py" if name in own else "an earlier option"
                raise InputError(f"lm-eval's {name} is already set by {by}; remove {text}")
            names.append(name)
        if names[-1:] == ["--model_args"]:
            for key in fixed.intersection(re.findall(r"(\w+)=", text)):
                raise InputError(f"--model_args must not set {key}, which is set by evaluate.py")
    return names


def end_token(folder: Path) -> int | None:
    """Return `eos_token_id` from a model's config.json. Raises InputError if the value is neither
    an integer nor null."""
    end = read_settings(folder).get("eos_token_id")
    if end is not None and type(end) is not int:
        raise InputError(
            f"{folder / 'config.json'}: eos_token_id must be an integer or null, got {end!r:.60}"
        )
    return end


def evaluate(run: Run, *, offline: bool) -> dict[str, Any]:
    """Run lm-eval and return its JSON output, with per-task `results`, `versions` and `config`.

    Raises InputError if lm-eval is not installed or writes no results, or if another evaluation
    writes to the same folder.
    """
    if not run.python.exists():
        raise InputError(
            f"{run.python} does not exist; create the lm-eval environment with\n    {INSTALL}"
        )
    environment = dict(os.environ)
    if offline:
        environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    before = {*run.output.rglob("results_*.json")}
    done = subprocess.run(run.command(), env=environment)
    files = sorted({*run.output.rglob("results_*.json")} - before)
    if done.returncode or not files:
        raise InputError(
            f"lm-eval exited with code {done.returncode} and wrote no results; see its output above"
        )
    if len(files) > 1:
        raise InputError(
            f"another evaluation wrote to {run.output} at the same time: found {files[0].name} and "
            f"{files[-1].name}; use a separate --output for each evaluation"
        )
    results: dict[str, Any] = read_json(files[0])
    return results


def named_files(names: Sequence[str]) -> dict[str, str]:
    """Return the .jsonl files in `names`, by task name.

    Raises InputError if two files have the same name, or DataError if a file is not a task file.
    """
    files: dict[str, str] = {}
    for name in (name for name in names if name.endswith(".jsonl")):
        task = f"file_{Path(name).stem}"
        if task in files:
            raise InputError(f"task files must have different names, got {Path(name).name} twice")
        read_examples(Path(name))
        files[task] = name
    return files


def write_file_tasks(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write an lm-eval config for each task file to `folder` and return the task names."""
    for name, file in files.items():
        path = json.dumps(str(Path(file).resolve()))
        text = TASK.format(name=json.dumps(name), file=path)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return list(files)


@dataclass(frozen=True)
class Row:
    """A row of the table."""

    task: str
    metric: str
    value: float
    error: float | None


def rows(results: Mapping[str, Mapping[str, Any]], sets: Iterable[TaskSet] = ()) -> list[Row]:
    """Return a row for each metric of each task.

    If a task is in one of the `sets`, only the metrics in that set are included. lm-eval names a
    metric `METRIC,FILTER`; the filter `none` is not shown.
    """
    lines = []
    for task, values in results.items():
        present = {
            key.removesuffix(",none"): key
            for key in values
            if "," in key and not key.partition(",")[0].endswith(("_stderr", STANDARD_ERROR))
        }
        metrics = dict.fromkeys(name for each in sets for name in each.get(task, ()))
        for metric in [name for name in metrics if name in present] or present:
            name, comma, kind = present[metric].partition(",")
            errors = (
                values.get(f"{name}{end}{comma}{kind}") for end in (STANDARD_ERROR, "_stderr")
            )
            error = next((each for each in errors if each is not None), None)
            number = error if isinstance(error, float) and math.isfinite(error) else None
            lines.append(Row(task, metric, float(values[present[metric]]), number))
    return lines


def table(lines: Sequence[Row], sets: Mapping[str, TaskSet] | None = None) -> str:
    """Return a Markdown table, including the mean accuracy of each complete task set."""
    cells = []
    for row in lines:
        error = "" if row.error is None else f"{row.error:.4f}"
        cells.append((row.task, row.metric, f"{row.value:.4f}", error))
    by_name = {(row.task, row.metric): row for row in lines}
    for name, each in (sets or {}).items():
        mine = [by_name.get((task, metrics[0])) for task, metrics in each.items()]
        present = [row for row in mine if row is not None]
        if len(present) == len(mine):
            mean = sum(row.value for row in present) / len(present)
            errors = [row.error for row in present if row.error is not None]
            spread = sum(error**2 for error in errors) ** 0.5 / len(present)
            shown = f"{spread:.4f}" if len(errors) == len(present) else ""
            cells.append((f"mean of {name}", "accuracy", f"{mean:.4f}", shown))
    return markdown_table(("task", "metric", "value", "standard error"), cells)
