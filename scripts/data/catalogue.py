"""The corpora that recipes are trained on: where each is, in which tokens, and how many of them."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Final

import yaml

from scripts.data.documents import find_inputs
from scripts.data.plan import Portion, SetPlan

FILE: Final = Path(__file__).with_name("corpora.yaml")


@dataclass(frozen=True)
class Part:
    """A source as `find_inputs` takes it, and what it gives in relation to the other parts."""

    source: str
    share: float


@dataclass(frozen=True)
class Corpus:
    """A corpus of one set.

    about        whose corpus it is, and what of it is ours
    tokenizer    name on the Hugging Face hub
    tokens       to write, validation included
    validation   share of the documents that is held out
    parts        its sources by name
    """

    name: str
    about: str
    tokenizer: str
    tokens: int
    validation: Fraction
    parts: dict[str, Part]

    def set_plan(self, tokens: int | None = None, local: Path | None = None) -> SetPlan:
        """Return the plan of the corpus's set.

        Args:
            tokens: to write instead of `self.tokens`.
            local: a file or folder to read instead of the hub: for each part the subfolder of its
                name, or the whole of it where there is none.

        Raises DataError if `local` has nothing to read.
        """
        total = self.tokens if tokens is None else tokens
        shares = sum(part.share for part in self.parts.values())
        sources = {
            name: part.source if local is None else _local(local, name)
            for name, part in self.parts.items()
        }
        return SetPlan(
            name=self.name,
            train=[
                Portion(find_inputs(sources[name]), max(1, round(total * part.share / shares)))
                for name, part in self.parts.items()
            ],
            train_source=list(sources.values()),
            fraction=self.validation,
        )


def _local(folder: Path, part: str) -> str:
    return str(folder / part if (folder / part).is_dir() else folder)


@cache
def read_corpora() -> dict[str, Corpus]:
    """Return the corpora of corpora.yaml by name."""
    return {
        name: Corpus(
            name=name,
            about=entry["about"],
            tokenizer=entry["tokenizer"],
            tokens=int(entry["tokens"]),
            validation=Fraction(entry["validation"]),
            parts={part: Part(**values) for part, values in entry["parts"].items()},
        )
        for name, entry in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()
    }
