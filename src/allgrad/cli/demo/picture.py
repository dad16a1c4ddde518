"""The plot of the demo: both training runs, and the similarities at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from torch.nn.functional import pad

from allgrad.cli.demo import digits
from allgrad.cli.demo.training import batch_sizes

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

    from allgrad.cli.demo.training import TrainingConfig, TrainingResult

__all__ = ["draw"]

_THICK: dict[str, Any] = {"color": "#9ecae1", "linewidth": 7, "solid_capstyle": "round"}
_DASHED: dict[str, Any] = {"color": "#08306b", "linewidth": 1.6, "linestyle": "--"}
_MARK: dict[str, Any] = {"edgecolors": "black", "linewidths": 0.7}
_RIGHT: dict[str, Any] = {
    **_MARK,
    "marker": "o",
    "s": 40,
    "c": "white",
    "label": "nearest: correct",
}
_WRONG: dict[str, Any] = {**_MARK, "marker": "X", "s": 80, "c": "gold", "label": "nearest: wrong"}
_EACH = 3  # pictures of each digit in the matrix
_STEPS = 30  # steps whose batches are shown


def draw(
    path: Path,
    config: TrainingConfig,
    ranks: TrainingResult,
    one: TrainingResult,
    difference: float,
) -> None:
    """Write a PNG: training curves on the left, similarities on the right."""
    figure = Figure(figsize=(17, 8.5), dpi=100, layout="constrained")
    figure.suptitle(
        f"{config.ranks_text} with unequal batches, and one process with the joined batch: "
        f"after {config.steps} steps their parameters differ by {difference:.1e} at most",
        fontsize=15,
    )
    halves = figure.add_gridspec(1, 2, width_ratios=(1, 1.45))
    rows = halves[0].subgridspec(3, 1, height_ratios=(1.7, 1, 1))
    _curves(figure.add_subplot(rows[0]), config, ranks, one)
    _accuracies(figure.add_subplot(rows[1]), ranks, one)
    _batches(figure.add_subplot(rows[2]), config)
    _similarities(figure, halves[1], ranks)
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.2)


def _curves(axes: Axes, config: TrainingConfig, ranks: TrainingResult, one: TrainingResult) -> None:
    steps = range(1, config.steps + 1)
    axes.plot(steps, ranks.losses, **_THICK, label=config.ranks_text)
    axes.plot(steps, one.losses, **_DASHED, label="one process")
    axes.set_title(f"{config.loss} loss of the joined batch", loc="left")
    axes.legend(frameon=False, handlelength=4)
    _tidy(axes, "step")


def _accuracies(axes: Axes, ranks: TrainingResult, one: TrainingResult) -> None:
    for run, line in ((ranks, _THICK), (one, _DASHED)):
        axes.plot([step for step, _ in run.tested], [right for _, right in run.tested], **line)
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(f"held-out pictures matched: {ranks.tested[-1][1]:.1%} in the end", loc="left")
    _tidy(axes, "step")


def _batches(axes: Axes, config: TrainingConfig) -> None:
    """The batch sizes of each rank: a bar for each of the first steps."""
    shown = min(_STEPS, config.steps)
    sizes = torch.tensor([batch_sizes(step, config.ranks) for step in range(shown)])
    starts = sizes.cumsum(1) - sizes
    for rank in range(config.ranks):
        axes.bar(
            range(1, shown + 1),
            sizes[:, rank].tolist(),
            bottom=starts[:, rank].tolist(),
            width=0.9,
            color=colormaps["tab20c"](rank % 20),
            label=f"rank {rank}",
        )
    axes.set_title(f"pairs on each rank, first {shown} steps", loc="left")
    axes.legend(
        frameon=False,
        fontsize=8,
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        ncols=1 + (config.ranks > 8),
    )
    _tidy(axes, "step")


def _similarities(figure: Figure, where: SubplotSpec, run: TrainingResult) -> None:
    """Captions (rows) by held-out pictures (columns); a mark shows the nearest caption of each."""
    _, held_out = digits.load()
    indices = [p for d in range(10) for p in (held_out.labels == d).nonzero()[:_EACH, 0].tolist()]
    labels, shown = held_out.labels[indices], run.similarities[indices].T
    rows = where.subgridspec(2, 1, height_ratios=(1, 16), hspace=0)
    strip, matrix = figure.add_subplot(rows[0]), figure.add_subplot(rows[1])

    framed = pad(held_out.pictures[indices].view(-1, 8, 8), (1, 1, 1, 1))
    strip.imshow(
        framed.permute(1, 0, 2).flatten(1).numpy(),
        cmap="gray_r",
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, len(indices) - 0.5, 0, 1),
    )
    strip.set_title(f"cosine of held-out pictures and captions, {_EACH} of each digit", loc="left")
    strip.set_axis_off()

    image = matrix.imshow(shown.numpy(), cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    nearest = shown.argmax(0)
    for is_right, look in ((True, _RIGHT), (False, _WRONG)):
        columns = ((nearest == labels) == is_right).nonzero()[:, 0]
        matrix.scatter(columns.tolist(), nearest[columns].tolist(), **look)
    matrix.set_xticks([_EACH * d - 0.5 for d in range(1, 10)], labels=[])
    matrix.grid(axis="x", color="white", linewidth=2)
    matrix.tick_params(length=0)
    matrix.set_yticks(range(10), labels=digits.plain_captions())
    matrix.legend(ncols=2, frameon=False, loc="upper left", bbox_to_anchor=(0, 0))
    for side in matrix.spines.values():
        side.set_visible(False)
    figure.colorbar(image, ax=[strip, matrix], shrink=0.6, aspect=30)


def _tidy(axes: Axes, below: str) -> None:
    axes.set_xlabel(below)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
