"""Building data, model, optimizer and trainer of a run from its config."""

import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from models.blocks import flash_attention, transformer_engine
from models.blocks.attention import attention_kernel
from models.blocks.compiled import missing_compiler
from models.blocks.in_graph_pc import with_gammas
from models.families import all_units
from models.units import Unit
from parallel.comm.groups import Groups, initialize
from parallel.error_text import last_line
from parallel.model import ModelOptions, ParallelModel, build_model
from parallel.optimizer.distributed_optimizer import DistributedOptimizer, build_optimizer
from parallel.optimizer.routing import Assign, Route, route
from spectral.kernels.dispatch import device_name, has_triton
from training.agreement import program, require_agreement
from training.assignments import assignments, unit_options
from training.checkpoint.initial_weights import InitialWeights
from training.checkpoint.progress import Progress
from training.config import Config
from training.config.files import flat
from training.config.schema import DataConfig, TrainSet, ValidationSet
from training.data.documents import Borders
from training.data.manifest import (
    MANIFEST_FILE,
    Manifest,
    check_one_tokenizer,
    check_tokenizer,
    read_manifest,
    shared_text,
)
from training.data.mock_tokens import VOCABULARY as MOCK_VOCABULARY
from training.data.mock_tokens import MockTokens
from training.data.order import (
    GlobalBatchSampler,
    OpenSet,
    TrainingData,
    ValidationData,
    training_loader,
)
from training.data.tasks import Task, made_task, read_task
from training.data.token_bytes import (
    open_tokenizer,
    token_byte_lengths,
    tokenizer_file,
    vocabulary_size,
)
from training.data.token_set import TokenSet, check_vocabulary
from training.errors import ConfigError, DataError, MissingSetError, VocabularyError
from training.loop import StepResult, Trainer
from training.machine.environment import allow_open_files
from training.machine.kernels import check_kernels
from training.machine.start import start
from training.samples import Sampler

MOCK_SAMPLES = 64
"""Windows of a validation set whose tokens are made, where the config does not say how many."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def data_manifest(config: Config) -> Manifest | None:
    """Return the manifest beside the first training set, None if there is none."""
    if not config.data.train:
        return None
    folder = Path(next(iter(config.data.train.values())).path).parent
    return read_manifest(folder) if (folder / MANIFEST_FILE).exists() else None


def tokenizer_path(config: Config) -> Path | None:
    """Return the tokenizer.json of the config or its data's manifest, None if neither names one."""
    source = config.data.tokenizer or data_manifest(config)
    return None if source is None else tokenizer_file(source)


def with_vocabulary(config: Config) -> Config:
    """Return `config` with model.vocab_size, from the data manifest if it is null.

    Raises DataError if it is null and there is no manifest, unless tokens are made.
    """
    if config.model.vocab_size is not None:
        return config
    manifest = data_manifest(config)
    if manifest is None and config.data.mock:
        return replace(config, model=replace(config.model, vocab_size=MOCK_VOCABULARY))
    if manifest is None:
        name, first = next(iter(config.data.train.items()))
        if not Path(f"{first.path}.idx").exists():
            plan = "a plan without data needs model.vocab_size"
            raise MissingSetError(
                f"set {name}: no file {first.path}.idx; {plan}", ("data", "train", name)
            )
        raise MissingSetError(
            f"model.vocab_size must be set, as there is no {MANIFEST_FILE} beside {first.path}, "
            "got null; scripts/prepare_data.py prepares data with one",
            ("data", "train", name),
        )
    return replace(config, model=replace(config.model, vocab_size=manifest.tokenizer.vocab_size))


def data_vocabulary(config: Config) -> int | None:
    """Return the number of ids of the data's tokenizer, None if it is not known."""
    if config.data.mock:
        return None
    if config.data.tokenizer is not None and tokenizer_file(config.data.tokenizer).exists():
        return vocabulary_size(config.data.tokenizer)
    manifest = data_manifest(config)
    return None if manifest is None else manifest.tokenizer.vocab_size


def check_rows(config: Config) -> None:
    """Raise VocabularyError if the embedding has more rows than the data's ids, padded, need."""
    ids, model = data_vocabulary(config), config.model
    rows = model.padded_vocab if ids is None else replace(model, vocab_size=ids).padded_vocab
    if model.padded_vocab > rows:
        raise VocabularyError(
            f"model.vocab_size must be at most {rows:,}, which is the {ids:,} ids of the data "
            f"padded to a multiple of model.vocab_multiple = {model.vocab_multiple}, got "
            f"{model.vocab_size:,}: set model.vocab_size=null, or a larger model.vocab_multiple "
            "for rows that no token trains"
        )


