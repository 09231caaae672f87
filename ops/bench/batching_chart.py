"""The chart of `bench batching`: throughput against latency, a curve for each mode over its batch sizes.

Owns: the drawing. Imports matplotlib, without a display. Invariant: it draws what was measured and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ops.bench.batching import Sweep
from ops.bench.batching_loop import Mode
from ops.errors import CommandError

_STYLES = {
    Mode.NONE: ("#7f7f7f", "s"),
    Mode.STATIC: ("#d62728", "o"),
    Mode.DYNAMIC: ("#ff7f0e", "^"),
    Mode.CONTINUOUS: ("#1f77b4", "D"),
}


def draw(panels: Sequence[tuple[str, Sweep]], path: Path) -> None:
    """One panel for each machine: (title, what was measured there).

    Raises:
        CommandError: the file cannot be written.
    """
    figure = Figure(figsize=(7 * len(panels), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for number, (title, tried) in enumerate(panels):
        _panel(figure.add_subplot(1, len(panels), number + 1), title, tried)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise CommandError(f"--chart: {path} cannot be written: {error.strerror}") from error


def _panel(axes: Axes, title: str, tried: Sweep) -> None:
    for mode, (colour, marker) in _STYLES.items():
        curve = tried.curve(mode)
        axes.plot(
            [point.mean_ms_per_token for point in curve],
            [point.tok_s for point in curve],
            color=colour,
            marker=marker,
            label=mode.value,
        )
        for point in curve:
            axes.annotate(
                str(point.setting.slots),
                (point.mean_ms_per_token, point.tok_s),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("mean latency per output token, ms")
    axes.set_ylabel("throughput, output tokens per second")
    axes.set_title(title, fontsize=10)
    axes.grid(visible=True, which="both", alpha=0.2)
    axes.legend(title="slots at each point")
