"""Tables of a study, computed from its results.json alone."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from scripts.studies.description import first_key, settings
from training.config.data import MEAN
from training.errors import InputError
from training.json_file import check_shape, read_json
from training.report.text import markdown_table

Results = Mapping[str, Any]

T_95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Half-width of the 95% Student's t interval in units of the standard error, for 2 to 10 seeds."""
LEVEL: Final = 0.02
"""Largest difference, in nats per token, to treat as zero."""


def half_width(seeds: int) -> float:
    """Return the half-width of the 95% Student's t interval in units of the standard error. For one
    seed, the half-width is NaN.

    Above 10 seeds, use an expansion (Abramowitz and Stegun, 26.7.5) that is exact to three
    decimals.
    """
    if seeds < 2:
        return math.nan
    if seeds <= 10:
        return T_95[seeds - 2]
    z, n = 1.959964, seeds - 1
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / n**i for i, term in enumerate(terms, start=1))


NUMBER = int | float | None
STAGE = {"grid": dict, "factors": dict}
SHAPE: Final = {
    "title": str,
    "seeds": [int],
    "complete": bool,
    "variants": {...: {"against": str | None, "search": {...: STAGE}}},
}
TRIAL = {"variant": str, "stage": str, "share": int | float, "candidate": [str], "loss": NUMBER}
LATER: Final = {
    "chosen": {...: [str]},
    "trials": [TRIAL],
    "rows": [{"variant": str, "losses": [NUMBER], "runs": [str]}],
    "command_overrides": [str],
    "not_comparable": {...: [str]},
    "points": [{"share": int | float, "losses": [NUMBER]}],
}
"""Shapes of results.json, for `check_shape`: SHAPE lists the keys in every file, and LATER the keys
added during the study."""


def read_results(path: Path) -> dict[str, Any]:
    """Read a study's results.json. Raises InputError if the file is not a study's results file."""
    try:
        content: dict[str, Any] = read_json(path)
        check_shape(content, SHAPE, str(path))
        check_shape(content, {key: LATER[key] for key in LATER if key in content}, str(path))
        _check_variants(content)
    except (OSError, ValueError) as error:
        raise InputError(
            f"results must be a results.json written by scripts/study.py, got {path}: {error}"
        ) from None
    return content


def _check_variants(results: Results) -> None:
    """Raise InputError if rows, references or trials do not match the study's variants."""
    names, rows = results["variants"], {row["variant"]: row for row in results.get("rows", ())}
    if rows and rows.keys() != names.keys():
        raise InputError(f"rows must be the variants {', '.join(names)}, got {', '.join(rows)}")
    if len({len(row["losses"]) for row in rows.values()}) > 1:
        raise InputError("all rows must have the same number of losses")
    for name, row in rows.items():
        losses = row.get("datasets", {})
        check_shape(losses, {...: [NUMBER]}, f"datasets of {name}")
        if any(len(each) != len(row["losses"]) for each in losses.values()):
            raise InputError(
                f"each dataset of {name} must have the same number of losses as the row"
            )
    used = [variant["against"] for variant in names.values() if variant["against"] is not None]
    used += [trial["variant"] for trial in results.get("trials", ())]
    for name in used:
        if name not in names:
            raise InputError(f"variants must be among {', '.join(names)}, got {name}")


def markdown(results: Results) -> str:
    """Return all non-empty tables of a study as Markdown, each under a heading. The first lines
    state whether the study is unfinished, and the overrides given on the command line."""
    compared = comparison(results)
    tables = {
        "comparison": [comparison_cells(line) for line in records(compared)],
        "by dataset": by_dataset(results),
        "also differ": [
            {"variant": name, "key": key, "value": str(value), "in the other": str(other)}
            for name, keys in results.get("differ", {}).items()
            for key, (value, other) in keys.items()
        ],
    }
    for key in searched_keys(results):
        losses = records(loss_by(results, key))
        tables[f"loss by {first_key(key)}"] = [best_in_bold(line) for line in losses]
    tables["later rungs"] = later_rungs(results)
    if results.get("points"):
        tables["tokens"] = [
            {key: x if isinstance(x, str) else number(x, ".2f") for key, x in line.items()}
            for line in records(tokens_to_loss(results, compared))
        ]
    opening = "" if results.get("complete", True) else f"unfinished: {trained(results)}\n\n"
    if given := results.get("command_overrides"):
        opening += f"overrides on the command line: {' '.join(given)}\n\n"
    return opening + "\n".join(
        f"### {name}\n\n{markdown_table(list(rows[0]), [list(row.values()) for row in rows])}"
        for name, rows in tables.items()
        if rows
    )


def trained(results: Results) -> str:
    """Return how many of the study's seeds have been trained for every variant."""
    rows, every = results.get("rows", ()), len(results["seeds"])
    done = min((len(row["losses"]) for row in rows), default=0)
    return f"{done} of {every} seeds" if done < every else f"{done} seeds"