def on_mock_tokens(config: Config) -> Config:
    """Return `config` on made tokens, with a vocabulary, and without samples of text."""
    return with_vocabulary(
        replace(
            config,
            data=replace(config.data, mock=True),
            validation=replace(config.validation, samples_interval=0),
        )
    )


def start_groups(config: Config, **options: str) -> Groups:
    """Start the process groups of the config's layout; `parallel.comm.groups.shutdown` ends
    them.

    Raises RanksDifferError if ranks have other settings, `options`, code or versions than others,
    ConfigError as `check_restarts` and `allow_open_files` do.
    """
    check_restarts()
    allow_open_files()
    facts = {**dict(flat(asdict(config))), **options, **program()}
    agree = partial(require_agreement, facts)
    return initialize(
        config.parallel.layout,
        timeout_seconds=config.parallel.timeout_seconds,
        device_type=start(config),
        agree=agree,
    )


def check_restarts() -> None:
    """Raise ConfigError if torchrun may restart the ranks of several nodes in one store: each node
    counts its restarts by itself, and the ranks would look for each other in different attempts."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if shared and restarts and os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE must be 1 in torchrun's environment for "
            "--max-restarts on several nodes, got "
            f"{os.environ.get('TORCH_DISABLE_SHARE_RDZV_TCP_STORE', 'nothing')}"
        )


def config_assignments(config: Config) -> Assign:
    """Return the function from the units of the config's model to their assignments."""
    return assignments(config.optimizer, config_units(config), config.pc, config.gram_penalty)


def config_units(config: Config) -> list[Unit]:
    """Return the units of the config's model."""
    units = all_units(config.model, **unit_options(config))
    return units if config.pc is None else with_gammas(units, config.pc)


def config_routes(config: Config, owners: Mapping[str, int] | None = None) -> list[Route]:
    """Return the routing table of the whole model; `owners` has the rank of each matrix."""
    assign = config_assignments(config)
    return [route(unit, assign(unit), owners or {}) for unit in config_units(config)]


def check_backend(config: Config) -> None:
    """Raise ConfigError if the attention backend or a compiler for kernels is not installed."""
    if config.train.compile == "inductor":
        missing = missing_compiler(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if missing is not None:
            raise ConfigError(
                f"train.compile is inductor, which needs {missing} on this machine: install it or "
                "set train.compile=null"
            )
    if config.train.fused_loss == "liger" and importlib.util.find_spec("liger_kernel") is None:
        raise ConfigError(
            "train.fused_loss is liger, which is not installed: pip install liger-kernel, or set "
            "train.fused_loss=null"
        )
    kernel = config.model.attention_kernel
    if kernel != "auto":
        try:
            flash_attention.imported(kernel)
        except ImportError as error:
            raise ConfigError(
                f"model.attention_kernel is {kernel}, whose package cannot be imported "
                f"({last_line(error)}): install it as docs/running.md says, or set "
                "model.attention_kernel=auto"
            ) from error
    if config.train.fused_backward == "triton" and not has_triton():
        raise ConfigError(
            "train.fused_backward is triton, which is not installed: pip install triton, or set "
            "train.fused_backward=null"
        )
    wanted = config.model.attention_backend
    if wanted == "transformer_engine" and not transformer_engine.installed():
        raise ConfigError(
            "model.attention_backend is transformer_engine, which is not installed: pip "
            "install transformer-engine[pytorch], or set model.attention_backend=sdpa"
        )


def compile_backend(config: Config, device: torch.device) -> tuple[str | None, str]:
    """Return the backend of torch.compile for a device, None to compile nothing, and what to say of
    it: of auto, why nothing is compiled."""
    if config.train.compile != "auto":
        return config.train.compile, config.train.compile or "none"
    if device.type == "cpu":
        return None, "none"
    if config.model.attention_backend != "sdpa":
        return None, f"none, {config.model.attention_backend} fuses them"
    missing = missing_compiler(device)
    if missing is not None:
        return None, f"none, inductor needs {missing}"
    return "inductor", "inductor"


def fused_loss(config: Config, device: torch.device) -> bool:
    """Return whether Liger's kernels compute the loss on a device."""
    if config.train.fused_loss != "auto":
        return config.train.fused_loss == "liger"
    installed = importlib.util.find_spec("liger_kernel") is not None
    return installed and device.type == "cuda" and config.train.loss_chunk is None


def fused_backward(config: Config, device: torch.device) -> bool:
    """Return whether Triton kernels compute gradients of activations and heads on a device."""
    if config.train.fused_backward != "auto":
        return config.train.fused_backward == "triton"
    plain = config.model.attention_backend != "transformer_engine"
    return plain and device.type == "cuda" and missing_compiler(device) is None


def check_device(config: Config, device: torch.device) -> None:
    """Raise ConfigError if the device lacks something that the config needs, DeviceError if kernels
    do not start on it."""
    if config.optimizer.distributed.cuda_graph and device.type != "cuda":
        raise ConfigError(
            f"optimizer.distributed.cuda_graph must be false on a {device.type}, which records no "
            "graphs, got true"
        )
    profile = config.log.profile
    if profile is not None and profile.memory and device.type != "cuda":
        raise ConfigError(
            f"log.profile.memory must be false on a {device.type}, whose memory has no snapshots, "
            "got true"
        )
    train = config.train
    for key, value in (("fused_loss", train.fused_loss), ("fused_backward", train.fused_backward)):
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if value not in ("auto", None) and device.type == "cpu" and not interpreted:
            raise ConfigError(f"train.{key} must be auto or null on a cpu, got {value}")
    check_kernels(device)
    kernel = config.model.attention_kernel
    if kernel == "auto":
        return
    majors = flash_attention.CAPABILITIES[kernel]
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] not in majors:
        raise ConfigError(
            f"model.attention_kernel {kernel} needs a GPU of compute capability "
            f"{', '.join(f'{m}.x' for m in majors)}, got {device_name(device)}"
        )


