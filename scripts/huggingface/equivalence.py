"""Compare the trained model with its export, as loaded by transformers."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from models.blocks.in_graph_pc import precondition_
from models.families import FAMILIES, all_units
from models.layout import ChunkSpec
from parallel.comm import groups as process_groups
from parallel.model import named_buffers, named_parameters
from scripts.huggingface.loaded_tokenizer import TEXT, checked_tokenizer
from scripts.huggingface.model_folder import load_whole, offline
from training.assignments import unit_options
from training.checkpoint.stored_checkpoint import CheckpointWeights, StoredTensors
from training.errors import InputError
from training.report.text import progress

TOLERANCE = 1e-4
"""Maximum difference in float32 logits that is attributed to rounding. If the largest logit exceeds
1, the difference is divided by the largest logit."""


def verify(weights: CheckpointWeights, folder: Path) -> None:
    """Print the largest difference in float32 logits between our model and the export in `folder`.

    Only one of the two models is in memory at a time. Raises InputError if transformers reports
    missing or unexpected tensors, or if the difference exceeds TOLERANCE.
    """
    length = weights.config.train.sequence_length
    if (folder / "tokenizer.json").exists():
        try:
            tokenizer = checked_tokenizer(folder, with_template=weights.info.imported)
        except InputError as error:
            raise InputError(
                f"{error}; to export the model, pass --no-tokenizer, and load the tokenizer with "
                "PreTrainedTokenizerFast(tokenizer_file=...)"
            ) from None
        options = {"truncation": True, "max_length": length, "add_special_tokens": False}
        tokens = torch.tensor([tokenizer(TEXT, **options)["input_ids"]])
    else:  # ids from the whole vocabulary
        vocabulary = weights.config.model.vocab_size
        assert vocabulary is not None
        tokens = (torch.arange(min(length, 128)) * 7919 % vocabulary)[None]
    with progress(lambda: "loading the exported model in float32, computing logits"):
        exported, dtype = their_logits(folder, tokens)
    with progress(lambda: "loading the trained model in float32, comparing logits"):
        ours = our_logits(weights, tokens, dtype)
    difference = (ours - exported).abs().max().item()
    largest = ours.abs().max().item()
    name = str(dtype).removeprefix("torch.")
    rounded = "" if dtype == torch.float32 else f", both models with weights rounded to {name}"
    print(
        f"verified: the float32 logits of {tokens.numel()} tokens differ by at most "
        f"{difference:.2e} (largest logit {largest:.2f}{rounded})"
    )
    if not difference <= TOLERANCE * max(1.0, largest):
        raise InputError(
            f"the exported model's logits must match the trained model's to within {TOLERANCE:g} "
            f"times the largest logit ({largest:.3g}), got a difference of {difference:.3g}"
        )


@torch.no_grad()
def their_logits(folder: Path, tokens: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return the float32 logits `[1, n, vocabulary]` and stored dtype of the model in `folder`."""
    from transformers import AutoConfig

    with offline():
        stored = AutoConfig.from_pretrained(folder, trust_remote_code=False).dtype
    model = load_whole(folder, dtype=torch.float32)
    logits: Tensor = model.eval()(tokens).logits
    return logits, stored


@torch.no_grad()
def our_logits(weights: CheckpointWeights, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Return our model's float32 logits `[1, n, vocabulary]`, with weights rounded to `dtype`.

    PC layers are computed in the graph, by code that is independent of the export code.
    """
    # Other attention kernels require GPUs or packages.
    model = replace(weights.config.model, attention_backend="sdpa", attention_kernel="auto")
    family = FAMILIES[model.family]
    stage = ChunkSpec(tuple(range(model.layers)))
    with one_process():
        engine = family.code.transformer_config(model, dtype=torch.float32)
        chunk = family.code.build(model, engine, stage, sequence_length=tokens.shape[1])
        parameters = named_parameters(family.code.parameter_names, [chunk], [stage])
        fill(weights, chunk, parameters)
        for parameter in chunk.parameters():
            parameter.copy_(parameter.to(dtype))
        stored = StoredTensors(weights.info.state)
        buffers = {f"buffer/{name}": value for name, value in named_buffers([chunk], parameters)}
        stored.read_into({key: value for key, value in buffers.items() if key in stored})
        logits: Tensor = chunk.eval()(tokens, torch.arange(tokens.shape[1])[None], None)
    return logits[..., : model.vocab_size].float()


def fill(weights: CheckpointWeights, chunk: torch.nn.Module, parameters: dict[str, Any]) -> None:
    """Copy the checkpoint's weights to the model, using PC(W) as the weights of PC layers."""
    config = weights.config
    stored = StoredTensors(weights.info.state)
    units = all_units(config.model, **unit_options(config))
    for unit in units:
        stored.read_into({f"weight/{unit.name}": unit.view(parameters[unit.parameter])})
    if config.pc is None:
        return
    for effective in precondition_([chunk], parameters, units, config.pc, {}):
        for i, unit in enumerate(effective.units):
            u, v = effective.pair(i)
            gamma = effective.gamma.data[i : i + 1]
            places = {f"pc/{unit.name}/u": u[0], f"pc/{unit.name}/v": v[0]}
            stored.read_into({**places, f"weight/{unit.name}.gamma": gamma})
    for module in list(chunk.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Context manager that sets up process groups for a single process, unless process groups
    already exist."""
    if torch.distributed.is_initialized():
        yield
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    process_groups.initialize()
    try:
        yield
    finally:
        process_groups.shutdown()
