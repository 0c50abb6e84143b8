"""Read datasets and tokenizers from the Hugging Face hub. No other module imports `datasets`."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from parallel.error_text import first_line
from training.errors import DataError
from training.json_file import UNFETCHED, is_pointer

Row = dict[str, object]


@dataclass(frozen=True)
class HubInput:
    """A dataset on the Hugging Face hub, or a local folder that `datasets` can load."""

    name: str
    config: str | None = None
    split: str = "train"
    text_key: str | None = None  # field that contains the text; None: ReadOptions.text_key
    revision: str | None = None  # commit on the hub; None: the latest
    file: tuple[int, int] | None = None  # (index, number of files); None: all files

    @property
    def has_keys(self) -> bool:
        """Whether documents are fields of rows (always true for datasets)."""
        return True

    @property
    def remote(self) -> bool:
        """Whether the dataset is on the hub."""
        return not Path(self.name).exists()

    @property
    def identity(self) -> str:
        """Dataset name, including the commit if known."""
        return str(self) if self.revision is None else f"{self} at {self.revision}"

    def files(self) -> list["HubInput"]:
        """Return one input per dataset file, in order, pinned to the latest commit.

        Raises DataError if the dataset cannot be opened.
        """
        revision = None
        if self.remote:
            from huggingface_hub import HfApi

            try:
                revision = HfApi().dataset_info(self.name).sha
            except Exception as error:  # exceptions from many libraries, as in `rows`
                raise DataError(f"cannot read hf:{self.name}: {first_line(error)}") from None
        pinned = replace(self, revision=revision)
        count = _stream(pinned).num_shards
        return [replace(pinned, file=(number, count)) for number in range(count)]

    def rows(self) -> Iterator[Row]:
        """Stream all rows without downloading whole files.

        `datasets` retries to open and read a file when the connection fails or the hub is
        overloaded. Raises DataError after the last attempt, or if the dataset cannot be opened.
        """
        stream = _stream(self)
        if self.file is not None:
            number, count = self.file
            stream = stream.shard(num_shards=count, index=number)
        try:
            yield from stream
        # `datasets` raises its own exceptions, OSError, ValueError and HTTP library exceptions
        except Exception as error:
            raise _unreadable(self, error) from None

    def __str__(self) -> str:
        part = "" if self.file is None else f", file {self.file[0] + 1} of {self.file[1]}"
        return f"hf:{self.name}:{self.config or ''}:{self.split}{part}"


def _stream(each: HubInput) -> Any:
    """Return a stream over a dataset's rows. Raises DataError if the dataset cannot be opened."""
    for path in Path(each.name).rglob("*"):  # empty for a dataset on the hub
        if is_pointer(path):
            raise DataError(f"cannot read {path}: it is {UNFETCHED}")
    try:
        return _opened(each.name, each.config, each.split, each.revision)
    except Exception as error:  # exceptions from many libraries, as above
        raise _unreadable(each, error) from None


def _unreadable(each: HubInput, error: Exception) -> DataError:
    return DataError(f"cannot read {each}: {first_line(error)}; check the name and the network")


@lru_cache(maxsize=16)
def _opened(name: str, config: str | None, split: str, revision: str | None) -> Any:
    import datasets  # deferred: slow import

    datasets.logging.set_verbosity(logging.CRITICAL)  # the exceptions contain the same messages
    return datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)


def parse_hub_input(source: str) -> HubInput:
    """Parse `hf:NAME[:CONFIG][:SPLIT]`. `hf:NAME::SPLIT` omits the config.

    Raises:
        DataError: the name is missing or there are too many parts.
    """
    name, *rest = source.removeprefix("hf:").split(":")
    if not name or len(rest) > 2:
        raise DataError(f"a dataset must be hf:NAME[:CONFIG][:SPLIT], got {source}")
    config, split = [*rest, "", ""][:2]
    return HubInput(name, config or None, split or "train")


def hub_tokenizer(name: str) -> Path:
    """Return the local folder of a tokenizer from the Hugging Face hub, downloading it if missing.

    Raises:
        DataError: the tokenizer cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    try:
        files = ["tokenizer*.json", "special_tokens_map.json", "config.json"]
        return Path(snapshot_download(name, allow_patterns=files))
    except Exception as error:  # exceptions from many libraries, as above
        raise DataError(
            f"cannot download the tokenizer {name}: {first_line(error)}; if it is gated, log in "
            "with `hf auth login`, or pass --tokenizer PATH"
        ) from None
