"""The charts of `simulate`: how many requests meet their objectives by the number of replicas, or by how long they waited.

Owns: the drawing. Imports matplotlib, without a display. Invariant: it draws what was simulated and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ops.errors import CommandError


def draw_attainment(curves: Mapping[str, Sequence[tuple[int, float]]], goal_pct: float, title: str, path: Path) -> None:
    """(replicas, percent of the requests that met their objectives) by the name of each curve.

    Raises:
        CommandError: the file cannot be written.
    """
    figure, axes = _figure(title)
    for name, points in curves.items():
        axes.plot([n for n, _ in points], [percent for _, percent in points], marker="o", label=name)
    axes.axhline(goal_pct, color="#7f7f7f", linestyle=":", linewidth=1)
    axes.set_xlabel("replicas, one A100 each")
    axes.set_xticks(sorted({n for points in curves.values() for n, _ in points}))
    axes.set_ylabel("requests that met their objectives, %")
    axes.set_ylim(0, 102)
    _save(figure, axes, path)


def draw_waits(curves: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Times to the first token, in milliseconds, by the name of each curve: what part of the requests had less.

    Raises:
        CommandError: the file cannot be written.
    """
    figure, axes = _figure(title)
    for name, values in curves.items():
        if values:
            ordered = sorted(values)
            axes.step(ordered, [100 * (k + 1) / len(ordered) for k in range(len(ordered))], where="post", label=name)
    axes.set_xscale("log")
    axes.set_xlabel("time to the first token, ms")
    axes.set_ylabel("requests with no more than that, %")
    _save(figure, axes, path)


def _figure(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend()
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise CommandError(f"--plot: {path} cannot be written: {error.strerror}") from error
