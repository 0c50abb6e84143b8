"""All figures of runs, to be written to files or shown on pages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import getdoc
from pathlib import Path

from matplotlib.figure import Figure

from scripts.plots import curves, spectra
from scripts.plots.run_data import RunData
from scripts.plots.style import save


@dataclass(frozen=True)
class RunFigure:
    """A kind of figure. Exactly one of `overlay` and `single` is set.

    name     name of the file (without suffix) and of the page section
    title    heading on the page
    overlay  function that draws several runs in one figure, or returns None if there is no data
    single   function that draws a single run, used if an overlay would be unreadable
    half     whether the figure shares a row with another one on wide pages
    """

    name: str
    title: str
    overlay: Callable[[Sequence[RunData]], Figure | None] | None = None
    single: Callable[[RunData], Figure | None] | None = None
    half: bool = False

    def draw(self, run: RunData) -> Figure | None:
        """Draw a single run. Return None if the run has no data for this figure."""
        if self.single is not None:
            return self.single(run)
        assert self.overlay is not None
        return self.overlay([run])

    @property
    def about(self) -> str:
        """The caption on the page: the first paragraph of the drawing function's docstring."""
        return " ".join((getdoc(self.overlay or self.single) or "").split("\n\n")[0].split())


FIGURES = (
    RunFigure("loss", "Loss", curves.loss),
    RunFigure("tasks", "Downstream tasks", curves.tasks),
    RunFigure("learning_rates", "Learning rates", curves.learning_rates, half=True),
    RunFigure("gradient_norm", "Gradient norm", curves.gradient_norm, half=True),
    RunFigure("evolution", "Weight spectra over time", single=spectra.evolution),
    RunFigure("spectra", "Distribution of singular values", spectra.histograms),
    RunFigure("quantiles", "Singular values by rank", spectra.quantiles),
    RunFigure("momentum", "Momentum spectra over time", single=spectra.momentum),
    RunFigure("update", "Update spectra over time", single=spectra.update),
    RunFigure("condition_numbers", "Condition numbers", curves.condition_numbers),
    RunFigure("tracked_norms", "Tracked norms in PC layers", curves.tracked_norms),
    RunFigure("residual", "Residual stream", single=spectra.residual),
    RunFigure("attention_logits", "Attention logits", spectra.attention_logits),
    RunFigure("signal", "Signal and noise", single=curves.signal),
    RunFigure("rule_reports", "Update rule metrics", single=curves.rule_reports),
    RunFigure("stable_rank", "Stable rank of the weights", single=spectra.stable_rank),
    RunFigure("nuclear_rank", "Nuclear rank of the gradients", single=spectra.nuclear_rank),
    RunFigure("criterion", "Spectral or elementwise?", single=spectra.criterion_map),
    RunFigure("maxvio", "Expert balance", curves.balance),
    RunFigure("penalty", "Gram penalty", curves.penalty),
    RunFigure("z_loss", "z-loss", curves.z_loss),
)
"""All figures, in page order."""


def write_figures(runs: Sequence[RunData], folder: Path, suffix: str) -> list[Path]:
    """Write every figure that any of `runs` has data for, and return the paths.

    `suffix` is .svg, .png or .pdf.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind in FIGURES:
        if kind.overlay is not None:
            drawn = {kind.name: kind.overlay(runs)}
        else:
            names = [f"{kind.name}_{run.name}" if len(runs) > 1 else kind.name for run in runs]
            drawn = {name: kind.draw(run) for name, run in zip(names, runs, strict=True)}
        for name, figure in drawn.items():
            if figure is not None:
                written.append(folder / f"{name}{suffix}")
                save(figure, written[-1])
    return written
