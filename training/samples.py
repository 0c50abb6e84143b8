"""Samples of text: the model's continuations of the beginning of each validation set."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from models.blocks.attention import documents_of
from models.layout import context_chunks, context_part
from parallel.comm.collectives import MAX, all_reduce_
from parallel.comm.groups import Groups
from parallel.model import Batch, LossFunction, ParallelModel
from training.config import Config
from training.data.batches import on_device
from training.data.build_data import needed_tokenizer
from training.data.token_bytes import open_tokenizer
from training.data.validation_data import ValidationData
from training.evaluation import whole_rounds


class Sampler:
    """Generator of samples of text, with the prompts and the tokenizer of a run.

    prompts  `[sets, sequence_length]`; the first `prompt` tokens of each row are the prompt
    firsts   result of `written_documents` for each set
    tokens   number of tokens of a continuation
    """

    def __init__(self, config: Config, sets: Sequence[ValidationData]) -> None:
        """Read the prompts and the tokenizer.json.

        Raises ConfigError if there is no tokenizer, DataError if the package `tokenizers` cannot
        read it.
        """
        assert config.model.vocab_size is not None  # `with_vocabulary` has filled it in
        self.tokenizer = open_tokenizer(needed_tokenizer(config, "validation.samples_interval"))
        self.names = [each.name for each in sets]
        self.prompts = torch.stack([torch.from_numpy(each.set.window(0)[:-1]) for each in sets])
        self.prompt = config.validation.prompt_tokens(config.train.sequence_length)
        self.firsts = [written_documents(each, self.prompt) for each in sets]
        self.tokens = config.validation.samples_tokens
        self.vocab_size = config.model.vocab_size

    def sample(
        self, model: ParallelModel, groups: Groups, alive: Callable[[], None]
    ) -> dict[str, str]:
        """Return `sample/<set>/prompt` and `sample/<set>/text` of each set, equal on all ranks.

        `alive` is called after every generated token.
        """
        written = self.prompts.clone()
        written[:, self.prompt :] = 0  # the causal mask hides these tokens
        for place in range(self.prompt, self.prompt + self.tokens):
            written[:, place] = next_tokens(
                model, groups, written, place - 1, self.vocab_size, self.firsts
            )
            alive()
        texts = {}
        for name, row in zip(self.names, written.tolist(), strict=True):
            texts[f"sample/{name}/prompt"] = self._text(row[: self.prompt])
            texts[f"sample/{name}/text"] = self._text(row[self.prompt :][: self.tokens])
        return texts

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def build_sampler(config: Config, validation: Sequence[ValidationData]) -> Sampler | None:
    """Return the generator of samples of text, or None if the config requests no samples."""
    if config.validation.samples_interval == 0 or not validation:
        return None
    return Sampler(config, validation)


def written_documents(data: ValidationData, prompt: int) -> Tensor | None:
    """Return the start position of each token's document in a sample, `[sequence_length]`.

    In the first `prompt` tokens, documents begin where they begin in the set. Generated tokens
    continue the last document. The result is None if attention crosses document borders.
    """
    if not data.borders.mask:
        return None
    firsts = torch.from_numpy(data.set.sample(0, data.borders)[1, :-1])
    firsts[prompt:] = firsts[prompt - 1].clone()
    return firsts


def next_tokens(
    model: ParallelModel,
    groups: Groups,
    windows: Tensor,
    place: int,
    vocab_size: int,
    firsts: Sequence[Tensor | None],
) -> Tensor:
    """Return the most probable token after position `place` of each window, int64 `[rows]`.

    `windows` is `[rows, sequence_length]`, equal on all ranks. `firsts` contains for each window
    a result of `written_documents`. Each window is a micro-batch. Every data-parallel rank computes
    all windows.
    """
    rows = len(windows)
    count = whole_rounds(rows, groups)

    def batches() -> Iterator[Batch]:
        move = partial(on_device, device=groups.device)
        context = {"rank": groups.context.rank, "size": groups.context.size}
        for row in (min(i, rows - 1) for i in range(count)):
            batch: Batch = {
                "tokens": context_part(move(windows[row, None]), 1, **context).contiguous()
            }
            begun = firsts[row]
            if begun is not None:
                batch["documents"] = documents_of(begun[None], move, **context)
            yield batch

    def choose(batch: Batch) -> LossFunction:
        return lambda logits: (
            logits.new_zeros(()),
            {"token": best_token(logits, groups, model, place, vocab_size)},
        )

    figures: list[dict[str, Any]] = model.forward_backward(
        batches, choose, microbatches=count, micro_batch=1, train=False
    )
    # Only the rank of the last stage that has this position computes tokens; others have zeros.
    tokens = torch.zeros(count, dtype=torch.int64, device=groups.device)
    for i, figure in enumerate(figures):
        tokens[i] = figure["token"]
    for axis in (groups.context, groups.pipeline):
        all_reduce_(tokens, axis, model.comm_volume, "samples")
    return tokens[:rows].cpu()


def best_token(
    logits: Tensor, groups: Groups, model: ParallelModel, place: int, vocab_size: int
) -> Tensor:
    """Return the token with the largest logit at `place`, 0-d.

    `logits` is `[1, s / context, v / tensor]`. If several logits are the largest, the first token
    is returned. On context ranks that do not have the position, the result is 0. Padding rows of
    the vocabulary are ignored.
    """
    length = logits.shape[1] * groups.context.size
    chunks = context_chunks(length, rank=groups.context.rank, size=groups.context.size)
    mine = [position for chunk in chunks for position in chunk]
    if place not in mine:
        return torch.zeros((), dtype=torch.int64, device=logits.device)
    row = logits[0, mine.index(place)].float()
    tensor = groups.tensor
    ids = torch.arange(len(row), device=row.device) + tensor.rank * len(row)
    row = row.masked_fill(ids >= vocab_size, -torch.inf)
    largest = all_reduce_(row.max(), tensor, model.comm_volume, "samples", MAX)
    # The largest negated id is the smallest id; ranks without the largest logit add the minimum.
    first = torch.where(row == largest, -ids, -len(row) * tensor.size).max()
    return -all_reduce_(first, tensor, model.comm_volume, "samples", MAX)
