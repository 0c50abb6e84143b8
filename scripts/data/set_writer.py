"""Write one token set as a Megatron .bin/.idx pair."""

from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from numpy.typing import NDArray

from training.data.hashes import file_sha256, write_block_hashes
from training.data.manifest import SetEntry
from training.errors import DataError


def token_dtype(vocab_size: int) -> str:
    """The integer type for token ids: uint16 below 65,500 tokens, as in Megatron, else int32."""
    return "uint16" if vocab_size < 65_500 else "int32"


def no_documents(name: str, source: list[str]) -> DataError:
    """Return the error of a set that would be empty."""
    return DataError(f"set {name} would be empty: {', '.join(source)} gives it no documents")


class SetWriter:
    """Writes documents to FOLDER/NAME.bin; `finish` writes the index."""

    def __init__(self, folder: Path, name: str, dtype: str, source: list[str]) -> None:
        self._prefix = str(folder / name)
        self._name = name
        self._dtype = dtype
        self._source = source
        self._builder = IndexedDatasetBuilder(self._prefix + ".bin", np.dtype(dtype).type)
        self._documents = self._tokens = self._bytes = 0
        self._max_token = -1

    def add(self, tokens: NDArray[np.integer], size: int) -> None:
        """Add a document with its tokens, EOD included, and its `size` in bytes."""
        self._builder.add_document(tokens, [len(tokens)])
        self._documents += 1
        self._tokens += len(tokens)
        self._bytes += size
        self._max_token = max(self._max_token, int(tokens.max()))

    def finish(self) -> SetEntry:
        """Write the index and return the manifest's entry of the pair.

        Raises:
            DataError: no document was added.
        """
        self._builder.finalize(self._prefix + ".idx")
        if not self._documents:
            raise no_documents(self._name, self._source)
        write_block_hashes(self._prefix)
        return SetEntry(
            documents=self._documents,
            tokens=self._tokens,
            bytes=self._bytes,
            max_token=self._max_token,
            dtype=self._dtype,
            sha256={
                suffix: file_sha256(f"{self._prefix}.{suffix}")
                for suffix in ("bin", "idx", "blocks")
            },
            source=self._source,
        )

    def close(self) -> None:
        """Close the file, finished or not."""
        self._builder.data_file.close()
