"""The section of docs/results.md about optimizers, written from the committed results alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from scripts.studies.answer import BASINS, advice, answer, findings, time_speedup
from scripts.studies.comparison import Row, markdown
from scripts.studies.evidence import (
    Basin,
    Evidence,
    Ratio,
    basin,
    medians,
    rate_of,
    rate_points,
    stability,
    step_seconds,
    token_speedup,
)

SMALL: Final = "llama_0.1m"
LARGER: Final = ("llama_0.4m", "gpt_0.4m", "moe_0.4m")
"""Studies that begin with what the small one has chosen."""
BEGIN: Final = "<!-- made by scripts/study_page.py from studies/optimizers/results -->"
END: Final = "<!-- end of what scripts/study_page.py makes -->"


def read_all(folder: Path) -> dict[str, Evidence]:
    """The evidence of every study of optimizers, by name; `folder` is studies/optimizers."""
    return {
        name: Evidence(folder / f"{name}.yaml", folder / "results" / name)
        for name in (SMALL, *LARGER)
    }


def section(studies: dict[str, Evidence]) -> str:
    """All tables, in the order of the page."""
    small = studies[SMALL]
    parts = [
        "### The answer at this size",
        answered(small),
        "### Loss at equal tokens",
        losses(small),
        "### Speed over tuned AdamW",
        speedups(small),
        "### What was chosen, and how wide the basin is",
        basins(small),
        *figures(small),
        "### Stability and spectra",
        behaviour(small),
        "### How far the studies are",
        lines_of_progress(studies.values()),
        *larger(studies),
    ]
    return marked(parts)


def marked(parts: Sequence[str]) -> str:
    """Paragraphs between the two marks."""
    return "\n\n".join(part.strip("\n") for part in (BEGIN, *parts, END)) + "\n"


def readme(studies: dict[str, Evidence]) -> str:
    """The lines of README.md about which optimizer to begin with."""
    lines = advice(studies[SMALL], [studies[name] for name in LARGER])
    return marked(["\n".join(f"- {line}" for line in lines)])


def answered(study: Evidence) -> str:
    """The answers of a complete study, with the published findings."""
    sentences = answer(study)
    if not sentences:
        return "None yet: this study has not ended, and nothing is concluded before."
    header = ("published", "here", "verdict", "from")
    lines = "\n".join(f"- {sentence}" for sentence in sentences)
    rows = [(said, seen, verdict, source) for said, seen, verdict, source in findings(study)]
    return f"{lines}\n\n{table(header, rows)}" if rows else lines


def figures(study: Evidence) -> list[str]:
    """The figures for which there are results."""
    found = []
    if study.trials:
        found.append("![Loss by rate](images/optimizers_rates.svg)")
    if study.rows:
        found.append("![Validation loss by tokens](images/optimizers_courses.svg)")
    return found


def larger(studies: dict[str, Evidence]) -> list[str]:
    """What there is of the larger studies, those without any result left out."""
    parts = []
    for study in (studies[name] for name in LARGER):
        if study.trials:
            parts += [f"### {study.study.title}", transfer(study)]
        if study.rows:
            parts += [answered(study), losses(study), behaviour(study)]
        if study.baseline() is not None:
            parts.append(speedups(study))
    return parts


def insert(page: str, made: str) -> str:
    """`page` with the section between its two marks replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END + "\n")
    if not begin or not end:
        raise ValueError(f"the page must have the marks {BEGIN!r} and {END!r}")
    return before + made + after


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    lines.insert(1, "|" + "---|" * len(header))
    return "\n".join(lines)


def lines_of_progress(studies: Iterable[Evidence]) -> str:
    """What of each study has ended."""
    rows = []
    for each in studies:
        seeds = len(each.rows[0]["losses"]) if each.rows else 0
        hours = sum(record.seconds for record in each.records.values()) / 3600
        failed = sum(record.failed for record in each.records.values())
        rows.append(
            (
                each.study.title,
                f"{len(each.records)}" + f" of at most {each.planned}" * (not each.complete),
                f"{failed}",
                f"{seeds} of {len(each.study.seeds)}",
                f"{hours:.1f}",
                "complete" if each.complete else "**not complete**",
            )
        )
    return table(("study", "runs", "failed", "seeds", "processor hours", ""), rows)


def losses(study: Evidence) -> str:
    """The comparison of the seeds."""
    if not study.rows:
        return "Nothing yet: no two seeds of every variant have ended."
    return markdown([Row(**row) for row in study.rows])


