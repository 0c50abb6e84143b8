"""What a complete study of optimizers answers, in sentences that its results decide."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scripts.studies.comparison import with_error
from scripts.studies.evidence import (
    Difference,
    Evidence,
    Ratio,
    basin,
    differences,
    step_seconds,
    token_speedup,
)

ADAMW: Final = "AdamW"
PC: Final = " + PC"
"""What the name of a variant with PC layers ends in."""
BASINS: Final = (0.01, 0.05)
"""Nats above the best loss within which a rate belongs to the basin."""
PUBLISHED_SPEED: Final = (1.3, 2.0)
"""Tokens of tuned AdamW over those of Muon in public comparisons of small models."""


@dataclass(frozen=True)
class Sides:
    """Variants by the sign of a difference: below and above 0, or 0 within the interval."""

    below: list[str]
    above: list[str]
    neither: list[str]


def sides(found: Mapping[str, Difference]) -> Sides:
    """The variants of `found`, each on its side."""

    def those(belongs: Callable[[Difference], bool]) -> list[str]:
        return [name for name, each in found.items() if belongs(each)]

    return Sides(
        below=those(lambda each: each.high < 0),
        above=those(lambda each: each.low > 0),
        neither=those(lambda each: each.low <= 0 <= each.high),
    )


def listed(names: Iterable[str]) -> str:
    """`a, b and c`."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def answer(study: Evidence) -> list[str]:
    """The sentences of the page, a paragraph each; none before the study is complete."""
    if not study.complete:
        return []
    found = [ranking(study), against_adamw(study), with_pc(study), in_time(study), failures(study)]
    return [each for each in found if each]


def best_variant(study: Evidence) -> str:
    """The variant with the smallest mean loss."""
    rows = [row for row in study.rows if row["loss"] is not None]
    return str(min(rows, key=lambda row: row["loss"])["variant"])


def ranking(study: Evidence) -> str:
    """Which variant has the smallest loss, and which cannot be told from it."""
    best = best_variant(study)
    row = study.row(best)
    assert row is not None
    close = sides(differences(study, best)).neither
    loss = with_error(f"{row['loss']:.4f}", row["error"])
    text = f"{best} has the smallest loss, {loss}"
    if not close:
        return f"{text}; every other variant's is larger, and no interval holds 0."
    return f"{text}; {listed(close)} cannot be told from it."


def against_adamw(study: Evidence) -> str:
    """On which side of tuned AdamW the others are."""
    found = differences(study, ADAMW)
    by = sides(found)
    parts = [
        f"{listed(f'{name} ({found[name].value:+.4f})' for name in names)} {verb}"
        for names, verb in (
            (by.below, "below"),
            (by.above, "above"),
            (by.neither, "not told from it"),
        )
        if names
    ]
    return f"From tuned AdamW, in nats per token: {'; '.join(parts)}." if parts else ""


def pc_differences(study: Evidence) -> dict[str, Difference]:
    """The difference that PC layers make, by rule."""
    found = {}
    for name in study.study.variants:
        rule = name.removesuffix(PC)
        each = differences(study, rule).get(name) if rule != name else None
        if each is not None:
            found[rule] = each
    return found


def with_pc(study: Evidence) -> str:
    """Under which rules PC layers help."""
    found = pc_differences(study)
    by = sides(found)
    parts = [
        text.format(listed(f"{name} ({found[name].value:+.4f})" for name in names))
        for names, text in (
            (by.below, "lower the loss under {}"),
            (by.above, "raise it under {}"),
            (by.neither, "change nothing that these seeds show under {}"),
        )
        if names
    ]
    return f"PC layers {'; '.join(parts)}." if parts else ""


def time_speedup(study: Evidence, variant: str) -> Ratio | None:
    """Seconds on this CPU that the tuned baseline needs for the variant's loss, over its own."""
    tokens, base = token_speedup(study, variant), study.baseline()
    mine = step_seconds(study, variant)
    unit = step_seconds(study, base) if base is not None else None
    if tokens is None or mine is None or unit is None:
        return None
    cost = mine / unit
    return Ratio(tokens.value / cost, tokens.low / cost, tokens.high / cost, tokens.beyond)


def in_time(study: Evidence) -> str:
    """Which variants are faster than tuned AdamW when the time of a step counts."""
    found = {name: time_speedup(study, name) for name in study.study.variants if name != ADAMW}
    known = {name: each for name, each in found.items() if each is not None}
    if not known:
        return ""
    faster = [name for name, each in known.items() if each.low > 1]
    slower = [name for name, each in known.items() if each.high < 1]
    parts = [
        f"{verb} than tuned AdamW {'is' if len(names) == 1 else 'are'} "
        + listed(f"{name} ({known[name].value:.2f})" for name in names)
        for names, verb in ((faster, "faster"), (slower, "slower"))
        if names
    ]
    text = "; ".join(parts) or "none can be told from tuned AdamW"
    return f"In time on this CPU, to the same loss: {text}."


