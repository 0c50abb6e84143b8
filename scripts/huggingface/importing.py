"""Import a Hugging Face model folder as a weights-only checkpoint."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from models.huggingface.architectures import InexpressibleError
from models.huggingface.config_json import (
    differences,
    max_positions,
    model_section,
    model_settings,
)
from models.huggingface.tensors import TheirTensor, their_tensors
from parallel.error_text import first_line
from scripts.data.text_tokenizer import COMPANIONS, TOKENIZER_FILE, own_files
from scripts.huggingface.export import INDEX_FILE
from scripts.huggingface.model_folder import offline, read_settings
from scripts.weights_only import write_checkpoint
from spectral.batching import grouped
from training.checkpoint.stored_checkpoint import abridged
from training.config import Config, load_config
from training.config.yaml_files import to_text
from training.errors import InputError, near_name
from training.json_file import UNFETCHED, check_shape, is_pointer, parse_json, read_json

POSITIONS = "max_position_embeddings"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Supported dtypes, by safetensors name."""
IGNORED = "rotary_emb.inv_freq"
"""Suffix of non-weight tensors stored by old versions of transformers."""
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
"""Name of a file whose tensors are listed in the index."""
FORMATS = (".bin", ".pth", ".pt", ".ckpt", ".safetensors", ".gguf", ".h5", ".msgpack", ".npz")
"""Suffixes of files with weights."""


def import_model(
    source: Path, target: Path, config_file: Path, overrides: Sequence[str] = ()
) -> str:
    """Write the weights of `source` to a new checkpoint folder `target` and return their dtype.

    A run can be initialized from this checkpoint (`checkpoint.initialize_from`) but cannot resume
    from it. Only one parameter is in memory at a time. Raises InputError if the model in the config
    does not match the one in `source`, or if files are missing or unreadable.
    """
    config = load_config(config_file, overrides)
    settings = their_settings(source)
    if config.model.vocab_size is None:
        config = replace(config, model=replace(config.model, vocab_size=settings["vocab_size"]))
    check_same(source, config, settings)
    theirs, length = settings.get(POSITIONS), config.train.sequence_length
    exported = max_positions(config.model, length)
    if theirs not in (None, exported):
        print(
            f"note: {source} has {POSITIONS} {theirs}, but exporting this checkpoint would set it "
            f"to {exported}, because train.sequence_length is {length}"
        )
    if dropout := [f"{k} {v}" for k, v in settings.items() if "dropout" in k and v]:
        print(f"note: {source} has {', '.join(dropout)}, but runs train without dropout")
    if code := settings.get("auto_map"):
        print(
            f"note: {source} contains custom code, which is ignored (auto_map {code}): the weights "
            f"are read as those of transformers' {settings['architectures'][0]}"
        )
    with ExitStack() as stack:
        files = TheirFiles(source, stack)
        tensors = files.checked(their_tensors(config.model), tied=config.model.tie_embeddings)
        parts = grouped(tensors, lambda tensor: tensor.parameter)
        buffers = {name: part[0].view_shape for name, part in parts.items() if part[0].buffer}
        facts = {"step": 0, "source": source.resolve().name, "dtype": files.dtype}
        write_checkpoint(
            target,
            config,
            partial(read_parameter, parts, files),
            buffers,
            lambda folder: {
                **facts,
                "identity": copy_tokenizer(source, folder, settings["vocab_size"]),
            },
        )
    return files.dtype


def their_settings(source: Path) -> dict[str, Any]:
    """Return the settings in the config.json of `source`, filling in transformers' defaults for
    missing keys.

    Raises InputError if the file cannot be used, or if it specifies two different RoPE bases.
    """
    path = source / "config.json"
    if not path.is_file():
        raise InputError(
            f"{source} must be a Hugging Face model folder, but has no config.json"
            f"{near_name(source)}"
        )
    from transformers import AutoConfig

    try:
        with offline():
            config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # transformers raises many exception types for unknown models
        raise InputError(f"{path}: {first_line(error)}") from error
    written = read_settings(source)
    base, rope = written.get("rope_theta"), written.get("rope_parameters") or {}
    if base is not None and rope.get("rope_theta", base) != base:
        raise InputError(
            f"{path}: rope_theta and rope_parameters.rope_theta must be equal, got {base} and "
            f"{rope['rope_theta']}: transformers 4 reads the first key, and transformers 5 reads "
            "the second key; remove the wrong key"
        )
    settings: dict[str, Any] = config.to_dict()
    # Add the aliases under which transformers also reads some settings.
    return settings | {alias: settings[name] for alias, name in config.attribute_map.items()}


