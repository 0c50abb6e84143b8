"""All figures of runs, overlaid where that can be read, as files; and a page per run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from scripts.plots import blocks, curves, spectra
from scripts.plots.report import report
from scripts.plots.run_data import RunData
from scripts.plots.style import save


def run_figures(runs: Sequence[RunData]) -> Iterator[tuple[str, Figure]]:
    """File name, without suffix, and figure of everything that any of the runs has data for."""
    overlaid = {
        "loss": curves.loss(runs),
        "learning_rates": curves.learning_rates(runs),
        "gradient_norm": curves.gradient_norm(runs),
        "spectra": spectra.histograms(runs),
        "quantiles": spectra.quantiles(runs),
        "condition_numbers": curves.condition_numbers(runs),
        "maxvio": curves.balance(runs),
        "penalty": curves.penalty(runs),
        "attention_logits": blocks.attention_logits(runs),
    }
    for name, figure in overlaid.items():
        if figure is not None:
            yield name, figure
    for run in runs:
        suffix = f"_{run.name}" if len(runs) > 1 else ""
        own = {
            "residual": blocks.residual(run),
            "signal": curves.signal(run),
            "evolution": spectra.evolution(run),
            "criterion": spectra.criterion_map(run),
            "stable_rank": spectra.unit_map(run, "stable_rank", "stable rank"),
            "nuclear_rank": spectra.unit_map(
                run, "gradient_nuclear_rank", "nuclear rank of the gradient"
            ),
        }
        for name, figure in own.items():
            if figure is not None:
                yield name + suffix, figure


def write_figures(runs: Sequence[RunData], folder: Path, suffix: str) -> list[Path]:
    """The files written: every figure of `run_figures`, `suffix` being .svg, .png or .pdf."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in run_figures(runs):
        path = folder / f"{name}{suffix}"
        save(figure, path)
        written.append(path)
    return written


def write_report(run: RunData, path: Path) -> None:
    """None; the run's page."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(report(run), encoding="utf-8")
