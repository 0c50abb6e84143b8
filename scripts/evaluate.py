#!/usr/bin/env python
"""Evaluate an exported model with lm-eval, or score a checkpoint on task files with the trainer.
See docs/huggingface.md.

scripts/evaluate.py exported/tiny --tasks local --run runs/tiny_sso
scripts/evaluate.py exported/llama1b --tasks pc_paper --dtype bfloat16 --device cuda
scripts/evaluate.py runs/tiny_sso/checkpoints/step_00000300 --tasks data/tasks/arc.jsonl
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

_ROOT = Path(__file__).resolve().parents[1]
_PYTHON = _ROOT / ".venv-eval" / "bin" / "python"
sys.path.insert(0, str(_ROOT))  # runs from any folder

from parallel.disk import free_name
from scripts.command import command, output_path, write_whole
from scripts.evaluation.harness import (
    TASK_SETS,
    Run,
    evaluate,
    named_files,
    rows,
    table,
    write_file_tasks,
)
from scripts.huggingface.model_folder import load_whole
from training.command_line import Parser, check_launched
from training.errors import InputError
from training.report.text import progress

MEASURED = ("results", "versions", "n-shot", "n-samples", "config", "transformers_version")
"""Keys of lm-eval's output to keep in results.json: the results and the facts that identify the
evaluation."""
PRECISIONS: Final[Mapping[str | None, Literal["fp32", "bf16"] | None]] = {
    None: None,
    "float32": "fp32",
    "bfloat16": "bf16",
}


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the evaluation, print the table and write the results."""
    options = parse(arguments)
    names = [name for text in options.tasks for name in text.split(",")]
    files = named_files(names)
    if not (options.model / "config.json").is_file():
        if len(files) < len(names):
            raise InputError(
                f"{options.model} must be an exported model with config.json; runs and checkpoints "
                "can only be scored on .jsonl tasks"
            )
        _evaluate_checkpoint(options, files)
        return 0
    if options.run is not None and "local" not in names:
        raise InputError(f"--run has no effect without --tasks local, got {options.run}")
    sets = {name: TASK_SETS[name] for name in names if name in TASK_SETS}
    named = [name for name in names if name not in {"local", *sets, *files.values()}]
    standard = list(dict.fromkeys([*named, *(task for each in sets.values() for task in each)]))
    output = options.output or options.model / "evaluation"
    with tempfile.TemporaryDirectory(prefix="spectrain-tasks-") as folder:
        local = _local_tasks(options, Path(folder)) if "local" in names else []
        local += write_file_tasks(Path(folder), files)
        run = Run(
            model=options.model,
            tasks=[*local, *standard],
            python=options.python,
            output=output / "lm_eval",
            task_folder=Path(folder) if local else None,
            dtype=options.dtype or "float32",
            options=options.options,
        )
        lm_eval = run.command()  # validates the options before the slow steps
        if run.python.exists():  # lm-eval would silently leave missing weights random
            with progress(lambda: "loading the exported model to check for missing weights"):
                load_whole(options.model, dtype="auto")
        results = evaluate(run, offline=not standard)
    text = table(rows(results["results"], sets.values()), sets)
    kept = {"model": str(options.model), "command": lm_eval}
    kept |= {key: results[key] for key in MEASURED if key in results}
    _write(output, kept, text)
    print(text + f"wrote {output / 'results.json'} and results.md")
    return 0


def _evaluate_checkpoint(options: argparse.Namespace, files: dict[str, str]) -> None:
    """Score a checkpoint, or the newest checkpoint of a run, and print the table."""
    run = () if options.run is None else ("--run", str(options.run))
    python = () if options.python == _PYTHON else ("--python", str(options.python))
    if given := " ".join((*run, *python, *options.options)):
        raise InputError(f"{given} requires an exported model, got the run {options.model}")
    with progress(lambda: "importing packages, loading the model, scoring the tasks"):
        checkpoint, results = score_checkpoint(options.model, files, options.dtype)
    text = table(rows(results))
    print(text, end="")
    if options.output is not None:
        kept = {"model": str(checkpoint), "tasks": files, "results": results}
        _write(options.output, kept, text)


def _write(folder: Path, content: Mapping[str, Any], text: str) -> None:
    """Write results.json and results.md. Earlier results, which may be of other tasks, are
    renamed."""
    texts = {"results.json": json.dumps(content, indent=2) + "\n", "results.md": text}
    for name, written in texts.items():
        if (path := folder / name).exists():
            earlier = path.rename(free_name(path))
            print(f"renamed the earlier {path} to {earlier.name}")
        write_whole(path, written)