def kernel_of(config: Config, groups: Groups) -> str:
    """Return the name of the kernel that computes this rank's attention.

    Raises ConfigError if there is no fused one on a GPU.
    """
    model, ranks = config.model, groups.tensor.size
    if model.attention_backend != "sdpa":
        return f"chosen by {model.attention_backend}"
    if model.explicit_scores:
        return "products of blocks of scores"
    if model.attention_kernel != "auto":
        return model.attention_kernel
    latent = model.latent is not None
    try:
        return attention_kernel(
            model.heads // ranks,
            model.heads // ranks if latent else max(1, model.query_groups // ranks),
            model.head_size,
            model.value_head_size,
            dtype=DTYPES[config.train.precision],
            device=groups.device,
            documents=config.data.document_mask,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"no fused kernel of PyTorch computes attention with heads of {model.head_size} and "
            f"values of {model.value_head_size} in {config.train.precision} here: {error}"
        ) from error


def build_data(
    config: Config, share: tuple[int, int] = (0, 1)
) -> tuple[TrainingData, list[ValidationData]]:
    """Return the training data and the validation sets, checked against the vocabulary.

    `share` is (rank, size) of the ranks that share a full verification. Raises DataError for files
    that are missing, corrupt or too short, or token ids beyond the vocabulary.
    """
    assert config.model.vocab_size is not None  # `with_vocabulary` has filled it in
    data, samples = config.data, config.validation.samples
    open_set: OpenSet = partial(
        TokenSet, vocab_size=config.model.vocab_size, verify=data.verify, share=share
    )
    source: str | Manifest | None = data.tokenizer or data_manifest(config)
    if data.mock:
        data, source, samples = with_mock_sets(data), None, samples or MOCK_SAMPLES
        open_set = partial(MockTokens, vocabulary=config.model.vocab_size)
    else:
        check_tokenizers(data)
        if isinstance(source, Manifest) and data.verify != "none":
            check_tokenizer(source)
    borders = Borders(mask=data.document_mask, first_token_loss=data.first_token_loss)
    train = TrainingData(
        [(name, each.path, each.weight) for name, each in data.train.items()],
        sequence_length=config.train.sequence_length,
        seed=config.seed,
        open_set=named(open_set, "train"),
        phases=[
            (start, phase.weights)
            for start, phase in zip(config.phase_starts(), data.phases, strict=True)
        ],
        borders=borders,
    )
    lengths = token_byte_lengths(source) if source is not None else None
    validation = [
        ValidationData(
            name,
            each.path,
            sequence_length=config.train.sequence_length,
            samples=samples,
            token_bytes=lengths,
            tokenizer=None if source is None else tokenizer_file(source),
            open_set=named(open_set, "validation"),
            borders=borders,
        )
        for name, each in data.validation.items()
    ]
    sets = [*train.all_sets, *(each.set for each in validation)]
    check_vocabulary(sets, config.model.vocab_size)
    for each in sets if borders.needed else []:
        each.check_documents(borders)
    return train, validation