def write_config(source: Path, base: Path, target: Path) -> None:
    """Write a new config file `target` that extends `base` with the model settings from `source`.

    Raises InputError if `target` exists, or if the model cannot be imported.
    """
    if target.exists():
        raise InputError(f"--write-config {target} already exists; choose another file name")
    try:
        section = model_section(their_settings(source))
    except InexpressibleError as error:
        raise InputError(f"{source / 'config.json'}: {error}") from None
    content = {"base": os.path.relpath(base, target.parent), "model": {"replace": True, **section}}
    target.write_text(to_text(content), encoding="utf-8")


def check_same(source: Path, config: Config, settings: Mapping[str, Any]) -> None:
    """Raise InputError if the model in `config` does not match the one described by `settings`."""
    if config.pc is not None:
        raise InputError(
            "pc must be null for an import, because W cannot be recovered from PC(W) in the files"
        )
    try:
        expected = model_settings(config.model)
    except InexpressibleError as error:
        raise InputError(str(error)) from None
    problems = differences(expected, settings)
    if problems:
        remedy = "; pass --write-config NEW to write a config for this model"
        try:
            model_section(settings)
        except InexpressibleError:
            remedy = ""
        raise InputError(f"{source / 'config.json'}: {'; '.join(problems)}{remedy}")


class TheirFiles:
    """The tensors in a folder's safetensors files, read on demand.

    dtype   torch name of the weight dtype, set by `checked`
    """

    def __init__(self, source: Path, stack: ExitStack) -> None:
        self.source = source
        self.dtype = ""
        self._files: dict[str, Any] = {}
        paths = self._paths()
        if unread := sorted({*source.glob("*.safetensors")} - {*paths}):
            print(f"note: {source} contains unread files: {abridged([p.name for p in unread])}")
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                reason = f"it is {UNFETCHED}" if is_pointer(path) else error
                raise InputError(f"{path} cannot be read: {reason}") from None
            twice = self._files.keys() & set(file.keys())
            if twice:
                raise InputError(f"{path}: {abridged(twice)} must be in only one file, got several")
            self._files |= dict.fromkeys(file.keys(), file)

    def _paths(self) -> list[Path]:
        index, whole = self.source / INDEX_FILE, self.source / "model.safetensors"
        if not index.is_file() and not whole.is_file():
            names = sorted(path.name for path in self.source.iterdir() if path.suffix in FORMATS)
            if not names:
                raise InputError(f"{self.source} must contain {whole.name} or {INDEX_FILE}")
            if shards := list(filter(SHARD.fullmatch, names)):
                raise InputError(
                    f"{self.source} must contain {INDEX_FILE}, which lists the tensors in "
                    f"{abridged(shards)}: download or copy this file again"
                )
            raise InputError(
                f"{self.source} must contain {whole.name}, got only {abridged(names)}; convert the "
                "weights with transformers: AutoModelForCausalLM.from_pretrained("
                f'"{self.source}", dtype="auto").save_pretrained("NEW")'
            )
        if not index.is_file():
            return [whole]
        if whole.exists():
            raise InputError(
                f"{self.source} must contain either {index.name} or {whole.name}, got both; delete "
                "one of them"
            )
        try:
            content = read_json(index)
        except ValueError as error:
            raise InputError(f"{index} cannot be read: {error}") from None
        check_shape(content, {"weight_map": {...: str}}, str(index))
        files = sorted(set(content["weight_map"].values()))
        return [self.source / Path(name).name for name in files]

    def checked(self, tensors: Iterable[TheirTensor], *, tied: bool) -> list[TheirTensor]:
        """Return `tensors` if the files contain exactly these names and shapes, in a single dtype.

        With `tied`, the files may also contain a head equal to the embedding. Raises InputError for
        missing or unexpected tensors, wrong shapes or dtypes, or a tied head that does not match
        the embedding.
        """
        expected = {tensor.name: tensor for tensor in tensors}
        missing = [name for name in expected if name not in self._files]
        if missing:
            others = self._files.keys() - expected.keys()
            instead = f"; the files contain {abridged(others)} instead" if others else ""
            raise InputError(
                f"{self.source} is missing tensors of the model in the config: {abridged(missing)}"
                f"{instead}"
            )
        kinds = set()
        for name, tensor in expected.items():
            part = self._files[name].get_slice(name)
            if tuple(part.get_shape()) != tensor.shape:
                raise InputError(
                    f"{self.source}: {name} must have shape {tensor.shape}, "
                    f"got {tuple(part.get_shape())}"
                )
            if not tensor.buffer:
                kinds.add(part.get_dtype())
        legal = {*expected, HEAD} if tied else expected.keys()
        more = [name for name in self._files.keys() - legal if not name.endswith(IGNORED)]
        if more:
            raise InputError(
                f"{self.source} contains tensors that do not belong to the model in the config: "
                f"{abridged(more)}"
            )
        if len(kinds) != 1 or not kinds <= DTYPES.keys():
            raise InputError(
                f"{self.source}: all weights must have the same dtype, one of "
                f"{', '.join(DTYPES)}, got {', '.join(sorted(kinds))}"
            )
        self.dtype = DTYPES[kinds.pop()]
        if tied and HEAD in self._files:
            head, embedding = self.read(HEAD), self.read(EMBEDDING)
            if head.dtype != embedding.dtype or not torch.equal(head, embedding):
                raise InputError(
                    f"{self.source}: {HEAD} must equal {EMBEDDING}, because tie_word_embeddings is "
                    "true"
                )
        return list(expected.values())

    def read(self, name: str) -> Tensor:
        """Read a tensor in its stored dtype. Raises InputError if the tensor is not finite."""
        tensor: Tensor = self._files[name].get_tensor(name)
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{self.source}: {name} must be finite, got NaN or infinity")
        return tensor


