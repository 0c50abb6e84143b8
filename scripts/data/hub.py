"""Rows and tokenizers of the Hugging Face hub. Only here is `datasets` imported."""

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Final

from parallel.error_text import first_line
from training.errors import DataError
from training.json_file import UNFETCHED, is_pointer

WAITS: Final = (2.0, 8.0, 32.0, 128.0)
"""Seconds before a file of the hub is read again after an error."""
Row = dict[str, object]


@dataclass(frozen=True)
class HubInput:
    """A dataset on the Hugging Face hub, or a local folder that `datasets` can load."""

    name: str
    config: str | None = None
    split: str = "train"
    text_key: str | None = None  # field that holds the text; None: that of the options
    revision: str | None = None  # commit of the hub; None: the newest
    file: tuple[int, int] | None = None  # (one, of how many) of its files, from 0; None: all

    @property
    def has_keys(self) -> bool:
        """Whether its documents are fields of rows, as all of them are."""
        return True

    @property
    def identity(self) -> str:
        """Its name, and the commit if that is known."""
        return str(self) if self.revision is None else f"{self} at {self.revision}"

    def files(self) -> list["HubInput"]:
        """Return its files, in order, at the commit that is the newest now.

        Raises DataError if it cannot be opened.
        """
        remote = not Path(self.name).exists()
        pinned = replace(self, revision=_newest(self.name) if remote else None)
        count = _stream(pinned).num_shards
        return [replace(pinned, file=(number, count)) for number in range(count)]

    def rows(self) -> Iterator[Row]:
        """Yield every row, streamed; nothing is downloaded as a whole.

        After a failed read of a file of the hub it waits, and reads again what follows the last
        row. Raises DataError if it cannot be opened or read.
        """
        waits = () if self.file is None or Path(self.name).exists() else WAITS
        done, left = 0, list(waits)
        while True:
            try:
                for row in islice(self._rows(), done, None):
                    yield row
                    done, left = done + 1, list(waits)
                return
            # datasets raises errors of many libraries: its own, OSError, HTTP errors, ValueError
            except Exception as error:
                if not left and isinstance(error, DataError):
                    raise
                if not left:
                    hint = "is the name right, is there a network?"
                    raise DataError(f"cannot read {self}: {first_line(error)} ({hint})") from None
                wait = left.pop(0)
                problem = first_line(error)
                print(f"{self}: {problem}; reads again in {wait:.0f} s", file=sys.stderr)
            time.sleep(wait)

    def _rows(self) -> Iterable[Row]:
        stream = _stream(self)
        if self.file is None:
            return stream
        number, count = self.file
        return stream.shard(num_shards=count, index=number)

    def __str__(self) -> str:
        part = "" if self.file is None else f", file {self.file[0] + 1} of {self.file[1]}"
        return f"hf:{self.name}:{self.config or ''}:{self.split}{part}"


def _stream(each: HubInput) -> Any:
    """Return the rows of a whole dataset. Raises DataError if it cannot be opened."""
    for path in Path(each.name).rglob("*"):  # nothing of a dataset of the hub
        if is_pointer(path):
            raise DataError(f"cannot read {path}: it is {UNFETCHED}")
    try:
        return _opened(each.name, each.config, each.split, each.revision)
    except Exception as error:  # of many libraries, as above
        raise DataError(
            f"cannot read {each}: {first_line(error)} (is the name right, is there a network?)"
        ) from None


@lru_cache(maxsize=16)
def _opened(name: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets  # here: it takes seconds

    datasets.logging.set_verbosity(logging.CRITICAL)  # what it would print is in its errors
    return datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)


def _newest(name: str) -> str | None:
    """Return the newest commit of a dataset on the hub."""
    from huggingface_hub import HfApi

    try:
        commit: str | None = HfApi().dataset_info(name).sha
    except Exception as error:  # of many libraries, as above
        raise DataError(f"cannot read hf:{name}: {first_line(error)}") from None
    return commit


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
