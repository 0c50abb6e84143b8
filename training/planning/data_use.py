"""What a planned run reads of each set of its data, in each phase."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training.build import with_mock_sets
from training.config import Config
from training.data.manifest import manifest_of
from training.data.order import build_blend, repeats
from training.report.table import table


@dataclass(frozen=True)
class PhaseUse:
    """What a run reads in one phase.

    after_steps  steps before the phase
    shares       of the samples, by set
    tokens       that its samples predict, by set
    """

    after_steps: int
    shares: Mapping[str, float]
    tokens: Mapping[str, int]


def phase_uses(config: Config) -> list[PhaseUse]:
    """Return what a run from step 0 on reads in each phase, to the token."""
    train = config.train
    first = {name: each.weight for name, each in with_mock_sets(config.data).train.items()}
    mixtures = [first, *(phase.weights for phase in config.data.phases)]
    starts = [0, *config.phase_starts()]
    uses, tokens = [], 0
    for start, end, weights in zip(starts, [*starts[1:], train.steps], mixtures, strict=True):
        samples = train.samples(start, tokens, end)
        tokens += samples * train.sequence_length
        named = {name: weight for name, weight in sorted(weights.items()) if weight}
        used = build_blend(named).used(samples).tolist()
        read = {n: count * train.sequence_length for n, count in zip(named, used, strict=True)}
        total = math.fsum(named.values())
        uses.append(PhaseUse(start, {n: w / total for n, w in named.items()}, read))
    return uses


def set_sizes(config: Config) -> dict[str, int]:
    """Return the tokens of an epoch of each set whose manifest is there."""
    sizes, length = {}, config.train.sequence_length
    for name, each in {} if config.data.mock else config.data.train.items():
        if (manifest := manifest_of(each.path)) is not None:
            sizes[name] = (manifest.sets[Path(each.path).name].tokens - 1) // length * length
    return sizes


def data_table(config: Config) -> str:
    """Return a row per set with its shares, tokens and epochs, and which are read repeatedly."""
    uses, sizes = phase_uses(config), set_sizes(config)
    tokens: dict[str, int] = {}
    for use in uses:
        for name, count in use.tokens.items():
            tokens[name] = tokens.get(name, 0) + count
    epochs = {name: tokens[name] / size for name, size in sizes.items() if size and name in tokens}
    header = ("set", *(f"from step {use.after_steps + 1:,}" for use in uses), "tokens", "epochs")
    rows = [
        (
            name,
            *(f"{use.shares.get(name, 0):.1%}, {use.tokens.get(name, 0):,}" for use in uses),
            f"{count:,}",
            f"{epochs[name]:.2f}" if name in epochs else "?",
        )
        for name, count in tokens.items()
    ]
    text = repeats(epochs)
    return table(header, rows) + (f"\n{text}" if text else "")
