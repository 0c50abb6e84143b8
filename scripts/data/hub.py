"""Documents and tokenizers of the Hugging Face hub. The only file that imports `datasets`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts.data.text import checked_text, first_line
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
        """Yield the text of every row, streamed: nothing is downloaded as a whole.

        Raises:
            DataError: `datasets` is not installed, the dataset cannot be opened, or a row has no
                text under `text_key`.
        """
        for number, row in enumerate(self._rows(), start=1):
            where = f"{self}, row {number}"
            if text_key not in row:
                raise DataError(f"{where}: no key {text_key!r}, found {', '.join(row)}")
            yield checked_text(row[text_key], where, text_key)

    def _rows(self) -> Iterator[dict[str, object]]:
        try:
            import datasets
        except ModuleNotFoundError:
            raise DataError(f"{self} needs datasets: pip install datasets") from None
        try:
            yield from datasets.load_dataset(
                self.name, self.config, split=self.split, streaming=True
            )
        # datasets raises errors of many libraries here: its own, OSError, HTTP errors, ValueError
        except Exception as error:
            raise DataError(
                f"cannot read {self}: {first_line(error)} (is the name right, is there a network?)"
            ) from None

    def __str__(self) -> str:
        return f"hf:{self.name}:{self.config or ''}:{self.split}"


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
