"""Style figures and save them.

Figures do not use pyplot, which would keep them all in memory and require a display.
"""

from io import BytesIO
from pathlib import Path

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogFormatter,
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
)

from parallel.disk import replace_file
from training.errors import InputError

SUFFIXES = (".svg", ".png", ".pdf")
# Okabe and Ito's colour-blind-safe palette, with black last.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SETTINGS = {
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "font.size": 10,
    "svg.fonttype": "none",  # keep text as text instead of converting it to paths
    "svg.hashsalt": "spectrain",  # make the output deterministic
}


def new_figure(
    columns: int = 1, width: float = 5.0, height: float = 3.6
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `columns` axes side by side, each `width` x `height` inches."""
    return new_grid(columns, columns, width, height)


def new_grid(
    panels: int, columns: int = 4, width: float = 2.5, height: float = 2.4
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `panels` axes in rows of at most `columns`, each `width` x `height`
    inches."""
    mpl.rcParams.update(SETTINGS)
    columns = min(panels, columns)
    rows = -(-panels // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    flat = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in flat[panels:]:
        unused.set_visible(False)
    return figure, flat[:panels]


def count_tokens(axis: Axes) -> None:
    """Label the x axis with token counts such as 20k or 1.5G."""
    axis.set_xlabel("tokens")
    axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axis.xaxis.set_major_locator(MaxNLocator(5))


def plain_log(axis: Axes) -> None:
    """Make the y axis logarithmic, with labels such as 0.05 instead of powers of ten."""
    axis.set_yscale("log")
    for formatter in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
        formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))


def literal(text: str) -> str:
    """Escape $ signs, which matplotlib would interpret as math."""
    return text.replace("$", r"\$")


LEAST_POINTS = 9.0
"""Minimum text size of figures on pages, in points (12 pixels)."""


def enlarge_text(figure: Figure) -> None:
    """Enlarge all text in a figure to at least `LEAST_POINTS`."""
    for axis in figure.axes:
        for scale in (axis.xaxis, axis.yaxis):
            # Superscripts of exponents would be smaller.
            if isinstance(scale.get_major_formatter(), LogFormatterSciNotation):
                scale.set_major_formatter(LogFormatter())
                scale.set_minor_formatter(LogFormatter())
    for text in figure.findobj(Text):
        text.set_fontsize(max(LEAST_POINTS, text.get_fontsize()))


def mark_single_points(figure: Figure) -> None:
    """Add a marker to curves with a single finite point, which would otherwise be invisible."""
    for line in (line for axis in figure.axes for line in axis.lines):
        finite = np.isfinite(np.asarray(line.get_ydata(), dtype=float))
        if np.count_nonzero(finite) == 1 and line.get_marker() == "None":
            line.set_marker("o")


def check_target(path: Path) -> None:
    """Raise InputError if a figure cannot be written to `path`."""
    if path.suffix not in SUFFIXES:
        raise InputError(f"--output must end in one of {', '.join(SUFFIXES)}, got {path}")
    if not path.parent.is_dir():
        raise InputError(f"--output must be in an existing folder, got {path}")
    if path.is_dir():
        raise InputError(f"--output must be a file, got the folder {path}")


def save(figure: Figure, path: Path) -> None:
    """Write the figure without a date, to keep the file deterministic."""
    mark_single_points(figure)
    undated = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}, ".png": {}}[path.suffix]
    buffer = BytesIO()
    figure.savefig(buffer, dpi=160, metadata=undated, format=path.suffix[1:])
    replace_file(path, buffer.getvalue())