def copy_tokenizer(source: Path, folder: Path, rows: int) -> dict[str, dict[str, str]]:
    """Copy the tokenizer files to `folder`. Return the tokenizer entry for the checkpoint's
    identity, or {} if there is no tokenizer. `rows` is the model's number of token ids.

    Raises InputError if a symlink points outside `source` or a file cannot be parsed.
    """
    files = own_files(source, (TOKENIZER_FILE, *COMPANIONS, "generation_config.json"))
    for name, content in files.items():
        try:
            if name == TOKENIZER_FILE:
                ids = max(Tokenizer.from_buffer(content).get_vocab().values(), default=-1) + 1
                if ids > rows:
                    print(
                        f"note: {source / name} has {ids:,} token ids, but the model has {rows:,}, "
                        "so exporting this model requires --tokenizer PATH or --no-tokenizer"
                    )
            elif name.endswith(".json"):
                if not isinstance(values := parse_json(content), dict):
                    raise ValueError("the content must be a JSON object")
                ends = values.get("eos_token_id")
                if isinstance(ends, list) and len(ends) > 1:
                    print(
                        f"note: {source / name} has several end tokens, {ends}, but exporting this "
                        "checkpoint would keep only the tokenizer's end-of-document token"
                    )
        except Exception as error:  # tokenizers raises bare Exception
            raise InputError(f"{source / name} cannot be used: {error!s:.200}") from None
    for name, content in files.items():
        (folder / name).write_bytes(content)
    if TOKENIZER_FILE not in files:
        print(
            f"note: {source} has no {TOKENIZER_FILE}, so exporting this model requires --tokenizer "
            f"PATH; if the folder has a tokenizer in another format, convert it before importing: "
            f'AutoTokenizer.from_pretrained("{source}").save_pretrained("{source}")'
        )
        return {}
    return {"tokenizer": {"sha256": sha256(files[TOKENIZER_FILE]).hexdigest()}}


def read_parameter(parts: Mapping[str, list[TheirTensor]], files: TheirFiles, name: str) -> Tensor:
    """Return a parameter or buffer of our model in float32, assembled from `parts` in the files.

    Vocabulary padding rows are 0.
    """
    value = torch.zeros(parts[name][0].view_shape, dtype=torch.float32)
    for part in parts[name]:
        part.put(value, files.read(part.name))
    return value