def check_tokenizers(data: DataConfig) -> None:
    """Raise DataError unless all sets, and `data.tokenizer` if it is set, have one tokenizer."""
    sections = (data.train, data.validation)
    sets = [(name, each.path) for section in sections for name, each in section.items()]
    check_one_tokenizer(sets, None if data.tokenizer is None else tokenizer_file(data.tokenizer))


def shared_sets(data: DataConfig) -> Iterator[str]:
    """Yield a sentence for each two sets that hold the same text, unless tokens are made."""
    if not data.mock:
        prefixes = ({name: each.path for name, each in sets.items()}
                    for sets in (data.train, data.validation))  # fmt: skip
        yield from shared_text(*prefixes)


def without_sets(config: Config) -> Iterator[str]:
    """Yield what to do without a recipe's sets: make them, or go on without them."""
    if config.data.made_by is None:
        return
    yield f"make the sets with: {config.data.made_by}"
    if config.data.made_by == "make data":  # they are the embedded corpus
        return
    names = [f"data.train.{name}.path=data/demo/kjv.train" for name in config.data.train]
    names += [
        f"data.validation.{name}.path=data/demo/kjv.validation" for name in config.data.validation
    ]
    yield (
        "or go on without them: data.mock=true reads random tokens; `make data` and "
        f"{' '.join(names)} model.vocab_size=null read the embedded corpus"
    )


def named(open_set: OpenSet, kind: str) -> OpenSet:
    """Return `open_set`, of whose missing sets the error knows the key in the config."""

    def opened(name: str, prefix: str | Path, sequence_length: int) -> TokenSet:
        try:
            return open_set(name, prefix, sequence_length)
        except MissingSetError as error:
            raise MissingSetError(str(error), ("data", kind, name)) from None

    return opened


def with_mock_sets(data: DataConfig) -> DataConfig:
    """`data` with sets whose tokens are made where it names none."""
    return replace(
        data,
        train=data.train or {"mock": TrainSet(path="mock")},
        validation=data.validation or {"mock": ValidationSet(path="mock")},
    )


def optional_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype of a config's name, None for null."""
    return None if name is None else DTYPES[name]


def exchange_dtype(config: Config) -> torch.dtype:
    """Return the dtype in which momentum and updates of split matrices are sent."""
    return DTYPES[config.optimizer.distributed.exchange_dtype or config.train.precision]


def build_parallel_model(
    config: Config, groups: Groups, weights: InitialWeights | None = None
) -> ParallelModel:
    """Return this rank's part of the config's model, with `weights` if given, else new ones."""
    assign = config_assignments(config)
    distributed, train = config.optimizer.distributed, config.train
    options = ModelOptions(
        seed=config.seed,
        sequence_length=train.sequence_length,
        elementwise=lambda unit: not assign(unit).whole_matrix,
        preconditioned=lambda unit: assign(unit).pc is not None,
        dtype=DTYPES[train.precision],
        storage=distributed.storage,
        exchange_bytes=exchange_dtype(config).itemsize,
        overlap_reduce=distributed.overlap_reduce,
        gradient_dtype=optional_dtype(distributed.gradient_dtype),
        pc=config.pc,
        radius_scalers=config.optimizer.radius_scalers(),
        weights=None if weights is None else weights.unit,
        loss_chunk=train.loss_chunk,
        fused_loss=fused_loss(config, groups.device),
        z_loss=train.z_loss > 0,
        fused_backward=fused_backward(config, groups.device),
        recompute=train.recompute,
        fp8=train.fp8,
        compile_backend=compile_backend(config, groups.device)[0],
        **unit_options(config),
    )
    model = build_model(config.model, groups, options)
    if weights is not None:
        weights.fill_buffers_(model)
    return model


