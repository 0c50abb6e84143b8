"""The description of a study: variants, seeds, and tuning in this or another study."""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import field
from pathlib import Path
from typing import Final

from models.section import Section
from training.config import InvalidConfigError
from training.config.binding import bind
from training.config.yaml_files import flat, merged_overrides, read_merged, replaced

VARIABLES: Final = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS",
    "KMP_BLOCKTIME", "MALLOC_ARENA_MAX", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TOP_PAD_", "MALLOC_TRIM_THRESHOLD_", "MKL_CBWR", "MKL_NUM_THREADS", "NCCL_ALGO",
    "NCCL_PROTO", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA",
    "PYTORCH_ALLOC_CONF",
)  # fmt: skip
"""Environment variables that a study may set. None of these variables can load or run code."""


def first_key(keys: str) -> str:
    """Return the first key of `KEY+KEY`, the grid syntax for setting several keys to one value."""
    return keys.split("+")[0]


def settings(overrides: Sequence[str]) -> dict[str, str]:
    """Convert a list of overrides to a dict. The last value of each key wins."""
    return dict(override.split("=", 1) for override in overrides)


class Stage(Section):
    """The candidates of a search stage, specified by exactly one of three fields.

    grid     values for each key; every combination is a candidate. `KEY+KEY` sets several keys to
             the same value
    factors  like `grid`, but with multiples of the value tuned in `tuned_in`
    choices  candidates given as lists of overrides
    """

    grid: dict[str, list[float]] = field(default_factory=dict)
    factors: dict[str, list[float]] = field(default_factory=dict)
    choices: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if sum(map(bool, (self.grid, self.factors, self.choices))) != 1:
            raise ValueError("exactly one of grid, factors and choices must be set")

    def candidates(self, tuned: list[str]) -> list[list[str]]:
        """Return the overrides of each candidate. `tuned` holds the values to multiply by
        `factors`. Raises InvalidConfigError if `tuned` does not set a key in `factors`."""
        if self.choices:
            return self.choices
        values, chosen = dict(self.grid), settings(tuned)
        for keys, factors in self.factors.items():
            key = first_key(keys)
            if key not in chosen:
                raise InvalidConfigError(
                    [f"factors: the study in tuned_in must tune {key}, got {tuned}"]
                )
            values[keys] = [float(chosen[key]) * factor for factor in factors]
        return [
            [
                f"{key}={value:.6g}"
                for keys, value in zip(values, combination, strict=True)
                for key in keys.split("+")
            ]
            for combination in itertools.product(*values.values())
        ]

    def count(self) -> int:
        """Return the number of candidates."""
        values = (self.grid or self.factors).values()
        return len(self.choices) or math.prod(map(len, values))


class Rung(Section):
    """A rung trains candidates for `share` of the full length and keeps the best `keep` candidates.

    Candidates are ranked by their mean loss over `seeds` (default: the search's seed).
    """

    share: float
    keep: int
    seeds: list[int] = field(default_factory=list)


class Search(Section):
    """Successive halving with the same rungs for all variants.

    Each stage starts from the settings chosen in the previous one.
    """

    seed: int
    stages: dict[str, list[Rung]]


class Curve(Section):
    """Additional runs of `variant` at other `shares` of the full length.

    The resulting curve of loss over tokens shows how many tokens the variant needs to reach a given
    loss.
    """

    variant: str
    shares: list[float]
    seeds: list[int]


class TunedIn(Section):
    """Another study that tuned the settings. Each variant starts from the settings that the other
    study chose for the variant named in `tuned_as`. By default, both variants have the same name.

    results  folder with the other study's results
    """

    results: str


class Variant(Section):
    """A variant: a config file with overrides.

    against   name of the variant to compare this one with
    differs   keys that differ intentionally between the config files of this variant and `against`;
              other differing keys are reported on the console and in the tables
    tuned_as  variant in the `tuned_in` study whose settings this variant starts from; null: the
              variant of the same name
    search    candidates for each search stage
    """

    config: str
    overrides: list[str] = field(default_factory=list)
    against: str | None = None
    differs: list[str] = field(default_factory=list)
    tuned_as: str | None = None
    search: dict[str, Stage] = field(default_factory=dict)


class Study(Section):
    """Variants to compare, with common seeds and `overrides`.

    A variant's own overrides take precedence over the common ones.

    full          integer settings of a full-length run, such as train.steps; in shorter runs, these
                  settings are multiplied by the run's share
    environment   environment variables for every run; names must be in `VARIABLES`
    """

    title: str
    seeds: list[int]
    variants: dict[str, Variant]
    overrides: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    full: dict[str, int] = field(default_factory=dict)
    search: Search | None = None
    curve: Curve | None = None
    tuned_in: TunedIn | None = None

    def length(self, share: float) -> list[str]:
        """Return the overrides that shorten a run to `share` of the full length."""
        return [f"{key}={max(1, round(value * share))}" for key, value in self.full.items()]

    def budget(self, name: str) -> float:
        """Return a variant's tuning cost in units of full-length runs, including reused runs."""
        if self.search is None:
            return 0.0
        total = 0.0
        for stage, rungs in self.search.stages.items():
            entering = self.variants[name].search[stage].count()
            for rung in rungs:
                total += entering * rung.share * max(1, len(rung.seeds))
                entering = rung.keep
        return total


