"""Write a preparation: a tokenizer, token sets and a manifest in one atomically written folder.

A killed preparation can be resumed. The work can be split up: `prepare_shard` encodes one shard of
the documents, and `prepare` joins the shards.
"""

import sys
from collections import Counter
from collections.abc import Collection, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from parallel.disk import delete, sync
from scripts.command import counted, warn
from scripts.data.document_files import read_documents
from scripts.data.encoding import EncodedChunk, Encoder, RoundTrip, encoded
from scripts.data.folder import AtomicFolder, check_replaceable
from scripts.data.hub import HubInput
from scripts.data.plan import (
    TOKENIZER_BYTES,
    Portion,
    Preparation,
    SetPlan,
    is_validation,
)
from scripts.data.repeats import Repeats
from scripts.data.resume_point import Progress, ProgressSaver, read_progress
from scripts.data.set_writer import DocumentFile, SetWriter, no_documents, token_dtype
from scripts.data.shards import (
    RECORDS_FILE,
    TOKENS_FILE,
    ShardEntry,
    Shards,
    hashes,
    read_entry,
    shard_key,
    shard_names,
)
from scripts.data.sources import WHOLE, Position, Shard, shards_folder
from scripts.data.text_tokenizer import (
    EOD_TOKEN,
    TOKENIZER_FILE,
    load_tokenizer,
    train_tokenizer,
)
from training.data.manifest import MANIFEST_FILE, Manifest, SetEntry, TokenizerEntry
from training.errors import DataError, InputError, ProgressError

MARGIN = 1.1
"""If a portion has a token limit, each shard encodes this multiple of its even share of the limit,
because token counts vary across shards. `prepare` encodes any tokens still missing."""


