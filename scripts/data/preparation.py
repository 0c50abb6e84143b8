"""Write a preparation: tokenizer, token sets and manifest, in one atomic folder.

It goes on after a kill, and may be divided: `prepare_shard` encodes one share of the documents, and
`prepare` takes what shards have encoded.
"""

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from parallel.disk import delete
from scripts.data.document_files import ReadOptions, numbered_documents, read_documents
from scripts.data.encoding import EncodedChunk, Encoder, RoundTrip, Workers
from scripts.data.folder import AtomicFolder, check_replaceable
from scripts.data.plan import (
    TOKENIZER_BYTES,
    WHOLE,
    Portion,
    Preparation,
    SetPlan,
    Shard,
    is_validation,
    shards_folder,
)
from scripts.data.resume_point import Progress, Saver, read_progress
from scripts.data.set_writer import DocumentFile, SetWriter, no_documents, token_dtype
from scripts.data.shards import (
    RECORDS_FILE,
    TOKENS_FILE,
    ShardEntry,
    Shards,
    has_shards,
    hashes,
    read_entry,
    shard_key,
)
from scripts.data.sources import Input, Position
from scripts.data.text_tokenizer import (
    EOD_TOKEN,
    TOKENIZER_FILE,
    PreparedTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from training.data.hashes import file_sha256
from training.data.manifest import MANIFEST_FILE, Manifest, SetEntry, TokenizerEntry
from training.errors import DataError, InputError

MARGIN = 1.1
"""What each shard encodes of a portion with a number of tokens, in shares of it: shards' shares
differ, and what is missing is encoded while they are joined."""


def prepare(
    preparation: Preparation,
    output: Path,
    *,
    identities: list[str],
    workers: int,
    overwrite: bool,
) -> Manifest:
    """Write the preparation to `output` and return its manifest.

    An interrupted run continues, and finished shards are joined and deleted.

    Raises:
        DataError: an input cannot be used, gives no documents, or is not what its
            entry of `identities` says. `output` is as before.
        InputError: `output` must not be replaced, as `check_replaceable` says; or a shard is
            missing or another's.
    """
    fingerprint = preparation.fingerprint(identities)
    given, preparation = preparation, preparation.with_hub_files()
    identities = preparation.identities(cached=dict(zip(given.inputs(), identities, strict=True)))
    shards = None
    if has_shards(output):
        shards = Shards(preparation, output, identities)
        print(f"joins {len(shards.folders)} shards of {shards_folder(output)}")
    key = " ".join([fingerprint, *preparation.hub_identities()])
    check = partial(check_replaceable, output, overwrite)
    with AtomicFolder(output, check, key) as folder, Workers(workers) as pool:
        progress, saver = started(folder)
        trained = folder.path if shards is None else shards.folders[0]
        tokenizer = _prepare_tokenizer(preparation, folder.path, trained)
        saver.save(progress)
        encoder = encoder_of(tokenizer, folder)
        reader = Reader(preparation.reading, encoder, pool, preparation.allow_lossy, shards=shards)
        sets = _write_sets(preparation, identities, reader, folder, progress, saver)
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
            files={
                each.name: each.stat().st_size
                for each in sorted(folder.path.iterdir())
                if each.name != MANIFEST_FILE
            },
        )
        (folder.path / MANIFEST_FILE).write_text(manifest.to_json(), encoding="utf-8")
        if given.fingerprint() != fingerprint:
            raise DataError("an input has changed while it was read; nothing was written")
        folder.commit()
    if shards is not None:
        delete(shards_folder(output))
    return manifest


def prepare_shard(
    preparation: Preparation, output: Path, shard: Shard, *, workers: int, overwrite: bool
) -> ShardEntry:
    """Encode the documents of one shard of a preparation, and return what its folder holds.

    Raises:
        DataError: as `prepare`.
        InputError: the folder holds a shard of another preparation.
    """
    preparation = preparation.with_hub_files()
    shard = preparation.shard(shard.number, shard.count)
    target = shard.folder(output)
    key = shard_key(preparation, shard, preparation.identities(shard))
    existing = read_entry(target)
    if existing is not None and existing.key == key:
        return existing
    with (
        AtomicFolder(target, partial(_check_free, target, overwrite), key) as folder,
        Workers(workers) as pool,
    ):
        progress, saver = started(folder)
        tokenizer = _prepare_tokenizer(preparation, folder.path, folder.path)
        saver.save(progress)
        encoder = encoder_of(tokenizer, folder)
        reader = Reader(preparation.reading, encoder, pool, preparation.allow_lossy, shard=shard)
        _write_shard(preparation, reader, folder, progress, saver)
        entry = ShardEntry(
            key=key,
            dtype=reader.encoder.dtype,
            parts=progress.parts,
            left=progress.left,
            sha256=hashes(folder.path),
        )
        entry.write(folder.path)
        if shard_key(preparation, shard, preparation.identities(shard)) != key:
            raise DataError("an input has changed while it was read; nothing was written")
        folder.commit()
    return entry


