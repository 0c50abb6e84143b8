"""Write a preparation: tokenizer, token sets and manifest, in one atomic folder."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from scripts.data.documents import ReadOptions, read_documents
from scripts.data.encoding import Encoder, Workers
from scripts.data.folder import AtomicFolder, check_replaceable
from scripts.data.plan import TOKENIZER_BYTES, Portion, Preparation, SetPlan, is_validation
from scripts.data.set_writer import SetWriter, no_documents, token_dtype
from scripts.data.tokenizer import (
    TOKENIZER_FILE,
    PreparedTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from training.data.hashes import file_sha256
from training.data.manifest import MANIFEST_FILE, Manifest, SetEntry, TokenizerEntry
from training.errors import DataError


def prepare(
    preparation: Preparation, output: Path, *, fingerprint: str, workers: int, overwrite: bool
) -> Manifest:
    """Write the preparation to `output` and return its manifest.

    Raises:
        DataError: an input cannot be used, gives no documents, or is not as it was when its
            `fingerprint` was taken. `output` is as before.
        InputError: `output` must not be replaced, as `check_replaceable` says.
    """
    with AtomicFolder(output, partial(check_replaceable, output, overwrite)) as folder:
        tokenizer = _prepare_tokenizer(preparation, folder.path)
        sets: dict[str, SetEntry] = {}
        with Workers(workers) as pool:
            for plan in preparation.sets:
                sets |= _prepare_set(plan, preparation.reading, tokenizer, folder.path, pool)
        manifest = Manifest(
            folder=output,
            tokenizer=TokenizerEntry(
                file=TOKENIZER_FILE,
                sha256=file_sha256(folder.path / TOKENIZER_FILE),
                vocab_size=tokenizer.vocab_size,
                eod_id=tokenizer.eod_id,
                byte_level=tokenizer.byte_level,
                eod_token=tokenizer.eod_token,
            ),
            sets=sets,
            fingerprint=fingerprint,
            files={each.name: each.stat().st_size for each in sorted(folder.path.iterdir())},
        )
        (folder.path / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        if preparation.fingerprint() != fingerprint:
            raise DataError("an input has changed while it was read; nothing was written")
        folder.commit()
    return manifest


def _prepare_tokenizer(preparation: Preparation, folder: Path) -> PreparedTokenizer:
    if preparation.tokenizer is not None:
        tokenizer = load_tokenizer(preparation.tokenizer, preparation.eod)
    else:
        assert preparation.vocabulary is not None
        with progress_of("tokenizer") as progress:
            texts = _tokenizer_texts(preparation, progress)
            tokenizer = train_tokenizer(texts, preparation.vocabulary)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
    return tokenizer


def progress_of(stage: str) -> Any:
    """Return a bar of a stage's bytes of text on stderr, in a file a line every half minute."""
    every = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(desc=stage, unit="B", unit_scale=True, mininterval=every)


def _tokenizer_texts(preparation: Preparation, progress: Any) -> Iterator[str]:
    """Yield the first training documents of every set, an equal share of `TOKENIZER_BYTES` each.

    Raises DataError for a set that has none.
    """
    share = TOKENIZER_BYTES // len(preparation.sets)
    for plan in preparation.sets:
        size = 0
        inputs = [each for portion in plan.train for each in portion.inputs]
        with closing(read_documents(inputs, preparation.reading)) as documents:
            for index, text in enumerate(documents):
                if is_validation(index, plan.fraction):
                    continue
                if size >= share:
                    break
                size += len(text)
                progress.update(len(text))
                yield text
        if not size:
            raise no_documents(f"{plan.name}.train", plan.train_source)


def _prepare_set(
    plan: SetPlan,
    reading: ReadOptions,
    tokenizer: PreparedTokenizer,
    folder: Path,
    workers: Workers,
) -> dict[str, SetEntry]:
    """Write a set; the manifest's entries of its training part and its validation part, if any."""
    encoder = Encoder(folder / TOKENIZER_FILE, tokenizer.eod_id, token_dtype(tokenizer.vocab_size))
    train, validation = f"{plan.name}.train", f"{plan.name}.validation"
    sources = {train: plan.train_source}
    if plan.fraction or plan.validation:
        sources[validation] = plan.validation_source or plan.train_source
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(closing(SetWriter(folder, name, encoder.dtype, source)))
            for name, source in sources.items()
        }
        progress = stack.enter_context(progress_of(plan.name))
        index = 0
        for portion in plan.train:
            for tokens, size in _encoded(portion, reading, encoder, workers, progress):
                name = validation if is_validation(index, plan.fraction) else train
                writers[name].add(tokens, size)
                index += 1
        for tokens, size in _encoded(Portion(plan.validation), reading, encoder, workers, progress):
            writers[validation].add(tokens, size)
        return {name: writer.finish() for name, writer in writers.items()}


def _encoded(
    portion: Portion, reading: ReadOptions, encoder: Encoder, workers: Workers, progress: Any
) -> Iterator[tuple[NDArray[np.integer], int]]:
    """Yield the tokens and the size in bytes of the portion's documents, whole ones, up to its
    number of tokens."""
    written = 0
    with closing(read_documents(portion.inputs, reading)) as documents:
        chunks = workers.encode(documents, encoder)
        with closing(chunks):
            for chunk in chunks:
                for tokens, size in chunk.documents():
                    if portion.tokens is not None and written >= portion.tokens:
                        return
                    written += len(tokens)
                    yield tokens, size
                    progress.set_postfix_str(f"{written:,} tokens", refresh=False)
                    progress.update(size)
    if portion.tokens is not None and written < portion.tokens:
        print(
            f"{', '.join(map(str, portion.inputs))}: {written:,} tokens instead of "
            f"{portion.tokens:,}: there are no more",
            file=sys.stderr,
        )