def prepare(
    preparation: Preparation, output: Path, *, identities: list[str], workers: int, overwrite: bool
) -> Manifest:
    """Write the preparation to `output` and return its manifest.

    Resumes an interrupted preparation. Joins finished shards and then deletes them.

    Raises:
        DataError: an input cannot be used, contains no documents, or does not match its entry in
            `identities`. `output` is left unchanged.
        InputError: `output` must not be replaced (see `check_replaceable`), or a shard is missing
            or belongs to another preparation.
    """
    fingerprint = preparation.fingerprint(identities)
    given, preparation = preparation, preparation.with_hub_files()
    identities = preparation.identities(cached=dict(zip(given.inputs(), identities, strict=True)))
    shards = None
    if shard_names(output):
        shards = Shards(preparation, output, identities)
        print(f"joining {counted(len(shards.folders), 'shard')} in {shards_folder(output)}")
    hub = [each.identity for each in preparation.inputs() if isinstance(each, HubInput)]
    key = " ".join([fingerprint, *hub])
    check = partial(check_replaceable, output, overwrite)
    with AtomicFolder(output, check, key) as folder:
        pipeline, tokenizer = _begin(preparation, folder, workers, shards=shards)
        manifest = Manifest(
            folder=output,
            sets=_write_sets(pipeline, identities),
            tokenizer=tokenizer,
            fingerprint=fingerprint,
            files={
                each.name: each.stat().st_size
                for each in sorted(folder.path.iterdir())
                if each.name != MANIFEST_FILE
            },
        )
        (folder.path / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        _check_unchanged(given.fingerprint(), fingerprint)
        folder.commit()
    if shards is not None:
        delete(shards_folder(output))
    return manifest


def prepare_shard(
    preparation: Preparation, output: Path, shard: Shard, *, workers: int, overwrite: bool
) -> ShardEntry:
    """Encode the documents of one shard and return the shard's entry.

    Raises:
        DataError: see `prepare`.
        InputError: the folder holds a shard of another preparation and `overwrite` is False.
    """
    preparation = preparation.with_hub_files()
    shard = preparation.shard(shard.number, shard.count)
    target = shard.folder(output)
    key = shard_key(preparation, shard, preparation.identities(shard))
    existing = read_entry(target)
    if existing is not None and existing.key == key:
        return existing
    check = partial(_check_free, target, overwrite)
    with AtomicFolder(target, check, key) as folder:
        pipeline, _ = _begin(preparation, folder, workers, shard=shard)
        _write_shard(pipeline)
        entry = ShardEntry(
            key=key,
            dtype=pipeline.encoder.dtype,
            parts=pipeline.progress.parts,
            left=pipeline.progress.left,
            decoded={name: asdict(each) for name, each in pipeline.progress.decoded.items()},
            sha256=hashes(folder.path),
        )
        entry.write(folder.path)
        _check_unchanged(shard_key(preparation, shard, preparation.identities(shard)), key)
        folder.commit()
    return entry


def _begin(
    preparation: Preparation,
    folder: AtomicFolder,
    workers: int,
    *,
    shard: Shard = WHOLE,
    shards: Shards | None = None,
) -> tuple["Pipeline", TokenizerEntry]:
    """Write the tokenizer. Return a pipeline that resumes from the saved progress, and the manifest
    entry of the tokenizer."""
    progress, saver = read_progress(folder.progress), ProgressSaver(folder)
    if folder.progress is not None:
        documents = sum(each.documents for each in progress.written.values())
        print(f"resuming {folder.path} after {counted(documents, 'document')}")
    elif shards is not None:
        progress.decoded = shards.decoded
    tokenizer = _prepare_tokenizer(
        preparation, folder.path, folder.path if shards is None else shards.folders[0]
    )
    if progress.tokenizer not in ("", tokenizer.sha256):
        path = folder.path / TOKENIZER_FILE
        raise ProgressError(f"{path} was changed after the preparation was interrupted")
    progress.tokenizer = tokenizer.sha256
    saver.save(progress)
    dtype = token_dtype(tokenizer.vocab_size)
    encoder = Encoder(folder.path / TOKENIZER_FILE, tokenizer.eod_id, dtype)
    assert tokenizer.eod_token is not None  # only manifests of earlier versions have no EOD token
    if tokenizer.eod_id in encoder.encode([tokenizer.eod_token]).tokens[:-1]:
        warn(
            f"the tokenizer encodes the text {tokenizer.eod_token!r} as the "
            "end-of-document token, also within a document"
        )
    pipeline = Pipeline(preparation, folder, progress, saver, encoder, workers, shard, shards)
    return pipeline, tokenizer


def _check_unchanged(now: str, before: str) -> None:
    if now != before:
        raise DataError(
            "an input changed during preparation, so nothing was written; run the command again"
        )


def _check_free(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise InputError(
            f"{target} was made from different inputs or options; pass --overwrite to replace it"
        )


def _prepare_tokenizer(preparation: Preparation, folder: Path, trained: Path) -> TokenizerEntry:
    """Write the tokenizer to `folder`, sync its files to disk, and return its manifest entry. If
    the tokenizer was already trained, copy it from `trained`."""
    source, eod = preparation.tokenizer, preparation.eod
    if source is None:
        source, eod = trained / TOKENIZER_FILE, EOD_TOKEN
        if not source.exists():
            source = folder / TOKENIZER_FILE
            assert preparation.vocabulary is not None
            with progress_of("tokenizer") as progress:
                texts = _tokenizer_texts(preparation, progress)
                source.write_bytes(train_tokenizer(texts, preparation.vocabulary))
    tokenizer = load_tokenizer(source, eod)
    for name, content in tokenizer.files.items():
        (folder / name).write_bytes(content)
        sync(folder / name)
    return tokenizer.entry


def progress_of(stage: str) -> Any:
    """Return a stage's progress bar, which counts bytes.

    If stderr is not a terminal, the bar is updated every 30 s.
    """
    every = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(desc=stage, unit="B", unit_scale=True, mininterval=every)


def _tokenizer_texts(preparation: Preparation, progress: Any) -> Iterator[str]:
    """Yield the first training documents of every set, up to an even share of `TOKENIZER_BYTES` per
    set.

    Raises DataError if a set has no training documents.
    """
    share = TOKENIZER_BYTES // len(preparation.sets)
    for plan in preparation.sets:
        size, index = 0, -1
        train = [portion for portion in plan.portions if not portion.held_out]
        inputs = [each for portion in train for each in portion.inputs]
        with closing(read_documents(inputs, preparation.reading)) as documents:
            for index, (_, text) in enumerate(documents):
                if is_validation(index, plan.fraction):
                    continue
                if size >= share:
                    print(f"tokenizer training uses the first {size:,} characters of {plan.name}")
                    break
                size += len(text)
                progress.update(len(text))
                yield text
        if not size:
            _check_fraction(plan, train=0, held_out=index + 1)
            name = plan.output(held_out=False)
            raise no_documents(name, plan.outputs()[name])


@dataclass(frozen=True)
class Pipeline:
    """Turns inputs into tokens: reads, encodes, checks and counts the documents of `shard`.

    preparation  the preparation
    folder       the folder to write
    progress     position and counts, saved by `saver`
    encoder      the encoder, run by threads
    workers      number of encoder threads
    shards       shards with documents that are already encoded; None: encode all documents
    blank        number of blank documents skipped in the current portion, by input
    """

    preparation: Preparation
    folder: AtomicFolder
    progress: Progress
    saver: ProgressSaver
    encoder: Encoder
    workers: int
    shard: Shard
    shards: Shards | None
    blank: Counter[str] = field(default_factory=Counter)

    def portions(self) -> Iterator[tuple[SetPlan, Portion, range]]:
        """Yield the remaining portions, each with the indices of its inputs. After each portion,
        print how many of its documents were skipped because they are blank."""
        for plan, portion, units in self.progress.portions(self.preparation):
            resumed = self.progress.position != Position(units.start)
            yield plan, portion, units
            if count := self.blank.total():
                example = self.blank.most_common(1)[0][0]
                warn(
                    f"token set {plan.name}: skipped {counted(count, 'blank document')}, "
                    f"most of {example}{', since the preparation was resumed' if resumed else ''}"
                )
            self.blank.clear()
        for name, decoded in self.progress.decoded.items():
            decoded.check(name, allowed=self.preparation.allow_lossy, final=True)
            if decoded.lost:
                warn(f"token set {name}: {decoded}")

    def documents(
        self, plan: SetPlan, units: range, files: Collection[DocumentFile]
    ) -> Generator[tuple[int, NDArray[np.integer], int], None, None]:
        """Yield (input number, tokens, bytes) for each remaining document of the inputs `units`.

        The caller must add the documents to `files`. Between chunks, `saver` periodically syncs
        `files` and then saves the progress. Raises DataError if the tokenizer changes the text of
        too many documents.
        """
        progress = self.progress
        decoded = progress.decoded.setdefault(plan.name, RoundTrip())
        chunks = self._chunks(units.stop, progress.position)
        with progress_of(plan.name) as bar, closing(chunks):
            for positions, chunk in chunks:
                decoded.count(chunk)
                decoded.check(plan.name, allowed=self.preparation.allow_lossy)
                for position, (tokens, size) in zip(positions, chunk.documents(), strict=True):
                    yield position.input, tokens, size
                progress.position = positions[-1]
                self.saver.save(progress, *files)
                bar.set_postfix_str(f"{progress.tokens:,} tokens", refresh=False)
                bar.update(sum(chunk.bytes))

    def _chunks(
        self, end: int, start: Position
    ) -> Generator[tuple[list[Position], EncodedChunk], None, None]:
        """Yield chunks of the documents from `start` to the end of input `end - 1`, with the
        position after each document."""
        if self.shards is None:
            yield from self._encoded(end, start)
            return
        for unit in range(start.input, end):
            done = start.document if unit == start.input else 0
            stored = yield from self.shards.documents(unit, done)
            if stored is not None:
                yield from self._encoded(unit + 1, Position(unit, max(done, stored)))

    def _encoded(self, end: int, start: Position) -> Iterator[tuple[list[Position], EncodedChunk]]:
        inputs, reading = self.preparation.inputs()[:end], self.preparation.reading
        documents = read_documents(inputs, reading, start, self.shard, self.blank)
        with closing(documents), closing(encoded(documents, self.encoder, self.workers)) as chunks:
            yield from chunks


def _write_sets(pipeline: Pipeline, identities: list[str]) -> dict[str, SetEntry]:
    """Write all sets and return the manifest entries of their training and validation sets."""
    progress, folder = pipeline.progress, pipeline.folder
    plans, dtype = pipeline.preparation.sets, pipeline.encoder.dtype
    repeats, resumed = Repeats(), folder.progress is not None
    inputs = pipeline.preparation.inputs()
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                closing(
                    SetWriter(folder.path, folder.state, name, dtype, source, progress.file(name))
                )
            )
            for plan in plans
            for name, source in plan.outputs().items()
        }
        for plan, portion, units in pipeline.portions():
            end = units.stop
            with closing(pipeline.documents(plan, units, writers.values())) as documents:
                for unit, tokens, size in documents:
                    if portion.tokens is not None and progress.tokens >= portion.tokens:
                        end = progress.end
                        break
                    progress.end = unit + 1
                    held_out = portion.held_out or is_validation(progress.index, plan.fraction)
                    name = plan.output(held_out=held_out)
                    writers[name].add(tokens, size)
                    repeats.add(name, tokens.tobytes())
                    progress.index += 1
                    progress.tokens += len(tokens)
            if end < units.stop:
                left = f"{units.stop - end:,} of {counted(len(units), 'input')}"
                print(
                    f"token set {plan.name}: the token limit is reached; not read: {left}, from "
                    f"{inputs[end]} on"
                )
            for name in plan.outputs_of(portion):
                progress.read.setdefault(name, []).append([units.start, end])
            if portion.tokens is not None and progress.tokens < portion.tokens:
                warn(
                    f"{', '.join(portion.source)}: there are only {progress.tokens:,} of "
                    f"the requested {portion.tokens:,} tokens"
                )
        for plan in plans:
            if plan.fraction:
                train, held_out_set = (writers[plan.output(held_out=h)] for h in (False, True))
                _check_fraction(plan, train.written.documents, held_out_set.written.documents)
        for text in repeats.warnings(list(writers)):
            since = " since the preparation was resumed" if resumed else ""
            warn(f"{text}{since}")
        read = {
            name: [identities[i] for first, end in ranges for i in range(first, end)]
            for name, ranges in progress.read.items()
        }
        return {name: writer.finish(read[name]) for name, writer in writers.items()}