def failures(study: Evidence) -> str:
    """The variants of which a seed failed."""
    failed = [row["variant"] for row in study.rows if row["loss"] is None]
    return f"Failed with at least one seed: {listed(failed)}." if failed else ""


def findings(study: Evidence) -> list[tuple[str, str, str, str]]:
    """Two published findings: what is said, what was seen here, and whether they agree."""
    return [*muon_in_tokens(study), *basin_of_sso(study)]


def muon_in_tokens(study: Evidence) -> list[tuple[str, str, str, str]]:
    """Muon over AdamW in tokens at tuned rates."""
    ratio = token_speedup(study, "Muon")
    if ratio is None:
        return []
    low, high = PUBLISHED_SPEED
    if ratio.high < low or ratio.low > high:
        verdict = "**contradicts**: the interval lies outside"
    elif low <= ratio.low and ratio.high <= high:
        verdict = "**agrees**: the interval lies inside"
    else:
        where = "inside" if low <= ratio.value <= high else "outside"
        verdict = f"**open**: the value lies {where}, the interval on both sides of a bound"
    seen = f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" + " *" * ratio.beyond
    said = f"AdamW needs {low:g} to {high:g} times Muon's tokens, both tuned"
    return [(said, seen, verdict, "tokens to loss")]


def basin_of_sso(study: Evidence) -> list[tuple[str, str, str, str]]:
    """Whether SSO's basin of rates is the wider one, at every bound."""
    rows = []
    for other in (ADAMW, "Muon"):
        wider, cells = [], []
        for within in BASINS:
            mine, theirs = (basin(study.trials, name, within) for name in ("SSO", other))
            if mine is None or theirs is None:
                return []
            wider.append(_wider(mine.factor, mine.cut, theirs.factor, theirs.cut))
            shown = (f"{'at least ' * each.cut}{each.factor:.2f}" for each in (mine, theirs))
            cells.append(f"{' and '.join(shown)} within {within:g}")
        said = f"SSO's basin of rates is wider than {other}'s"
        rows.append((said, "; ".join(cells), basin_verdict(wider), "one seed"))
    return rows


def _wider(mine: float, mine_cut: bool, theirs: float, theirs_cut: bool) -> bool | None:
    """Whether the first basin is the wider one, None where a cut leaves it open."""
    if mine > theirs:
        return None if theirs_cut else True
    return None if mine_cut else False


def basin_verdict(wider: Sequence[bool | None]) -> str:
    """In words, from the comparison at every bound."""
    if all(each is True for each in wider):
        return "**agrees**, as far as one seed says"
    if all(each is False for each in wider):
        return "**contradicts**, as far as one seed says"
    return "**open**: the bounds differ, or the grid cuts a basin"


def advice(study: Evidence, larger: Iterable[Evidence] = ()) -> list[str]:
    """The three lines of README.md: a rule, PC layers, and what these sizes cannot say.

    `larger` are studies of the same rules at other sizes; those that are not complete say nothing.
    """
    if not study.complete:
        return [
            "The tuned comparison of all rules has not ended yet, so there is no answer here; "
            "[docs/results.md](docs/results.md) says how far it is."
        ]
    best = min(
        (row for row in study.rows if row["loss"] is not None and PC not in row["variant"]),
        key=lambda row: row["loss"],
    )["variant"]
    tokens, seconds = token_speedup(study, best), time_speedup(study, best)
    speed = ""
    if tokens is not None and seconds is not None:
        speed = (
            f": tuned AdamW needs {tokens.value:.2f} times its tokens for the same loss "
            f"({tokens.low:.2f} to {tokens.high:.2f}{', extrapolated' * tokens.beyond}), "
            f"{seconds.value:.2f} times its time on a CPU"
        )
    close = [each for each in sides(differences(study, best)).neither if PC not in each]
    tied = f"; {listed(close)} cannot be told from it" if close else ""
    others = "".join(f" {elsewhere(each, best)}" for each in larger if each.complete)
    return [
        f"Start with **{best}**{speed}{tied}.",
        with_pc(study),
        f"This is from a {study.subject}, {len(study.study.seeds)} seeds.{others} Nothing here "
        "says what happens at a size that is of use; all figures are in "
        "[docs/results.md](docs/results.md).",
    ]


def elsewhere(study: Evidence, best: str) -> str:
    """Whether the `best` variant of another study has the smallest loss in this one too."""
    first = best_variant(study)
    seeds = f"{len(study.study.seeds)} seeds"
    if first != best:
        return f"In a {study.subject}, {seeds}, {first} has the smallest loss."
    close = sides(differences(study, best)).neither
    tied = f", {listed(close)} not told from it" if close else ""
    tokens = token_speedup(study, best)
    factor = ""
    if tokens is not None:
        factor = f" ({tokens.value:.2f} times the tokens, {tokens.low:.2f} to {tokens.high:.2f})"
    rank = f"the best of {len(study.rows)} rules"
    return f"In a {study.subject}, {seeds}, {best} is {rank}{factor}{tied}."
