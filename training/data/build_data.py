"""Build a run's data, tokenizer, vocabulary and tasks from its config."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from training.config import Config
from training.config.data import DataConfig, TrainSet, ValidationSet
from training.data.document_index import Borders
from training.data.hashes import file_sha256
from training.data.manifest import (
    MANIFEST_FILE,
    Manifest,
    SetEntry,
    TokenizerEntry,
    check_one_tokenizer,
    check_tokenizer,
    read_manifest,
)
from training.data.mock_tokens import VOCABULARY as MOCK_VOCABULARY
from training.data.mock_tokens import MockTokens
from training.data.order import TrainingData
from training.data.tasks import Task, made_task, read_task
from training.data.token_bytes import (
    open_tokenizer,
    token_byte_lengths,
    tokenizer_file,
    vocabulary_size,
)
from training.data.token_set import TokenSet, check_vocabulary, no_file
from training.data.validation_data import ValidationData
from training.errors import ConfigError, MissingSetError, VocabularyError

MOCK_SAMPLES = 64
"""Number of windows in a mock validation set if `validation.samples` is null."""


def data_manifest(config: Config) -> Manifest | None:
    """Return the manifest in the folder of the first training set, or None if there is no
    manifest."""
    if not config.data.train:
        return None
    folder = Path(next(iter(config.data.train.values())).path).parent
    return read_manifest(folder) if (folder / MANIFEST_FILE).exists() else None


def tokenizer_path(config: Config) -> Path | None:
    """Return the path of the tokenizer.json named in the config or, failing that, in the data
    manifest. Return None if neither the config nor the manifest names a tokenizer."""
    if config.data.tokenizer is not None:
        return tokenizer_file(config.data.tokenizer)
    manifest = data_manifest(config)
    return None if manifest is None else manifest.tokenizer_path


def needed_tokenizer(config: Config, key: str) -> Path:
    """Return the path of the data's tokenizer.json. `key` is the config key that requires the
    tokenizer.

    Raises ConfigError if there is no tokenizer.json.
    """
    path = tokenizer_path(config)
    if path is None:
        first = next(iter(config.data.train.values())).path
        raise ConfigError(
            f"{key} requires data.tokenizer, because there is no {MANIFEST_FILE} next to {first}"
        )
    return path


def with_vocabulary(config: Config) -> Config:
    """If model.vocab_size is null, set it to the vocabulary size in the data manifest.

    If there is no manifest, a default size is used for mock tokens; for other data, DataError is
    raised.
    """
    if config.model.vocab_size is not None:
        return config
    manifest = data_manifest(config)
    if manifest is None and config.data.mock:
        return replace(config, model=replace(config.model, vocab_size=MOCK_VOCABULARY))
    if manifest is None:
        name, first = next(iter(config.data.train.items()))
        problem = (
            f"model.vocab_size must be set, because there is no {MANIFEST_FILE} next to "
            f"{first.path}; scripts/prepare_data.py creates a manifest"
        )
        if not Path(f"{first.path}.idx").exists():
            plan = "to plan without data, set model.vocab_size"
            problem = f"{no_file(name, first.path, '.idx')}; {plan}"
        raise MissingSetError(problem, ("data", "train", name))
    return replace(config, model=replace(config.model, vocab_size=manifest.tokenizer.vocab_size))


def data_vocabulary(config: Config) -> int | None:
    """Return the number of token ids in the data's tokenizer, or None if unknown."""
    if config.data.mock:
        return None
    if config.data.tokenizer is not None and tokenizer_file(config.data.tokenizer).exists():
        return vocabulary_size(config.data.tokenizer)
    manifest = data_manifest(config)
    return None if manifest is None else manifest.tokenizer.vocab_size


def check_rows(config: Config) -> None:
    """Raise VocabularyError if the embedding has more rows than the data's padded vocabulary."""
    ids, model = data_vocabulary(config), config.model
    rows = model.padded_vocab if ids is None else replace(model, vocab_size=ids).padded_vocab
    if model.padded_vocab > rows:
        raise VocabularyError(
            f"model.vocab_size must be at most {rows:,}, got {model.vocab_size:,}: the data has "
            f"{ids:,} token ids, padded to a multiple of {model.vocab_multiple} "
            "(model.vocab_multiple). Set model.vocab_size=null, or increase model.vocab_multiple "
            "to add untrained rows"
        )


def on_mock_tokens(config: Config) -> Config:
    """Return `config` with mock tokens, a vocabulary size and no text samples."""
    return with_vocabulary(
        replace(
            config,
            data=replace(config.data, mock=True),
            validation=replace(config.validation, samples_interval=0),
        )
    )


