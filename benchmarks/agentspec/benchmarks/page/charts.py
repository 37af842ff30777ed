"""Drawings as SVG whose colours are variables of the page, so that it can be light or dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_P = TypeVar("_P")

NUM_COLOURS = 8  # --series-0 to --series-7 in the page's style

# Colours that matplotlib draws with and the page's variables that take their place.
_INK, _GRID, _PAPER = "#010203", "#010204", "#010205"
_SERIES = tuple(f"#0102{0x10 + index:02x}" for index in range(NUM_COLOURS))
_VARIABLES = {_INK: "--ink", _GRID: "--grid", _PAPER: "--paper"} | {
    colour: f"--series-{index}" for index, colour in enumerate(_SERIES)
}
_MARKERS = "osD^vPX*"
_COLUMNS = 3
_PANEL_WIDTH, _LINE_HEIGHT, _BAR_HEIGHT = 3.6, 2.5, 0.24  # inches
_SINGLE_WIDTH = 6.5  # of a drawing with one panel
_LEGEND_ENTRY_WIDTH = 1.7

_STYLE: Any = {  # the keys that matplotlib allows depend on its version, and so does their type
    "svg.fonttype": "none",
    "font.size": 9,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "legend.facecolor": _PAPER,
    "legend.edgecolor": _GRID,
    "legend.frameon": False,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one method.

    Attributes:
        name: as in the legend; the same name has the same colour in every panel of a drawing.
        x, y: of equal length.
        low, high: ends of each point's range, of equal length, or empty.
        is_joined: whether a line joins the points.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_joined: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class BarPanel:
    """Horizontal bars, the first one on top.

    Attributes:
        title: of the axes.
        names: of the bars.
        values: of equal length; the values are written beside the bars.
    """

    title: str
    names: tuple[str, ...]
    values: tuple[float, ...]


def draw_lines(
    panels: Sequence[Panel],
    *,
    x_label: str,
    y_label: str,
    reference: float | None = None,
    is_log_x: bool = False,
    is_log_y: bool = False,
) -> str:
    """Draw lines or points, three panels a row.

    Args:
        panels: at least one.
        x_label, y_label: of all panels, with the unit.
        reference: a value of y that is marked by a line.
        is_log_x: equal distances are equal ratios, with the drawn points as ticks.
        is_log_y: equal distances are equal ratios.
    """
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))

    def draw(axes: Axes, panel: Panel) -> None:
        for series in panel.series:
            _draw_series(axes, series, names.index(series.name))
        if reference is not None:
            axes.axhline(reference, color=_INK, linewidth=1, linestyle="--", gid="reference")
        if is_log_x:
            axes.set_xscale("log", base=2)
            ticks = sorted({x for series in panel.series for x in series.x})
            axes.set_xticks(ticks if len(ticks) <= 8 else ticks[:: len(ticks) // 8 + 1])
            axes.minorticks_off()
            axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
        if is_log_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)

    return _draw_grid(panels, draw, [_LINE_HEIGHT] * len(panels), has_legend=len(names) > 1)


def draw_bars(
    panels: Sequence[BarPanel], *, x_label: str, reference: float = 0.0, form: str = ".2f", is_log: bool = False
) -> str:
    """Draw horizontal bars, three panels a row.

    Args:
        panels: at least one.
        x_label: of all panels, with the unit.
        reference: where the bars begin.
        form: of the values that are written beside the bars.
        is_log: equal lengths are equal ratios; all values and the reference are above 0.
    """

    def draw(axes: Axes, panel: BarPanel) -> None:
        places = range(len(panel.names))
        lengths = [value - reference for value in panel.values]
        bars = axes.barh(places, lengths, left=reference, color=_SERIES[0], height=0.7)
        axes.bar_label(bars, [format(value, form) for value in panel.values], padding=3, fontsize=8)
        axes.axvline(reference, color=_INK, linewidth=1, gid="reference")
        axes.set_yticks(places, panel.names)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.25)
        if is_log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
            axes.minorticks_off()
        axes.set_title(panel.title, loc="left")
        axes.set_xlabel(x_label)

    heights = [0.9 + _BAR_HEIGHT * len(panel.names) for panel in panels]
    return _draw_grid(panels, draw, heights, has_legend=False)


def _draw_series(axes: Axes, series: Series, index: int) -> None:
    colour = _SERIES[index % NUM_COLOURS]
    errors = None
    if series.low:
        below = [y - low for y, low in zip(series.y, series.low, strict=True)]
        errors = [below, [high - y for y, high in zip(series.y, series.high, strict=True)]]
    axes.errorbar(
        series.x,
        series.y,
        errors,
        label=series.name,
        color=colour,
        linestyle=("-" if index < NUM_COLOURS else ":") if series.is_joined else "none",
        marker=_MARKERS[index % len(_MARKERS)],
        markersize=4,
        linewidth=1.5,
        capsize=2,
    )


def _draw_grid(
    panels: Sequence[_P], draw: Callable[[Axes, _P], None], heights: Sequence[float], *, has_legend: bool
) -> str:
    columns = min(_COLUMNS, len(panels))
    row_heights = [max(heights[begin : begin + columns]) for begin in range(0, len(panels), columns)]
    with mpl.rc_context({**_STYLE, "svg.hashsalt": _salt(panels)}):
        width = _PANEL_WIDTH * columns if columns > 1 else _SINGLE_WIDTH
        figure = Figure(figsize=(width, sum(row_heights) + 0.3), layout="constrained")
        grid = figure.subplots(len(row_heights), columns, squeeze=False, height_ratios=row_heights)
        for index, axes in enumerate(grid.flat):
            if index < len(panels):
                draw(axes, panels[index])
            else:
                axes.set_axis_off()
        if has_legend:
            legends = [axes.get_legend_handles_labels() for axes in grid.flat]
            entries = {
                label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)
            }
            num_columns = min(len(entries), int(width / _LEGEND_ENTRY_WIDTH))
            figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=num_columns)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    return _for_page(drawn.getvalue())


def _salt(panels: Sequence[object]) -> str:
    """Ids within a drawing are hashes with this salt: equal drawings are equal, different ones share no id."""
    return repr(panels)


def _for_page(svg: str) -> str:
    """Make the file an element of the page: variables for colours, the page's width, no ids of groups."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r'<svg width="[^"]*" height="[^"]*"', '<svg role="img"', svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="(?!reference)[^"]*"', "<g", svg).replace('id="reference"', 'class="reference"')
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
