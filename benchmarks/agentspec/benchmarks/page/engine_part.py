"""The part of an `engine` run: time and memory beside the peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agentspec.benchmarks.page.charts import BarPanel, draw_bars
from agentspec.benchmarks.page.parts import Chart, Part, make_conditions, make_table, unique
from agentspec.benchmarks.report import ENGINE_COLUMNS


def engine_part(source: str, record: Mapping[str, Any]) -> Part:
    """Draw a file of `agentspec-bench engine`.

    Raises:
        KeyError: the file lacks a field that the command writes.
    """
    meta, cells = record["meta"], record["cells"]
    caption = (
        f"Measured on CPU: {meta['clock']}; {meta['history_tokens']:,} history tokens, {meta['machine']}, "
        f"commit {meta.get('commit') or 'unknown'}."
    )
    panels = []
    for peer in unique([cell["peer"] for cell in cells if cell["ratio"] is not None]):
        found = [cell for cell in cells if cell["peer"] == peer and cell["ratio"]]
        names = tuple(
            cell["metric"] + ("" if cell["batch_size"] is None else f", batch {cell['batch_size']}") for cell in found
        )
        panels.append(BarPanel(f"{peer} / agentspec", names, tuple(cell["ratio"] for cell in found)))
    charts: tuple[Chart, ...] = ()
    if panels:
        svg = draw_bars(panels, x_label="times ours", reference=1.0, form=".3g", is_log=True)
        charts = (Chart("Time and memory of the peers in times ours: above 1 ours needs less", svg, caption),)
    tables = (make_table("Measured on CPU", ENGINE_COLUMNS, cells),)
    return Part("The draft engine beside its peers", "measured", source, make_conditions(meta), charts, tables)