def build_data(
    config: Config, share: tuple[int, int] = (0, 1)
) -> tuple[TrainingData, list[ValidationData]]:
    """Open the training data and validation sets, and check them against the vocabulary.

    If `data.verify` is `full`, the ranks split the verification. `share` is (index of this rank,
    number of ranks). Raises DataError if a file is missing, corrupt or too short, or contains
    out-of-vocabulary token ids.
    """
    assert config.model.vocab_size is not None  # `with_vocabulary` has set it
    data, samples, tokenizer = config.data, config.validation.samples, None
    open_set: Callable[[str, str, int], TokenSet] = partial(
        TokenSet, vocab_size=config.model.vocab_size, verify=data.verify, share=share
    )
    if data.mock:
        data, samples = with_mock_sets(data), samples or MOCK_SAMPLES
        open_set = partial(MockTokens, vocabulary=config.model.vocab_size)
    else:
        tokenizer = tokenizer_path(config)
        sections = (data.train, data.validation)
        paths = [(name, each.path) for section in sections for name, each in section.items()]
        check_one_tokenizer(paths, None if data.tokenizer is None else tokenizer)
        if data.tokenizer is None and data.verify != "none":
            manifest = data_manifest(config)
            if manifest is not None:
                check_tokenizer(manifest)

    def opened(kind: str) -> Iterator[TokenSet]:
        for name, each in getattr(data, kind).items():
            try:
                yield open_set(name, each.path, config.train.sequence_length)
            except MissingSetError as error:
                raise MissingSetError(str(error), ("data", kind, name)) from None

    borders = Borders(mask=data.document_mask, first_token_loss=data.first_token_loss)
    train = TrainingData(
        [(each, data.train[each.name].weight) for each in opened("train")],
        seed=config.seed,
        phases=[
            (start, phase.weights)
            for start, phase in zip(config.phase_starts(), data.phases, strict=True)
        ],
        borders=borders,
    )
    lengths = None if tokenizer is None else token_byte_lengths(tokenizer)
    validation = [
        ValidationData(
            each, samples=samples, token_bytes=lengths, tokenizer=tokenizer, borders=borders
        )
        for each in opened("validation")
    ]
    sets = [*train.all_sets, *(each.set for each in validation)]
    check_vocabulary(sets, config.model.vocab_size)
    for each in sets if borders.needed and not data.mock else []:
        each.check_documents(borders)
    return train, validation


def unverified_facts(config: Config, sets: Iterable[TokenSet]) -> dict[str, Any]:
    """Return the facts about a run's tokenizer and manifests. Ranks always compare these facts,
    regardless of `data.verify`."""
    if config.data.mock:
        return {}
    path, manifest = tokenizer_path(config), data_manifest(config)
    entries: dict[str, TokenizerEntry | SetEntry | None] = {
        each.prefix: each.entry for each in sets
    }
    if manifest is not None:
        entries["the tokenizer"] = manifest.tokenizer
    digest = file_sha256(path) if path is not None and path.is_file() else None
    return {"content of the tokenizer": digest} | {
        f"{name} of {place} in its manifest": value
        for place, entry in entries.items()
        if entry is not None
        for name, value in asdict(entry).items()
        if name not in ("source", "inputs")  # these may be long, and may differ without harm
    }


def unverified_sets(data: DataConfig, sets: Mapping[str, Iterable[TokenSet]]) -> str | None:
    """Return a message listing the sets that cannot be verified because no manifest contains their
    hashes. Return None if there are no such sets. `sets` maps `train` and `validation` to the
    opened sets."""
    if data.mock or data.verify == "none":
        return None
    names = [
        f"{kind}.{each.name}"
        for kind, own in sets.items()
        for each in own
        if each.stated_sha256 is None
    ]
    if not names:
        return None
    listed = ", ".join(names)
    return f"token sets not verified, because no {MANIFEST_FILE} contains their hashes: {listed}"


def missing_files(config: Config) -> Iterator[str]:
    """If files of sets, tokenizers or tasks are missing, yield a message that lists these files."""
    data = config.data
    if data.mock:
        return
    files = {
        f"data.{kind}.{name}.path": f"{each.path}.idx"
        for kind in ("train", "validation")
        for name, each in getattr(data, kind).items()
    }
    if data.tokenizer is not None:
        files["data.tokenizer"] = str(tokenizer_file(data.tokenizer))
    files |= {f"tasks.files.{name}": file for name, file in config.tasks.files.items()}
    missing = [f"{key} ({file})" for key, file in files.items() if not Path(file).is_file()]
    if missing:
        yield f"a run requires files that do not exist here: {', '.join(missing)}"


def without_sets(config: Config) -> Iterator[str]:
    """Yield hints for a recipe whose sets are missing: create the sets, or use other data."""
    if config.data.made_by is None:
        return
    yield f"to create the sets: {config.data.made_by}"
    if config.data.made_by == "make data":  # the embedded corpus itself
        return
    names = [f"data.train.{name}.path=data/demo/kjv.train" for name in config.data.train]
    names += [
        f"data.validation.{name}.path=data/demo/kjv.validation" for name in config.data.validation
    ]
    yield (
        "to run without these sets: data.mock=true generates random tokens; `make data` and "
        f"{' '.join(names)} model.vocab_size=null use the embedded corpus"
    )


def with_mock_sets(data: DataConfig) -> DataConfig:
    """Return `data` with a mock training set if it has no training sets, and a mock validation set
    if it has no validation sets."""
    return replace(
        data,
        train=data.train or {"mock": TrainSet(path="mock")},
        validation=data.validation or {"mock": ValidationSet(path="mock")},
    )


def build_tasks(config: Config) -> list[Task]:
    """Return the tasks to evaluate, or randomly generated tasks for mock data.

    Raises ConfigError if there is no tokenizer, and DataError if a file is not a task file.
    """
    files, window = config.tasks.files, config.train.sequence_length
    assert config.model.vocab_size is not None  # `with_vocabulary` has set it
    shape = {"window": window, "vocab_size": config.model.vocab_size}
    if config.data.mock or not files:
        return [made_task(name, **shape) for name in files]
    tokenizer = open_tokenizer(needed_tokenizer(config, "tasks.files"))
    manifest, count = data_manifest(config), config.tasks.examples
    end = None if manifest is None else manifest.tokenizer.eod_id
    return [
        read_task(name, Path(file), tokenizer, end_token=end, count=count, **shape)
        for name, file in files.items()
    ]
