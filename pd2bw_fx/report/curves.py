"""Loss curves as a picture, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from pd2bw_fx.errors import InputError
from pd2bw_fx.report import svg

# Curves may lie on one another; a thinner one of another dash on top lets both be seen.
_DASHES = ("solid", (0, (6, 3)), (0, (2, 2)), (0, (8, 2, 2, 2)))


def loss_curves(
    curves: Mapping[str, Sequence[float]], path: str | Path, *, title: str = "Training loss"
) -> None:
    """Writes the losses of each update, a curve for each name, as PNG or SVG by the path's suffix.

    Curves of more than 60 updates are drawn faintly, with their moving average over a twentieth of their
    length in full colour.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise InputError(f"{path.name} ends with {path.suffix!r}; give a name that ends with .png or .svg")
    if not any(len(losses) for losses in curves.values()):
        raise InputError("there is no loss to draw; give at least one curve with one value")
    from matplotlib.figure import Figure  # takes half a second, which only a caller that draws should wait

    figure = Figure(figsize=(8.0, 4.5), layout="constrained", facecolor=svg.SURFACE[0])
    axes = figure.add_subplot(facecolor=svg.SURFACE[0])
    for index, (name, losses) in enumerate(curves.items()):
        colour, dash = svg.HUES[index % len(svg.HUES)], _DASHES[index % len(_DASHES)]
        width = max(1.2, 3.0 - 0.9 * index)
        updates = range(1, len(losses) + 1)
        smooth = _moving_average(losses, len(losses) // 20) if len(losses) > 60 else list(losses)
        if smooth != list(losses):
            axes.plot(updates, losses, color=colour, alpha=0.2, linewidth=0.8)
        axes.plot(updates, smooth, color=colour, linestyle=dash, linewidth=width, label=name)
    axes.set_title(title, loc="left", color=svg.INK[0], fontsize=12, fontweight="bold")
    axes.set_xlabel("update", color=svg.MUTED[0])
    axes.set_ylabel("loss", color=svg.MUTED[0])
    axes.tick_params(colors=svg.MUTED[0], length=0)
    axes.grid(color=svg.TRACK[0], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.margins(x=0.01)
    axes.legend(frameon=False, labelcolor=svg.INK[0])
    figure.savefig(path, dpi=150)


def _moving_average(values: Sequence[float], window: int) -> list[float]:
    """Returns the means of the `window` values around each value; at the ends, of those that there are."""
    averaged = []
    for index in range(len(values)):
        around = values[max(0, index - window // 2) : index + window // 2 + 1]
        averaged.append(math.fsum(around) / len(around))
    return averaged
