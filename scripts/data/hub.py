"""Rows that `datasets` reads, and tokenizers of the Hugging Face hub. Only here is it imported."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.data.text import first_line, row_text
from training.errors import DataError


@dataclass(frozen=True)
class HubInput:
    """A dataset on the Hugging Face hub, or a local folder that `datasets` can load."""

    name: str
    config: str | None = None
    split: str = "train"
    text_key: str | None = None  # field that holds the text; None: that of the options

    @property
    def has_keys(self) -> bool:
        """Whether its documents are fields of rows, as all of them are."""
        return True

    def documents(self, text_key: str) -> Iterator[str]:
        """Yield the text of every row, as `row_documents`."""
        source = {"path": self.name, "name": self.config, "split": self.split}
        return row_documents(self, text_key, **source)

    def __str__(self) -> str:
        return f"hf:{self.name}:{self.config or ''}:{self.split}"


def row_documents(where: object, text_key: str, **source: Any) -> Iterator[str]:
    """Yield the text of every row of what `datasets.load_dataset` finds for `source`, streamed.

    Nothing is downloaded as a whole. `where` is what errors call it.

    Raises:
        DataError: it cannot be opened or read, or a row has no text under `text_key`.
    """
    for number, row in enumerate(_rows(where, source), start=1):
        yield row_text(row, f"{where}, row {number}", text_key)


def _rows(where: object, source: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    import datasets  # here: it takes seconds

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it would print is in its errors
    try:
        yield from datasets.load_dataset(**source, streaming=True)
    # datasets raises errors of many libraries here: its own, OSError, HTTP errors, ValueError
    except Exception as error:
        hint = " (is the name right, is there a network?)" if isinstance(where, HubInput) else ""
        raise DataError(f"cannot read {where}: {first_line(error)}{hint}") from None


def parse_hub_input(source: str) -> HubInput:
    """Parse `hf:NAME[:CONFIG][:SPLIT]`; `hf:NAME::SPLIT` leaves out the config.

    Raises:
        DataError: the name is missing or there are too many parts.
    """
    name, *rest = source.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise DataError(f"a dataset must be written hf:NAME[:CONFIG][:SPLIT], got {source}")
    config, split = [*rest, "", ""][:2]
    return HubInput(name, config or None, split or "train")


def hub_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer on the Hugging Face hub, downloaded if it is not there yet.

    Raises:
        DataError: it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        files = ["tokenizer*.json", "special_tokens_map.json", "config.json"]
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # of many libraries, as above
        raise DataError(
            f"cannot download the tokenizer {name}: {first_line(error)} (give --tokenizer PATH, "
            "or, if its owner asks for it, log in with `hf auth login`)"
        ) from None
