"""The downstream tasks of the papers, as lm-eval names them, with the metrics that they report."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class TaskSet:
    """Tasks that a paper reports together.

    metrics   of each task, the accuracy first: what the paper's mean is over
    """

    metrics: Mapping[str, tuple[str, ...]]

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks."""
        return list(self.metrics)


TASK_SETS: Final = {
    "pc_paper": TaskSet(
        {
            "arc_easy": ("acc_norm",),
            "arc_challenge": ("acc_norm",),
            "hellaswag": ("acc_norm",),
            "openbookqa": ("acc_norm",),
            "lambada_openai": ("acc",),
            "winogrande": ("acc",),
            "piqa": ("acc",),
            "boolq": ("acc",),
            "commonsense_qa": ("acc",),
        }
    ),
    "sso_paper": TaskSet(
        {
            "lambada_openai": ("acc", "perplexity"),
            "commonsense_qa": ("acc",),
            "piqa": ("acc",),
            "hellaswag": ("acc",),
            "winogrande": ("acc",),
            "arc_easy": ("acc",),
            "arc_challenge": ("acc",),
            "boolq": ("acc",),
        }
    ),
}
"""By name: the PC paper's table 3 (section 4.2), and the SSO paper's tables of its dense and its
mixture model, which say plain accuracy and not how many examples were shown."""