def read_study(path: Path, given: Sequence[str] = ()) -> Study:
    """Read a study file. `given` are overrides from the command line.

    Raises InvalidConfigError listing every problem in the file and in `given`.
    """
    try:
        study = bind(Study, read_merged(path))
        problems = _problems(study, given)
    except InvalidConfigError as error:
        problems = error.problems
    if problems:
        named = [text if str(path) in text else f"{path}: {text}" for text in problems]
        raise InvalidConfigError(named)
    return study


def _problems(study: Study, given: Sequence[str]) -> list[str]:
    """Return the problems in a study and in the overrides `given` on the command line."""
    problems = [
        f"environment.{name} must be one of {', '.join(VARIABLES)}"
        for name in study.environment
        if name not in VARIABLES
    ]
    problems += [
        f"environment.{name} must not contain a NUL character, got {value!r:.40}"
        for name, value in study.environment.items()
        if "\0" in value
    ]
    if len(set(study.seeds)) < max(1, len(study.seeds)):
        problems.append(f"seeds must be a non-empty list of distinct numbers, got {study.seeds}")
    problems += _override_problems("overrides", study.overrides, study.full)
    problems += _override_problems("the command line", given)
    for name, variant in study.variants.items():
        problems += _override_problems(f"{name}.overrides", variant.overrides, study.full)
        if variant.against is not None and variant.against not in study.variants:
            problems.append(f"{name}.against must be a variant of the study, got {variant.against}")
        if variant.differs and variant.against is None:
            problems.append(f"{name}.differs requires against, got null")
        problems += _search_problems(study, name)
    for stage, rungs in (study.search.stages if study.search is not None else {}).items():
        shares = [rung.share for rung in rungs]
        if not all(0 < share <= 1 for share in shares):
            problems.append(f"search.stages.{stage}: shares must be in (0, 1], got {shares}")
    if not problems:
        budgets = {name: study.budget(name) for name in study.variants}
        if len(set(budgets.values())) > 1:
            shown = ", ".join(f"{name} {budget:g}" for name, budget in budgets.items())
            problems.append(
                f"all variants must have the same tuning budget in full runs, got {shown}"
            )
    if study.curve is not None and study.curve.variant not in study.variants:
        problems.append(f"curve.variant must be one of the variants, got {study.curve.variant}")
    if (study.search or study.curve) and not study.full:
        problems.append("full must be set if the study has search or curve, got {}")
    return problems


def _override_problems(
    origin: str, overrides: Sequence[str], full: Collection[str] = ()
) -> list[str]:
    """Return the problems in a list of overrides from `origin`: keys set twice, and keys that the
    study itself sets in each run. Keys in `full` (`Study.full`) other than train.steps may be
    overridden."""
    problems = [f"{origin} must set each key only once: {text}" for text in replaced(overrides)]
    given = {key for key, _ in flat(merged_overrides(overrides))}
    sources = {"seed": "seeds", "run.dir": "the study's folder"}
    sources |= {"train.steps": "full"} if "train.steps" in full else {}
    return problems + [
        f"{origin} must not set {key}, which the study sets from {source}"
        for key, source in sources.items()
        if key in given
    ]


def _search_problems(study: Study, name: str) -> list[str]:
    """Return the problems in a variant's search."""
    stages = study.search.stages if study.search is not None else {}
    stages_given = study.variants[name].search
    if list(stages_given) != list(stages):
        return [f"{name}.search must have the stages {list(stages)}, got {list(stages_given)}"]
    problems = []
    for stage, rungs in stages.items():
        sizes = [stages_given[stage].count(), *(rung.keep for rung in rungs)]
        falling = all(a > b for a, b in itertools.pairwise(sizes))
        if not rungs or sizes[-1] != 1 or not falling:
            problems.append(
                f"{name}: the number of candidates must decrease at every rung of {stage} and end "
                f"at 1, got {sizes}"
            )
        problems += [
            f"search.stages.{stage}: seeds must be distinct, got {rung.seeds}"
            for rung in rungs
            if len(set(rung.seeds)) < len(rung.seeds)
        ]
        if stages_given[stage].factors and study.tuned_in is None:
            problems.append(f"{name}: factors in {stage} require tuned_in, got null")
    return problems