def score_checkpoint(
    source: Path, files: Mapping[str, str], dtype: str | None = None
) -> tuple[Path, dict[str, dict[str, float]]]:
    """Score a checkpoint, or the newest checkpoint of a run, with the trainer's forward pass.

    Runs in this process. Returns the checkpoint's folder, and per-task metrics in the format
    expected by `rows`.

    `dtype` is float32, bfloat16, or None for the run's precision. Raises InputError for any other
    dtype, if there are several ranks, or if the tokenizer is not the one that the run used. Raises
    BrokenCheckpointError if the checkpoint is damaged.
    """
    check_launched()
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InputError(
            f"WORLD_SIZE must be 1 or unset, got {size}: the evaluation runs on a single rank"
        )
    if dtype not in PRECISIONS:
        raise InputError(f"--dtype must be float32 or bfloat16 for a run, got {dtype}")
    from models.engine import import_engine  # deferred: slow imports

    import_engine()
    from parallel.comm import groups
    from scripts.huggingface.export import raise_problems
    from scripts.huggingface.tokenizer_files import compare, tokenizer_source
    from training.build import build_parallel_model
    from training.checkpoint.checkpoints import read_checkpoint
    from training.checkpoint.initial_weights import initial_weights
    from training.config.data import TasksConfig
    from training.config.schema import ParallelConfig
    from training.data.build_data import build_tasks
    from training.data.token_bytes import tokenizer_file
    from training.evaluation import score
    from training.machine.start import start_groups

    info = read_checkpoint(source)
    print(f"step {info.step} of {info.path}")
    raise_problems(info)
    config = info.config
    tokenizer = tokenizer_source(info)
    if tokenizer is not None and not config.data.mock:
        compare(info, tokenizer, tokenizer_file(tokenizer).read_bytes())
    config = replace(
        config,
        data=replace(config.data, tokenizer=None if tokenizer is None else str(tokenizer)),
        run=replace(config.run, device="auto"),
        model=replace(config.model, attention_backend="sdpa", attention_kernel="auto"),
        pc=None,  # the weights are PC(W)
        parallel=ParallelConfig(),
        train=replace(
            config.train, fp8=None, precision=PRECISIONS[dtype] or config.train.precision
        ),
        checkpoint=replace(config.checkpoint, initialize_from=str(info.path)),
        tasks=TasksConfig(files=dict(files)),
    )
    layout = start_groups(config)
    try:
        tasks = build_tasks(config)
        for task in tasks:
            print(task)
        model = build_parallel_model(config, layout, initial_weights(config))
        scores = score(model, layout, tasks, config)
    finally:
        groups.shutdown()
    return info.path, {
        name: {f"{key},none": scores[f"task/{name}/{key}"] for key in ("acc", "acc_norm")}
        for name in files
    }


def _local_tasks(options: argparse.Namespace, folder: Path) -> list[str]:
    """Write the run's validation sets as tasks to `folder` and return the task names."""
    if options.run is None:
        raise InputError("--tasks local requires --run RUN_OR_CHECKPOINT with validation sets")
    from models.engine import import_engine  # deferred: slow import

    import_engine()
    from scripts.evaluation.local_text import write_tasks
    from training.checkpoint.checkpoints import read_checkpoint

    info = read_checkpoint(options.run)
    tokenizer = options.model / "tokenizer.json"
    if not tokenizer.is_file():
        raise InputError(f"{options.model} must contain tokenizer.json; export it with a tokenizer")
    return write_tasks(folder, info.config, tokenizer, info.meta["identity"].get("data", {}))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(
        description="Evaluate an exported model with lm-eval. Options not listed here, such as "
        "--device cuda, --batch_size 32 and --num_fewshot 5, are passed on to lm-eval."
    )
    parser.add_argument(
        "model",
        type=Path,
        metavar="OUT",
        help="exported model folder; for .jsonl tasks, a run or checkpoint folder is also allowed "
        "and is scored with the trainer's forward pass",
    )
    parser.add_argument(
        "--tasks",
        nargs="+",
        required=True,
        metavar="TASK",
        help="local (the validation sets of --run; works offline), pc_paper or sso_paper (the "
        "paper's downstream tasks), .jsonl files from scripts/prepare_task.py, or lm-eval task "
        "names",
    )
    parser.add_argument(
        "--run",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="run or checkpoint that provides the validation sets for --tasks local",
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=_PYTHON,
        help="Python interpreter of the lm-eval environment (default: .venv-eval/bin/python)",
    )
    parser.add_argument(
        "--output",
        type=output_path,
        help="output folder (default: evaluation/ in an exported model; for a run, no files are "
        "written)",
    )
    parser.add_argument(
        "--dtype", help="compute dtype (default: float32; for a run, the training precision)"
    )
    options, more = parser.parse_known_args(arguments)
    options.options = more
    return options


if __name__ == "__main__":
    sys.exit(main())