def comparison(results: Results) -> pd.DataFrame:
    """Return a row per variant. A row contains the variant's loss, and the difference from the loss
    of the variant named in `against`.

    Losses and differences are in nats per token, averaged over seeds. Differences are paired by
    seed. `error` is the standard error of a mean, and `low` and `high` are the ends of the 95%
    Student's t interval. The loss of a variant with a failed run is NaN.
    """
    rows = results.get("rows", ())
    losses = pd.DataFrame({row["variant"]: row["losses"] for row in rows}, dtype=float)
    ended = grid_ends(results)
    lines = []
    for name in losses:
        line = {
            "variant": name,
            "loss": losses[name].mean(skipna=False),
            "error": losses[name].sem(skipna=False),
            "failed": int(losses[name].isna().sum()),
            "chosen": short(results.get("chosen", {}).get(name, [])),
        }
        other = results["variants"][name]["against"]
        if other is not None:
            line |= {"against": other, **paired(losses[name] - losses[other])}
        both = [*ended.get(name, []), *ended.get(other, [])]
        unlike = results.get("not_comparable", {}).get(name, ())
        if (found := verdict(line, both, unlike)) is not None:
            line["verdict"] = found
        lines.append(line)
    return pd.DataFrame(lines)


def by_dataset(results: Results) -> list[dict[str, str]]:
    """Return the rows of the comparison for each validation dataset, or [] if the results contain
    no losses by dataset."""
    rows, lines = results.get("rows", ()), []
    for name in rows[0].get("datasets", {}) if rows else ():
        if all(name in row.get("datasets", {}) for row in rows):
            alone = [{**row, "losses": row["datasets"][name]} for row in rows]
            unlike = {
                variant: [reason for reason in reasons if reason != MEAN]
                for variant, reasons in results.get("not_comparable", {}).items()
            }
            one = {**results, "rows": alone, "not_comparable": unlike}
            for line in records(comparison(one)):
                cells = comparison_cells(line)
                del cells["settings"]
                lines.append({"dataset": name, **cells})
    return lines


def paired(differences: pd.Series) -> dict[str, float]:
    """Return the mean of paired differences with its standard error and 95% interval."""
    seeds = len(differences)
    mean, error = differences.mean(skipna=False), differences.sem(skipna=False)
    half = half_width(seeds) * error
    return {
        "difference": mean, "difference_error": error, "low": mean - half, "high": mean + half,
    }  # fmt: skip


def verdict(
    line: Mapping[str, Any], ended: Sequence[str], unlike: Sequence[str] = ()
) -> str | None:
    """Return the verdict on a row of the comparison.

    The verdict is `higher` or `lower` if the 95% interval excludes 0. If the interval contains 0,
    the verdict is `level` if the whole interval is within `LEVEL` of 0, and `cannot tell`
    otherwise. If no verdict is possible, return the reason. `ended` are the messages of `grid_ends`
    about the two variants, and `unlike` are the reasons why their losses are not comparable. A
    variant that is not compared has no verdict (None) unless its settings are at an end of a grid.
    """
    if "against" in line and unlike:
        return f"not comparable: the validation losses differ in {', '.join(unlike)}"
    if ended:
        return f"refused: {'; '.join(dict.fromkeys(ended))}"
    if "against" not in line:
        return None
    if math.isnan(line["difference"]):
        return "a run failed"
    if math.isnan(line["low"]):
        return "one seed"
    if line["low"] > 0:
        return "higher"
    if line["high"] < 0:
        return "lower"
    return "level" if max(-line["low"], line["high"]) <= LEVEL else "cannot tell"


def grid_ends(results: Results) -> dict[str, list[str]]:
    """Return messages, by variant, about settings chosen at an end of their grid.

    There may be a better value beyond the end of the grid. A chosen value of 0 at the lower end is
    not reported.
    """
    ends: dict[str, list[str]] = {}
    for (name, keys), trials in tried(results).groupby(["variant", "key"], sort=False):
        key, values = first_key(keys), trials["value"]
        value = float(settings(results.get("chosen", {}).get(name, ())).get(key, "nan"))
        if value == values.max() or (value == values.min() and value != 0):
            sentence = f"{key} = {value:g} is at an end of the grid of {name}"
            ends.setdefault(name, []).append(sentence)
    return ends


def searched_keys(results: Results) -> list[str]:
    """Return the keys in the grids of all variants."""
    stages = (each for v in results["variants"].values() for each in v["search"].values())
    return list(dict.fromkeys(key for each in stages for key in (*each["grid"], *each["factors"])))