def speedups(study: Evidence) -> str:
    """Tokens and time that tuned AdamW needs for each variant's loss, over the variant's own."""
    base = study.baseline()
    if base is None:
        return "Nothing yet: AdamW has not been trained for other lengths."
    unit = step_seconds(study, base)
    rows = []
    for name in (row["variant"] for row in study.rows):
        seconds = step_seconds(study, name)
        cost = f"{seconds / unit:.2f}" if seconds is not None and unit else ""
        rows.append(
            (name, factor(token_speedup(study, name)), cost, factor(time_speedup(study, name)))
        )
    return table(("variant", "tokens to loss", "time of a step", "time to loss"), rows)


def factor(ratio: Ratio | None) -> str:
    """A factor with its interval, as a cell."""
    if ratio is None:
        return ""
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})" + " *" * ratio.beyond


def width(found: Basin | None) -> str:
    """A basin's width, as a cell."""
    return "" if found is None else f"{'≥ ' * found.cut}{found.factor:.2f}"


def basins(study: Evidence) -> str:
    """Chosen settings and the width of the rate's basin, by variant."""
    rows = []
    for name in study.study.variants:
        points = rate_points(study.trials, name)
        if not points:
            continue
        best = min(points, key=lambda point: point[1])
        edges = (points[0], points[-1])
        widths = [width(basin(study.trials, name, within)) for within in BASINS]
        rows.append(
            (
                name,
                ", ".join(map(short, study.results.get("chosen", {}).get(name, []))),
                f"{best[0]:g}" + (" (edge)" if best in edges else ""),
                *widths,
            )
        )
    if not rows:
        return "Nothing yet: no variant has been tuned."
    header = ("variant", "chosen", "best rate of the basin's rung")
    return table((*header, *(f"within {bound:g}" for bound in BASINS)), rows)


def short(override: str) -> str:
    """An override without its sections."""
    key, _, value = override.partition("=")
    name = "init radius" if key == "model.init.radius_scaler" else key.split(".")[-1]
    return f"{name} {value}"


def transfer(large: Evidence) -> str:
    """The rate that another study has chosen, the best one here, and the loss at each."""
    rows = []
    for name in dict.fromkeys(trial["variant"] for trial in large.trials):
        mine = [trial for trial in large.trials if trial["variant"] == name]
        points = sorted((rate_of(trial), trial["loss"]) for trial in mine)
        known = [point for point in points if point[1] is not None]
        best = min(known, key=lambda point: point[1], default=None)
        cells = [
            f"{rate:.3g} " + ("failed" if loss is None else f"{loss:.4f}") for rate, loss in points
        ]
        found = ""
        if best is not None:
            cells[points.index(best)] = f"**{cells[points.index(best)]}**"
            found = f"{best[0]:.3g}" + " (edge)" * (best in (points[0], points[-1]))
        row = large.row(name)
        known_loss = row is not None and row["loss"] is not None
        loss = f"{row['loss']:.4f} ± {row['error']:.4f}" if row and known_loss else ""
        rows.append((name, begun_with(large, mine[0]), found, ", ".join(cells), loss))
    header = ("variant", "rate chosen before", "best here", "loss by rate, one seed")
    return table((*header, "mean of the seeds"), rows)


def begun_with(study: Evidence, trial: dict[str, Any]) -> str:
    """The rate that a variant began with, from its first trial and the first of its factors."""
    stage = study.study.variants[trial["variant"]].search[trial["stage"]]
    return "".join(f"{rate_of(trial) / factors[0]:.3g}" for factors in stage.factors.values())


def behaviour(study: Evidence) -> str:
    """The worst figures of any seed, and how flat the spectra are at first and in the end."""
    rows = []
    for name in study.study.variants:
        records = study.runs(name)
        if not records:
            continue
        found, spectra = stability(records), medians(records)
        cells = [found[each] for each in ("largest_logit", "residual_rms", "spikes")]
        failed = sum(record.failed for record in records)
        rows.append(
            (
                name,
                *("" if value is None else f"{value:.3g}" for value in cells),
                f"{failed} of {len(records)}",
                *(("", "") if spectra is None else (f"{value:.2f}" for value in spectra)),
            )
        )
    if not rows:
        return "Nothing yet."
    header = ("largest logit", "residual RMS", "spikes", "failed")
    return table(("variant", *header, "median sigma, first", "last"), rows)
