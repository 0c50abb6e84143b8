"""Print contexts, choices and answers as lm-eval's own tasks build them. Runs in the lm-eval
environment.

python tests/lm_eval_examples.py FOLDER reads the rows for each task from FOLDER/NAME.jsonl.
"""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import yaml
from lm_eval import tasks
from lm_eval.api.task import ConfigurableTask

FILES = {
    "arc": "arc/arc_easy.yaml",
    "boolq": "super_glue/boolq/default.yaml",
    "commonsense_qa": "commonsense_qa/default.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "openbookqa": "openbookqa/openbookqa.yaml",
    "piqa": "piqa/piqa.yaml",
    "sciq": "sciq/sciq.yaml",
}


def examples(name: str, rows: Path) -> list[Any]:
    """Return the context, the choices and the index of the answer for each row."""
    path = Path(tasks.__file__).parent / FILES[name]
    settings = yaml.safe_load(path.read_text().replace("!function utils.process_docs", "null"))
    settings |= {
        "dataset_path": "json", "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(rows)}},
        "test_split": "test", "validation_split": None, "training_split": None,
    }  # fmt: skip
    if name == "hellaswag":
        from lm_eval.tasks.hellaswag.utils import process_docs

        settings["process_docs"] = process_docs
    task = ConfigurableTask(config=settings)
    found = []
    for doc in task.test_docs():
        choices, answer = task.doc_to_choice(doc), task.doc_to_target(doc)
        index = choices.index(answer) if isinstance(answer, str) else answer
        found.append([task.fewshot_context(doc, 0), choices, index])
    return found


if __name__ == "__main__":
    datasets.disable_progress_bars()
    print(json.dumps({name: examples(name, Path(sys.argv[1]) / f"{name}.jsonl") for name in FILES}))