def tried(results: Results) -> pd.DataFrame:
    """Return a row for each trial and each key that the trial's stage varies. A failed trial has an
    infinite loss.

    Later rungs are excluded, because they do not train all candidates. Of the remaining trials of a
    variant and key, only the shortest are included.
    """
    first, _ = trials_by_rung(results)
    rows = [
        (
            name,
            key,
            trial["share"],
            float(settings(trial["candidate"])[first_key(key)]),
            math.inf if trial["loss"] is None else trial["loss"],
        )
        for name, variant in results["variants"].items()
        for stage, varied in variant["search"].items()
        for key in (*varied["grid"], *varied["factors"])
        for trial in first
        if (trial["variant"], trial["stage"]) == (name, stage)
    ]
    frame = pd.DataFrame(rows, columns=["variant", "key", "share", "value", "loss"])
    shortest = frame.groupby(["variant", "key"])["share"].transform("min")
    return frame[frame["share"] == shortest]


def trials_by_rung(results: Results) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the trials in the first rungs of all stages, and the trials in later rungs."""
    first: dict[str, object] = {}
    parts: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] = [], []
    for trial in results.get("trials", ()):
        rung = trial["share"], trial.get("seeds")
        parts[rung != first.setdefault(trial["stage"], rung)].append(trial)
    return parts


def later_rungs(results: Results) -> list[dict[str, str]]:
    """Return a row per trial in a later rung, which only the best candidates enter."""
    return [
        {
            "variant": trial["variant"],
            "stage": trial["stage"],
            "share": f"{trial['share']:g}",
            "seeds": " ".join(map(str, trial.get("seeds", [results["search"]["seed"]]))),
            "settings": short(trial["candidate"]),
            "loss": "failed" if trial["loss"] is None else f"{trial['loss']:.4f}",
        }
        for trial in trials_by_rung(results)[1]
    ]


def short(overrides: Sequence[str]) -> str:
    """Format overrides concisely, with only the last component of each key."""
    pairs = (f"{key.rpartition('.')[2]} {value}" for key, value in settings(overrides).items())
    return ", ".join(dict.fromkeys(pairs))


def loss_by(results: Results, key: str) -> pd.DataFrame:
    """Return a row per variant with its lowest loss at each value of `key`."""
    frame = tried(results).query("key == @key")
    best = frame.pivot_table("loss", "variant", "value", aggfunc="min", sort=False)
    return best.sort_index(axis=1).rename(columns="{:g}".format).reset_index()


def tokens_to_loss(results: Results, compared: pd.DataFrame) -> pd.DataFrame:
    """For each variant, return how many tokens the baseline needs to reach the variant's loss, as a
    fraction of a full run.

    The baseline is the variant of the study's curve. The curve of loss over log tokens is
    interpolated linearly; beyond the curve's ends, values are NaN. The interval is the 95% interval
    of the variant's loss, converted to tokens using the mean curve.
    """
    base = results["curve"]["variant"]
    at_one = compared.loc[compared["variant"] == base, "loss"].item()
    means = {
        point["share"]: pd.Series(point["losses"], dtype=float).mean(skipna=False)
        for point in results["points"]
    }
    curve = [(share, loss) for share, loss in (means | {1.0: at_one}).items() if loss == loss]
    losses, logs = zip(*sorted((loss, math.log(share)) for share, loss in curve), strict=True)
    lines = []
    for row in compared.itertuples():
        half = half_width(len(results["seeds"])) * row.error
        at = [row.loss, row.loss + half, row.loss - half]
        shares = np.exp(np.interp(at, losses, logs, left=math.nan, right=math.nan))
        lines.append((row.variant, *shares.tolist()))
    return pd.DataFrame(lines, columns=["variant", "tokens", "low", "high"])


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as dicts."""
    return [{str(key): value for key, value in line.items()} for line in frame.to_dict("records")]


def comparison_cells(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the formatted cells of a row in the comparison table."""
    line = {key: value for key, value in line.items() if pd.notna(value)}
    loss = number(line.get("loss"), ".4f", line.get("error"))
    interval = [number(line.get(end), "+.4f") for end in ("low", "high")]
    return {
        "variant": line["variant"],
        "validation loss": loss or f"{line['failed']} runs failed",
        "difference": number(line.get("difference"), "+.4f", line.get("difference_error")),
        "95% interval": " to ".join(interval) if all(interval) else "",
        "from": line.get("against", ""),
        "verdict": line.get("verdict", ""),
        "settings": line["chosen"],
    }


def best_in_bold(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the formatted cells of a row of losses, with the lowest loss in bold."""
    losses = pd.Series(line).drop("variant").astype(float)
    cells = {key: number(loss, ".4f") for key, loss in losses.items()}
    best = losses.idxmin()
    return {"variant": line["variant"], **cells, best: f"**{cells[best]}**"}


def number(value: float | None, form: str, error: float | None = None) -> str:
    """Format a number with its standard error. Return an empty string if the number is missing."""
    if value is None or math.isnan(value):
        return ""
    if error is None or math.isnan(error):
        return f"{value:{form}}"
    return f"{value:{form}} ± {error:.4f}"