def build_distributed_optimizer(config: Config, model: ParallelModel) -> DistributedOptimizer:
    """Return the optimizer of the config's model."""
    distributed = config.optimizer.distributed
    return build_optimizer(
        model,
        config_assignments(config),
        placement=distributed.placement,
        step_groups=distributed.step_groups,
        exchange_dtype=exchange_dtype(config),
        momentum_dtype=optional_dtype(distributed.momentum_dtype),
        overlap_gather=distributed.overlap_gather,
        tensor_mode=distributed.tensor_mode,
    )


def build_trainer(
    config: Config,
    groups: Groups,
    data: TrainingData,
    validation: Sequence[ValidationData],
    *,
    tasks: Sequence[Task] = (),
    weights: InitialWeights | None = None,
    monitor_interval: int | None = None,
    on_step: Callable[[int, StepResult], None] | None = None,
) -> Trainer:
    """Build model and optimizer and return this rank's trainer.

    `weights` are those of `build_parallel_model`, `on_step` that of `Trainer`. The model is scored
    on `tasks`. Monitors measure every `monitor_interval`-th step, by default as the config says.
    """
    model = build_parallel_model(config, groups, weights)
    optimizer = build_distributed_optimizer(config, model)
    return Trainer(
        config,
        groups,
        model,
        optimizer,
        data,
        partial(training_batches, config, groups, data),
        validation,
        tasks=tasks,
        sampler=build_sampler(config, validation),
        monitor_interval=config.monitors.interval if monitor_interval is None else monitor_interval,
        on_step=on_step,
    )


def build_sampler(config: Config, validation: Sequence[ValidationData]) -> Sampler | None:
    """Return what writes samples of text, None if the config asks for none.

    Raises ConfigError without a tokenizer to write them with.
    """
    section = config.validation
    if section.samples_interval == 0 or not validation:
        return None
    source = config.data.tokenizer or data_manifest(config)
    if source is None:
        path = next(iter(config.data.train.values())).path
        raise ConfigError(
            f"validation.samples_interval needs data.tokenizer, as there is no {MANIFEST_FILE} "
            f"beside {path}"
        )
    assert config.model.vocab_size is not None  # `with_vocabulary` has filled it in
    return Sampler(
        validation,
        source,
        vocab_size=config.model.vocab_size,
        prompt=section.prompt_tokens(config.train.sequence_length),
        tokens=section.samples_tokens,
    )


def build_tasks(config: Config) -> list[Task]:
    """Return the tasks that the run is scored on, made ones if its tokens are made.

    Raises ConfigError without a tokenizer, DataError for a file that is not a task.
    """
    files, window = config.tasks.files, config.train.sequence_length
    assert config.model.vocab_size is not None  # `with_vocabulary` has filled it in
    shape = {"window": window, "vocab_size": config.model.vocab_size}
    if config.data.mock or not files:
        return [made_task(name, **shape) for name in files]
    path, manifest = tokenizer_path(config), data_manifest(config)
    if path is None:
        first = next(iter(config.data.train.values())).path
        raise ConfigError(
            f"tasks.files needs data.tokenizer, as there is no {MANIFEST_FILE} beside {first}"
        )
    tokenizer, count = open_tokenizer(path), config.tasks.examples
    end = None if manifest is None else manifest.tokenizer.eod_id
    return [
        read_task(name, Path(file), tokenizer, end_token=end, count=count, **shape)
        for name, file in files.items()
    ]


def training_batches(
    config: Config, groups: Groups, data: TrainingData, progress: Progress
) -> Iterator[torch.Tensor]:
    """Return an endless iterator of this rank's micro-batches after `progress`.

    Each is `[micro_batch, sequence_length + 1]` token ids, or as `training_loader` says.
    """
    sampler = GlobalBatchSampler(
        consumed=progress.sample,
        global_batch=config.train.batch(progress.step, progress.tokens),
        micro_batch=config.train.micro_batch,
        data_rank=groups.data.rank,
        data_size=groups.data.size,
        left_out=progress.left_out,
    )
    present = data.at(progress.step).since(progress.phase)
    loader = training_loader(present, sampler, workers=config.data.workers)
    return without_worker_traces(loader)


def without_worker_traces(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield `batches`; a DataError of a worker process says what happened, not where."""
    try:
        yield from batches
    except DataError as error:
        prefix = f"{DataError.__module__}.DataError: "
        raise DataError(last_line(error).removeprefix(prefix)) from error