def _check_fraction(plan: SetPlan, train: int, held_out: int) -> None:
    """Raise DataError if the validation fraction leaves the training or validation set empty."""
    count = train + held_out
    if not count or (train and held_out):
        return
    half = Fraction(1, 2 * count)  # document
    name = plan.output(held_out=train > 0)
    if train:
        problem, remedy = "is less than half a document", f"of at least {half}"
    else:
        problem, remedy = "holds out all documents", f"below {1 - half}"
    remedies = [f"set a fraction {remedy}"] if count > 1 else []
    if not all(each.has_keys for each in plan.inputs()):
        remedies.append(
            "split .txt and .md files into more documents with a smaller --document-bytes"
        )
    remedies = remedies or ["add documents, or pass separate ones as --validation NAME=INPUT"]
    raise DataError(
        f"token set {name} would be empty: --validation-fraction {plan.fraction} of "
        f"{counted(count, 'document')} {problem}; {', or '.join(remedies)}"
    )


def _write_shard(pipeline: Pipeline) -> None:
    """Write the documents of one shard, counting them per input in `progress.parts`."""
    progress, folder, shard = pipeline.progress, pipeline.folder.path, pipeline.shard
    written, dtype = progress.file("shard"), pipeline.encoder.dtype

    def enough(portion: Portion, unit: str) -> bool:
        if portion.tokens is None or progress.tokens >= portion.tokens:
            return portion.tokens is not None
        whole = shard.cut or unit not in progress.parts
        return whole and progress.tokens * shard.count >= portion.tokens * MARGIN

    file = DocumentFile(folder / TOKENS_FILE, folder / RECORDS_FILE, dtype, written)
    with closing(file):
        for plan, portion, units in pipeline.portions():
            with closing(pipeline.documents(plan, units, [file])) as documents:
                for unit, tokens, size in documents:
                    if enough(portion, str(unit)):
                        progress.left.append([unit, units.stop])
                        break
                    file.add(tokens, size)
                    part = progress.parts.setdefault(str(unit), [0, 0])
                    part[0] += 1
                    part[1] += len(tokens)
                    progress.tokens += len(tokens)
        file.sync()
