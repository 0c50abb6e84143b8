"""What a planned run reads of each set of its data, in each phase."""

import math
from collections import Counter
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
    samples      of all sets
    weights      of the sets, by name, each above 0
    """

    after_steps: int
    samples: int
    weights: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        """Share of each set in the samples; all together are 1."""
        total = math.fsum(self.weights.values())
        return {name: weight / total for name, weight in self.weights.items()}

    def tokens(self, sequence_length: int) -> dict[str, int]:
        """Return what the samples predict of each set, to the token."""
        used = build_blend(self.weights).used(self.samples).tolist()
        return {n: count * sequence_length for n, count in zip(self.weights, used, strict=True)}


def phase_uses(config: Config) -> list[PhaseUse]:
    """Return what a run from step 0 on reads in each phase."""
    train = config.train
    first = {name: each.weight for name, each in with_mock_sets(config.data).train.items()}
    mixtures = [first, *(phase.weights for phase in config.data.phases)]
    starts = [0, *config.phase_starts()]
    uses, tokens = [], 0
    for start, end, weights in zip(starts, [*starts[1:], train.steps], mixtures, strict=True):
        samples = train.samples(start, tokens, end)
        tokens += samples * train.sequence_length
        named = {name: weight for name, weight in sorted(weights.items()) if weight}
        uses.append(PhaseUse(start, samples, named))
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
    uses, sizes, tokens = phase_uses(config), set_sizes(config), Counter[str]()
    parts = [use.tokens(config.train.sequence_length) for use in uses]
    for part in parts:
        tokens.update(part)
    epochs = {name: tokens[name] / size for name, size in sizes.items() if size and name in tokens}
    header = ("set", *(f"from step {use.after_steps + 1:,}" for use in uses), "tokens", "epochs")
    rows = [
        (
            name,
            *(
                f"{use.shares.get(name, 0):.1%}, {part.get(name, 0):,}"
                for use, part in zip(uses, parts, strict=True)
            ),
            f"{count:,}",
            f"{epochs[name]:.2f}" if name in epochs else "unknown",
        )
        for name, count in tokens.items()
    ]
    missing = ", ".join(sorted(tokens.keys() - epochs.keys()))
    unknown = f"epochs are unknown without the manifest.json of {missing}" if missing else ""
    return "\n".join(filter(None, (table(header, rows), unknown, repeats(epochs))))
