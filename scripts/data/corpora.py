"""The recipes' corpora: their sources, tokenizers and token counts."""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Final

import yaml
from pydantic import TypeAdapter

from scripts.data.plan import Portion, SetPlan
from scripts.data.sources import FileInput, find_inputs
from training.errors import DataError

FILE: Final = Path(__file__).with_name("corpora.yaml")


@dataclass(frozen=True)
class Part:
    """A dataset of a corpus, with the dataset's share of the tokens.

    source  `hf:NAME` of the dataset on the hub
    share   relative share of the tokens
    folder  folder of this part in a dataset snapshot; None: the folder with the part's name
    """

    source: str
    share: float
    folder: str | None = None


@dataclass(frozen=True)
class Corpus:
    """A corpus, which is written as a single set.

    about        the paper or project that uses the corpus, and how this version differs
    tokenizer    name of the tokenizer on the Hugging Face hub
    tokens       number of tokens to write, including validation
    validation   fraction of the documents to hold out for validation
    parts        datasets by name
    """

    name: str
    about: str
    tokenizer: str
    tokens: int
    validation: Fraction
    parts: dict[str, Part]

    def set_plan(self, tokens: int | None, local: Path | None) -> SetPlan:
        """Return the set plan for this corpus.

        Args:
            tokens: number of tokens to write, `self.tokens` by default.
            local: file or folder to read instead of the hub. A folder must contain a subfolder for
                each part: `Part.folder`, NAME or data/NAME. For a corpus with a single part,
                `local` may also be that part's only file, or the folder that contains the part's
                files.

        Raises DataError if `local` contains no readable files or has no folder for a part.
        """
        total = self.tokens if tokens is None else tokens
        shares = sum(part.share for part in self.parts.values())
        portions = []
        for name, part in self.parts.items():
            source = part.source if local is None else self._local(local, name)
            share = max(1, round(total * part.share / shares))
            portions.append(Portion(**vars(find_inputs(source)), source=[source], tokens=share))
        return SetPlan(self.name, portions, self.validation)

    def _local(self, root: Path, name: str) -> str:
        """Return the path to a part's files in a local copy of the corpus."""
        names = [self.parts[name].folder or name, f"data/{name}", name]
        folders = [root / each for each in dict.fromkeys(names)]
        for folder in folders:
            if folder.is_dir():
                return str(folder)
        if len(self.parts) == 1 and (root.is_file() or _holds_rows(root)):
            return str(root)
        raise DataError(
            f"--from {root} must contain a folder for the part {name} of corpus {self.name}; move "
            f"the files of {name} to one of {', '.join(map(str, folders))}"
        )


def _holds_rows(folder: Path) -> bool:
    """Return whether a folder contains JSON lines or Parquet files at its top level."""
    return folder.is_dir() and any(
        isinstance(each, FileInput) and each.has_keys and each.path.parent == folder
        for each in find_inputs(str(folder)).inputs
    )


@cache
def read_corpora() -> dict[str, Corpus]:
    """Return the corpora defined in corpora.yaml, by name."""
    written = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    named = {name: {"name": name, **entry} for name, entry in written.items()}
    return TypeAdapter(dict[str, Corpus]).validate_python(named)