def started(folder: AtomicFolder) -> tuple[Progress, Saver]:
    """Return the progress of an interrupted run or the beginning, and what saves it."""
    progress = read_progress(folder.progress)
    if folder.progress is not None:
        documents = sum(each.documents for each in progress.written.values())
        print(f"goes on after {documents:,} documents in {folder.path}")
    return progress, Saver(folder)


def encoder_of(tokenizer: PreparedTokenizer, folder: AtomicFolder) -> Encoder:
    """Return the encoder of the tokenizer that is in the folder."""
    return Encoder(
        folder.path / TOKENIZER_FILE, tokenizer.eod_id, token_dtype(tokenizer.vocab_size)
    )


def _check_free(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise InputError(
            f"{target} is of other inputs or options than this command; give --overwrite"
        )


def _prepare_tokenizer(preparation: Preparation, folder: Path, trained: Path) -> PreparedTokenizer:
    """Write the tokenizer to `folder`; one that was trained before is in the folder `trained`."""
    if preparation.tokenizer is not None:
        tokenizer = load_tokenizer(preparation.tokenizer, preparation.eod)
    elif (trained / TOKENIZER_FILE).exists():
        tokenizer = load_tokenizer(trained / TOKENIZER_FILE, EOD_TOKEN)
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


@dataclass(frozen=True)
class Reader:
    """Reads the inputs of a portion as encoded documents, in order."""

    options: ReadOptions
    encoder: Encoder
    pool: Workers
    allow_lossy: bool
    shard: Shard = WHOLE
    shards: Shards | None = None

    def documents(
        self, inputs: list[Input], first: int, start: Position
    ) -> Generator[tuple[list[Position], EncodedChunk], None, None]:
        """Yield documents from a position on, each with the position after it.

        Args:
            inputs: of the portion.
            first: number of the first of them in the preparation.
            start: position in `inputs`.
        """
        if self.shards is None:
            yield from self._encoded(inputs, first, start)
            return
        for number in range(start.input, len(inputs)):
            done = start.document if number == start.input else 0
            stored = yield from self.shards.documents(first + number, number, done)
            if stored is not None:
                rest = Position(number, max(done, stored))
                yield from self._encoded(inputs[: number + 1], first, rest)

    def _encoded(
        self, inputs: list[Input], first: int, start: Position
    ) -> Iterator[tuple[list[Position], EncodedChunk]]:
        def owns(number: int, document: int | None) -> bool:
            return self.shard.owns(first + number, document)

        documents = numbered_documents(inputs, self.options, start, owns)
        with closing(documents), closing(self.pool.encode(documents, self.encoder)) as chunks:
            yield from chunks


def _write_sets(
    preparation: Preparation,
    identities: list[str],
    reader: Reader,
    folder: AtomicFolder,
    progress: Progress,
    saver: Saver,
) -> dict[str, SetEntry]:
    """Write all sets; return the manifest's entries of their training and validation parts."""
    places, dtype = (folder.path, folder.state), reader.encoder.dtype
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(
                closing(SetWriter(*places, name, dtype, source, progress.file(name)))
            )
            for plan in preparation.sets
            for name, source in plan.outputs().items()
        }

        def take(plan: SetPlan, portion: Portion, at: list[Position], chunk: EncodedChunk) -> bool:
            train, validation = f"{plan.name}.train", f"{plan.name}.validation"
            for position, (tokens, size) in zip(at, chunk.documents(), strict=True):
                if portion.tokens is not None and progress.tokens >= portion.tokens:
                    return False
                progress.last = position.input
                held_out = portion.held_out or is_validation(progress.index, plan.fraction)
                writers[validation if held_out else train].add(tokens, size)
                progress.index += 1
                progress.tokens += len(tokens)
            return True

        for plan, portion, first in progress.portions(preparation):
            end = len(portion.inputs)
            with read_portion(reader, plan, portion, first, progress) as chunks:
                for positions, chunk in chunks:
                    if not take(plan, portion, positions, chunk):
                        end = progress.last + 1
                        break
                    progress.input, progress.document = positions[-1]
                    saver.save(progress, *writers.values())
            for name in plan.outputs_of(portion):
                progress.read.setdefault(name, []).append([first, first + end])
            _say_if_short(portion, progress.tokens)
        check_decoded(progress, allowed=preparation.allow_lossy)
        for plan in preparation.sets:
            _check_held_out(plan, writers)
        read = {
            name: [identities[i] for first, end in ranges for i in range(first, end)]
            for name, ranges in progress.read.items()
        }
        return {name: writer.finish(read[name]) for name, writer in writers.items()}


