"""The figures of runs: one table for the files that are written and for the page about a run."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from matplotlib.figure import Figure

from scripts.plots import blocks, curves, spectra
from scripts.plots.run_data import RunData
from scripts.plots.style import save


@dataclass(frozen=True)
class RunFigure:
    """A figure that runs may have data for.

    name       of the file, without suffix, and of the section of the page
    title      heading on the page
    about      the sentence below it
    overlay    draws several runs into one figure, None without data
    single     draws one run, where several could not be read
    """

    name: str
    title: str
    about: str
    overlay: Callable[[Sequence[RunData]], Figure | None] | None = None
    single: Callable[[RunData], Figure | None] | None = None

    def draw(self, run: RunData) -> Figure | None:
        """Draw one run; None without data."""
        if self.single is not None:
            return self.single(run)
        assert self.overlay is not None
        return self.overlay([run])


def _unit_map(figure: str, label: str) -> Callable[[RunData], Figure | None]:
    return partial(spectra.unit_map, figure=figure, label=label)


FIGURES = (
    RunFigure(
        "loss", "Loss",
        "Nats per token on the training batches, and as dots the mean over the validation sets, "
        "weighted like the training mixture if all names agree.",
        overlay=curves.loss,
    ),
    RunFigure(
        "learning_rates", "Learning rates", "The schedule applied to each group's peak.",
        overlay=curves.learning_rates,
    ),
    RunFigure(
        "gradient_norm", "Gradient norm", "Of the whole gradient, before clipping.",
        overlay=curves.gradient_norm,
    ),
    RunFigure(
        "evolution", "How the spectra moved",
        "Singular values of each role's matrices, mean over its units: the median, the middle 80% "
        "and the full range.",
        single=spectra.evolution,
    ),
    RunFigure(
        "spectra", "Distribution of the singular values",
        "At the last monitored step, divided by the largest; with PC layers those of the effective "
        "weight.",
        overlay=spectra.histograms,
    ),
    RunFigure(
        "quantiles", "Singular values by rank",
        "At the last monitored step, mean over the role's units; dotted at the first one.",
        overlay=spectra.quantiles,
    ),
    RunFigure(
        "condition_numbers", "Condition numbers",
        "Largest singular value over the mean of the smallest tenth of them: lower is better "
        "conditioned.",
        overlay=curves.condition_numbers,
    ),
    RunFigure(
        "tracked_norms", "The norms that PC layers track",
        "Relative error of the tracked spectral norm: median over a role's matrices, dashed the "
        "largest.",
        overlay=curves.tracked_norms,
    ),
    RunFigure(
        "residual", "The residual stream", "Root mean square of its entries after each layer.",
        single=blocks.residual,
    ),
    RunFigure(
        "attention_logits", "Attention logits",
        "The largest scaled score that the mask lets through: thick over all layers, thin of each.",
        overlay=blocks.attention_logits,
    ),
    RunFigure(
        "signal", "Signal and noise",
        "Of gradients between the micro-batches of a step, of applied updates between the last "
        "steps: what they share over what they differ in, and the part of the difference in one "
        "direction, with its minimum dotted. Alignment is the cosine with the step before.",
        single=curves.signal,
    ),
    RunFigure(
        "stable_rank", "Stable rank of the weights",
        "Squared Frobenius over squared spectral norm, by layer and role.",
        single=_unit_map("stable_rank", "stable rank"),
    ),
    RunFigure(
        "nuclear_rank", "Nuclear rank of the gradients",
        "Squared nuclear over squared Frobenius norm, by layer and role.",
        single=_unit_map("gradient_nuclear_rank", "nuclear rank of the gradient"),
    ),
    RunFigure(
        "criterion", "Spectral or elementwise?",
        "Nuclear rank of the gradient over stable rank of the incoming activations: above 1, red, "
        "the spectral update gains more.",
        single=spectra.criterion_map,
    ),
    RunFigure(
        "maxvio", "Expert balance",
        "How far the load of the fullest expert exceeds the mean; 0 is balanced.",
        overlay=curves.balance,
    ),
    RunFigure(
        "penalty", "Gram penalty", "The off-diagonal Gram penalty over the loss.",
        overlay=curves.penalty,
    ),
)  # fmt: skip
"""In the order of the page."""


def run_figures(runs: Sequence[RunData]) -> Iterator[tuple[str, Figure]]:
    """File name, without suffix, and figure of everything that any of the runs has data for."""
    for each in FIGURES:
        if each.overlay is not None:
            drawn = {each.name: each.overlay(runs)}
        else:
            suffixes = [f"_{run.name}" if len(runs) > 1 else "" for run in runs]
            drawn = {each.name + s: each.draw(run) for s, run in zip(suffixes, runs, strict=True)}
        for name, figure in drawn.items():
            if figure is not None:
                yield name, figure


def write_figures(runs: Sequence[RunData], folder: Path, suffix: str) -> list[Path]:
    """Write every figure of `runs` and return the files; `suffix` is .svg, .png or .pdf."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in run_figures(runs):
        path = folder / f"{name}{suffix}"
        save(figure, path)
        written.append(path)
    return written
