"""Which rank holds what, and the way of a cut matrix to its owner and back."""

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from scripts.plots.style import COLORS, new_figure

MATRICES = (0.0, 0.8, 1.9, 3.1, 4.0)
"""Where the matrices of a bucket begin and end, in shards of four ranks. Rank i owns matrix i."""
MOMENTUM, OWNED, UPDATED = 2.2, 1.1, 0.0
"""Heights of the three rows of a step."""


def plot_layout() -> Figure:
    """Eight ranks with tensor 2, pipeline 2 and data 2; one bucket's step on four data-parallel
    ranks."""
    figure, (ranks, step) = new_figure(2, width=5.2, height=3.2)
    plot_ranks(ranks)
    plot_step(step)
    return figure


def plot_ranks(axes: Axes) -> None:
    """Draw two copies of a model of four layers, each cut by tensor and by pipeline."""
    for rank in range(8):
        tensor, data, stage = rank % 2, rank // 2 % 2, rank // 4
        left = 2.4 * data + tensor
        draw_box(axes, left, 1.0 - stage, (0.96, 0.94), stage, f"rank {rank}")
        draw_box(axes, left, 1.0 - stage, (0.96, 0.22), stage, f"state {data + 1}/2")
    for stage, layers in enumerate(("layers 0, 1", "layers 2, 3")):
        write(axes, -0.55, 1.45 - stage, f"stage {stage}\n{layers}")
    for data in range(2):
        write(axes, 1 + 2.4 * data, 2.2, f"copy {data} of the weights")
    write(axes, 2.2, -0.25, "side by side: two halves of every matrix (tensor)")
    axes.set(xlim=(-1.1, 4.5), ylim=(-0.5, 2.4), title="tensor 2, pipeline 2, data 2")
    axes.set_axis_off()


def plot_step(axes: Axes) -> None:
    """Draw a bucket's momentum in shards, its matrices on their owners, and the updates."""
    for matrix, (begin, end) in enumerate(pairwise(MATRICES)):
        for height in (MOMENTUM, UPDATED):
            draw_box(axes, begin, height, (end - begin, 0.4), matrix)
        draw_box(axes, matrix + 0.1, OWNED, (0.8, 0.4), matrix, f"matrix {matrix}")
        for rank in range(4):
            if begin < rank + 1 and rank < end:
                middle = (max(begin, rank) + min(end, rank + 1)) / 2
                look = {"arrowstyle": "->", "linestyle": "-" if rank == matrix else "--"}
                owner = matrix + 0.5
                axes.annotate("", (owner, OWNED + 0.4), (middle, MOMENTUM), arrowprops=look)
                axes.annotate("", (middle, UPDATED + 0.4), (owner, OWNED), arrowprops=look)
    for rank in range(4):
        write(axes, rank + 0.5, 2.8, f"rank {rank}")
    for edge in range(5):
        for height in (MOMENTUM, UPDATED):
            axes.plot([edge, edge], [height - 0.08, height + 0.48], color="black", linewidth=1)
    for height, label in (
        (MOMENTUM, "momentum,\nin shards"), (OWNED, "the owner\nruns the rule"),
        (UPDATED, "update,\nin shards"),
    ):  # fmt: skip
        write(axes, -0.65, height + 0.2, label)
    write(axes, 2, -0.25, "dashed: sent to another rank")
    axes.set(xlim=(-1.3, 4.2), ylim=(-0.5, 3.0), title="One bucket's step on four data ranks")
    axes.set_axis_off()


def draw_box(
    axes: Axes, left: float, bottom: float, size: tuple[float, float], color: int, text: str = ""
) -> None:
    """Draw a box of width and height `size` with a text in it, in the `color`-th colour."""
    axes.add_patch(
        Rectangle((left, bottom), *size, facecolor=COLORS[color], edgecolor="white", alpha=0.35)
    )
    write(axes, left + size[0] / 2, bottom + size[1] / 2, text)


def write(axes: Axes, x: float, y: float, text: str) -> None:
    """Write a text around a point."""
    axes.text(x, y, text, ha="center", va="center", fontsize=9)