def _check_held_out(plan: SetPlan, writers: Mapping[str, SetWriter]) -> None:
    """Raise DataError if the fraction of a set's documents that validation gets is none."""
    if not plan.fraction or writers[f"{plan.name}.validation"].written.documents:
        return
    count = writers[f"{plan.name}.train"].written.documents
    more = f"give at least 1/{2 * count}, or " if count > 1 else ""
    raise DataError(
        f"set {plan.name}.validation would be empty: --validation-fraction {plan.fraction} holds "
        f"out none of {count} documents; {more}cut .txt and .md files into more documents by a "
        "smaller --document-bytes"
    )


def _write_shard(
    preparation: Preparation, reader: Reader, folder: AtomicFolder, progress: Progress, saver: Saver
) -> None:
    """Write the documents of one shard; `progress` says afterwards which they are."""
    shard, paths = reader.shard, (folder.path / TOKENS_FILE, folder.path / RECORDS_FILE)
    with closing(DocumentFile(*paths, reader.encoder.dtype, progress.file("shard"))) as file:

        def enough(portion: Portion, unit: str) -> bool:
            if portion.tokens is None or progress.tokens >= portion.tokens:
                return portion.tokens is not None
            whole = shard.cut or unit not in progress.parts
            return whole and progress.tokens * shard.count >= portion.tokens * MARGIN

        def take(portion: Portion, first: int, at: list[Position], chunk: EncodedChunk) -> bool:
            for position, (tokens, size) in zip(at, chunk.documents(), strict=True):
                number = first + position.input
                if enough(portion, str(number)):
                    progress.left.append([number, first + len(portion.inputs)])
                    return False
                file.add(tokens, size)
                part = progress.parts.setdefault(str(number), [0, 0])
                part[0] += 1
                part[1] += len(tokens)
                progress.tokens += len(tokens)
            return True

        for plan, portion, first in progress.portions(preparation):
            with read_portion(reader, plan, portion, first, progress) as chunks:
                for positions, chunk in chunks:
                    if not take(portion, first, positions, chunk):
                        break
                    progress.input, progress.document = positions[-1]
                    saver.save(progress, file)
        file.sync()
    check_decoded(progress, allowed=preparation.allow_lossy)


def check_decoded(progress: Progress, *, allowed: bool) -> None:
    """Say of each set which share of the decoded documents came back as another text.

    Raises DataError if it is too large and not `allowed`.
    """
    for name, decoded in progress.decoded.items():
        decoded.check(name, allowed=allowed, final=True)
        if decoded.lost:
            print(f"warning: set {name}: {decoded}", file=sys.stderr)


@contextmanager
def read_portion(
    reader: Reader, plan: SetPlan, portion: Portion, first: int, progress: Progress
) -> Iterator[Iterator[tuple[list[Position], EncodedChunk]]]:
    """Give the documents of a portion that are left, with a bar of their bytes.

    Raises DataError if the tokenizer gives too many of them back as another text.
    """
    decoded = progress.decoded.setdefault(plan.name, RoundTrip())
    with (
        progress_of(plan.name) as bar,
        closing(reader.documents(portion.inputs, first, progress.position)) as documents,
    ):

        def tracked() -> Iterator[tuple[list[Position], EncodedChunk]]:
            for positions, chunk in documents:
                decoded.add(chunk)
                decoded.check(plan.name, allowed=reader.allow_lossy)
                yield positions, chunk
                bar.set_postfix_str(f"{progress.tokens:,} tokens", refresh=False)
                bar.update(sum(chunk.bytes))

        yield tracked()


def _say_if_short(portion: Portion, tokens: int) -> None:
    if portion.tokens is not None and tokens < portion.tokens:
        print(
            f"{', '.join(map(str, portion.inputs))}: {tokens:,} tokens instead of "
            f"{portion.tokens:,}: there are no more",
            file=sys.stderr,
        )
