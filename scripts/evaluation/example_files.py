"""Tasks in .jsonl files of examples: descriptions for lm-eval, and scores of a checkpoint."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

from training.data.tasks import read_examples
from training.errors import InputError

SUFFIX: Final = ".jsonl"
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
"""lm-eval's description of a task in a file."""

PRECISIONS: Final[Mapping[str | None, Literal["fp32", "bf16"] | None]] = {
    None: None,
    "float32": "fp32",
    "bfloat16": "bf16",
}


def named_files(names: Sequence[str]) -> dict[str, str]:
    """Return the .jsonl files in `names` by task name.

    Raises InputError if two files have the same name, DataError if a file is not a task file.
    """
    files: dict[str, str] = {}
    for name in (name for name in names if name.endswith(SUFFIX)):
        task = f"file_{Path(name).stem}"
        if task in files:
            raise InputError(f"task files must have different names, got {Path(name).name} twice")
        read_examples(Path(name))
        files[task] = name
    return files


def write_tasks(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Write lm-eval's description of each task to `folder`; return the tasks' names."""
    for name, file in files.items():
        path = json.dumps(str(Path(file).resolve()))
        text = TASK.format(name=json.dumps(name), file=path)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return list(files)


def score_checkpoint(
    source: Path, files: Mapping[str, str], dtype: str | None = None
) -> dict[str, dict[str, float]]:
    """Score a run's newest checkpoint, or a given checkpoint, with the trainer's forward pass.

    Runs in this process. Returns the metrics by task, as input of
    `scripts.evaluation.harness.rows`.

    `dtype` is float32, bfloat16, or None for the run's precision. Raises InputError for another
    dtype, or if the tokenizer differs from the run's; BrokenCheckpointError if the checkpoint is
    damaged.
    """
    if dtype not in PRECISIONS:
        raise InputError(f"--dtype must be float32 or bfloat16 for a run, got {dtype}")
    from models.engine import import_engine  # imported here because these imports take seconds

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
    from training.start_groups import start_groups
    from training.task_scores import score, tokens_of_a_pass

    info = read_checkpoint(source)
    raise_problems(info)
    config = info.config
    tokenizer = tokenizer_source(info)
    if tokenizer is not None and not config.data.mock:
        compare(info, tokenizer, tokenizer_file(tokenizer).read_bytes())
    config = replace(
        config,
        data=replace(config.data, tokenizer=None if tokenizer is None else str(tokenizer)),
        run=replace(config.run, device="auto"),
        model=replace(config.model, attention_backend="sdpa"),
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
        assert config.model.vocab_size is not None  # set in saved configs
        scores = score(
            model,
            layout,
            tasks,
            vocab_size=config.model.vocab_size,
            most_tokens=tokens_of_a_pass(config.train, config.model, layout),
        )
    finally:
        groups.shutdown()
    assert scores is not None  # never stopped early
    return {
        name: {f"{key},none": scores[f"task/{name}/{key}"] for key in ("acc", "acc_norm")}
        for name in files
    }
