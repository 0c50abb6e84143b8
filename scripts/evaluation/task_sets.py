"""The downstream tasks of the papers, as lm-eval names them, with the metrics that they report."""

from collections.abc import Mapping
from typing import Final

TaskSet = Mapping[str, tuple[str, ...]]
"""Tasks that a paper reports together, each with its metrics, the accuracy first: what the paper's
mean is over."""

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
"""By name: the PC paper's table 3 (section 4.2), and the SSO paper's tables of its dense and its
mixture model, which say plain accuracy and not how many examples were shown."""
