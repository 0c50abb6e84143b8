"""Text samples: the model's continuation of the first tokens of each validation set."""

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
    """Generates text samples with a run's prompts and tokenizer.

    prompts  `[sets, sequence_length]`; the first `prompt` tokens of each row are the prompt
    firsts   result of `written_documents` for each set
    tokens   number of tokens to generate
    """

    def __init__(self, config: Config, sets: Sequence[ValidationData]) -> None:
        """Read the prompts and the tokenizer.json.

        Raises ConfigError if there is no tokenizer, and DataError if the package `tokenizers`
        cannot read the file.
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
        self, model: ParallelModel, groups: Groups, heartbeat: Callable[[], None]
    ) -> dict[str, str]:
        """Return `sample/<set>/prompt` and `sample/<set>/text` for each set. All ranks get the same
        texts.

        `heartbeat` is called after every generated token.
        """
        written = self.prompts.clone()
        written[:, self.prompt :] = 0  # hidden by the causal mask
        for position in range(self.prompt, self.prompt + self.tokens):
            written[:, position] = next_tokens(
                model, groups, written, position - 1, self.vocab_size, self.firsts
            )
            heartbeat()
        texts = {}
        for name, row in zip(self.names, written.tolist(), strict=True):
            texts[f"sample/{name}/prompt"] = self._text(row[: self.prompt])
            texts[f"sample/{name}/text"] = self._text(row[self.prompt :][: self.tokens])
        return texts

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))


def build_sampler(config: Config, validation: Sequence[ValidationData]) -> Sampler | None:
    """Return a text sampler, or None if the config does not enable samples."""
    if config.validation.samples_interval == 0 or not validation:
        return None
    return Sampler(config, validation)


def written_documents(data: ValidationData, prompt: int) -> Tensor | None:
    """For each token in a sample, return the position at which the token's document starts,
    `[sequence_length]`.

    The first `prompt` tokens belong to the same documents as in the set. Generated tokens continue
    the last of these documents. The result is None if attention crosses document borders.
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
    position: int,
    vocab_size: int,
    firsts: Sequence[Tensor | None],
) -> Tensor:
    """Return the token that is most likely to follow `position` in each window, int64 `[rows]`.

    `windows` is `[rows, sequence_length]` and identical on all ranks. `firsts` contains the result
    of `written_documents` for each window. Each window is one micro-batch. Every data-parallel rank
    computes all windows.
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
            {"token": best_token(logits, groups, model, position, vocab_size)},
        )

    figures: list[dict[str, Any]] = model.forward_backward(
        batches, choose, microbatches=count, micro_batch=1, train=False
    )
    # Only the rank of the last stage that holds this position computes tokens; all other ranks add
    # zeros.
    tokens = torch.zeros(count, dtype=torch.int64, device=groups.device)
    for i, figure in enumerate(figures):
        tokens[i] = figure["token"]
    for axis in (groups.context, groups.pipeline):
        all_reduce_(tokens, axis, model.comm_volume, "samples")
    return tokens[:rows].cpu()


def best_token(
    logits: Tensor, groups: Groups, model: ParallelModel, position: int, vocab_size: int
) -> Tensor:
    """Return the token whose logit at `position` is largest, as a 0-d tensor.

    `logits` is `[1, s / context, v / tensor]`. If several logits are equally large, the smallest
    token id is chosen. On context ranks that do not hold the position, the result is 0. Padding
    rows of the vocabulary are ignored.
    """
    length = logits.shape[1] * groups.context.size
    chunks = context_chunks(length, rank=groups.context.rank, size=groups.context.size)
    held = [index for chunk in chunks for index in chunk]
    if position not in held:
        return torch.zeros((), dtype=torch.int64, device=logits.device)
    row = logits[0, held.index(position)].float()
    tensor = groups.tensor
    ids = torch.arange(len(row), device=row.device) + tensor.rank * len(row)
    row = row.masked_fill(ids >= vocab_size, -torch.inf)
    largest = all_reduce_(row.max(), tensor, model.comm_volume, "samples", MAX)
    # The maximum of the negated ids is the negated smallest id. Ranks without the largest logit
    # contribute a lower bound on it.
    first = torch.where(row == largest, -ids, -len(row) * tensor.size).max()
    return -all_reduce_(first, tensor, model.comm_volume, "samples", MAX)
