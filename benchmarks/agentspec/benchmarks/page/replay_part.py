"""The part of a `replay`: modelled figures of every method, by batch size, block and threshold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentspec.benchmarks.cost_curves import CostCurve
from agentspec.benchmarks.page.charts import BarPanel, Panel, Series, draw_bars, draw_lines
from agentspec.benchmarks.page.parts import Chart, Part, make_conditions, make_table, unique
from agentspec.benchmarks.report import CELL_COLUMNS, EQUAL_REJECTION_COLUMNS

MAX_BLOCKS = 8
OURS = "agentspec"

Cells = Sequence[Mapping[str, Any]]


def replay_part(source: str, record: Mapping[str, Any]) -> Part:
    """Draw a file of `agentspec-bench replay`.

    Raises:
        KeyError: the file lacks a field that a replay writes.
    """
    meta, cells = record["meta"], record["cells"]
    budgeted = [cell for cell in cells if cell["threshold"] is None]
    caption = (
        f"Modelled: recorded outputs, step times of curve {meta['cost_curve']['name']}, drafting "
        f"{meta['draft_us']:g} µs a request, K = {meta['num_speculative_tokens']}, seed {meta['seed']}, "
        f"commit {meta.get('commit') or 'unknown'}. No GPU took part."
    )
    charts = [
        *_by_batch_size(budgeted, "modelled_speedup", "Speed-up by batch size", "speed-up over plain", caption),
        *block_chart(record["breakdown"], caption),
        *_by_batch_size(budgeted, "budget_use", "Budget use", "D / M(b)", caption),
        *_cost_chart(budgeted, meta["cost_curve"], caption),
        *_sweep_chart([cell for cell in cells if cell["threshold"] is not None], caption),
        *ablation_chart(budgeted, "modelled_speedup", caption),
    ]
    tables = [make_table("Modelled figures", CELL_COLUMNS, cells)]
    if record["equal_rejection"]:
        tables.append(make_table("Modelled, at equal rejection", EQUAL_REJECTION_COLUMNS, record["equal_rejection"]))
    title = "Replay of recorded agent runs"
    return Part(title, "modelled", source, make_conditions(meta), tuple(charts), tuple(tables))


def is_variant(method: str) -> bool:
    """Whether a method is ours with something changed."""
    return method.startswith(f"{OURS}:") or method == "untagged"


def _main_methods(cells: Cells) -> list[str]:
    """Methods for a line of their own: all but our variants, unless there is nothing else of ours."""
    methods = unique([cell["method"] for cell in cells])
    return [method for method in methods if not is_variant(method) or OURS not in methods]


def _by_batch_size(cells: Cells, field: str, title: str, label: str, caption: str) -> list[Chart]:
    panels = []
    methods = _main_methods(cells)
    for workload in unique([cell["workload"] for cell in cells]):
        series = []
        for method in methods:
            points = sorted(
                (cell["batch_size"], cell[field])
                for cell in cells
                if (cell["workload"], cell["method"]) == (workload, method) and cell[field] is not None
            )
            if points:
                series.append(Series(method, [x for x, _ in points], [y for _, y in points]))
        if series:
            panels.append(Panel(workload, tuple(series)))
    if not panels:
        return []
    svg = draw_lines(panels, x_label="batch size", y_label=label, reference=1.0, is_log_x=True)
    return [Chart(title, svg, caption)]


def block_chart(blocks: Cells, caption: str) -> list[Chart]:
    """Rejected share of the draft tokens by block: ours (or the first method), largest batch, most steps first."""
    rows = [row for row in blocks if row.get("block") and row["rejection_rate"] is not None]
    rows = [row for row in rows if row.get("threshold") is None]
    if not rows:
        return []
    methods = unique([row["method"] for row in rows])
    method = OURS if OURS in methods else methods[0]
    panels = []
    for workload in unique([row["workload"] for row in rows]):
        found = [row for row in rows if (row["workload"], row["method"]) == (workload, method)]
        found = [row for row in found if not row.get("repeat")]  # of several repeats the first
        largest = max((row["batch_size"] for row in found), default=0)
        shown = [row for row in found if row["batch_size"] == largest][:MAX_BLOCKS]
        if shown:
            names = tuple(row["block"] for row in shown)
            values = tuple(row["rejection_rate"] for row in shown)
            panels.append(BarPanel(f"{workload}, batch {largest}", names, values))
    svg = draw_bars(panels, x_label="rejected share")
    return [Chart(f"Rejected share of the draft tokens by block ({method})", svg, caption)]


def _cost_chart(cells: Cells, curve_record: Mapping[str, Any], caption: str) -> list[Chart]:
    points = [tuple(point) for point in curve_record["points"]]
    curve = CostCurve(curve_record["name"], tuple((tokens, ms) for tokens, ms in points))
    series = []
    for method in _main_methods(cells):
        chosen = [cell["rows_per_step"] + cell["draft_tokens_per_step"] * cell["rows_per_step"]
                  for cell in cells if cell["method"] == method and cell["rows_per_step"]]  # fmt: skip
        if chosen:
            series.append(Series(method, chosen, curve.step_ms(chosen).tolist(), is_joined=False))
    if not series:
        return []
    last = max([points[-1][0], *(x for one in series for x in one.x)]) * 1.1
    x = [points[0][0], *(tokens for tokens, _ in points[1:]), last]
    line = Series(f"T ({curve.name})", x, curve.step_ms(x).tolist())
    panel = Panel("mean step of each cell", (line, *series))
    svg = draw_lines([panel], x_label="tokens in the step (rows + draft tokens)", y_label="T, ms")
    return [Chart("Step time and the chosen points", svg, caption)]


def _sweep_chart(cells: Cells, caption: str) -> list[Chart]:
    panels = []
    for workload in unique([cell["workload"] for cell in cells]):
        series = []
        for method in _main_methods(cells):
            points = sorted(
                (cell["rejection_rate"], cell["tokens_per_step"])
                for cell in cells
                if (cell["workload"], cell["method"]) == (workload, method) and cell["rejection_rate"] is not None
            )
            if points:
                series.append(Series(method, [x for x, _ in points], [y for _, y in points]))
        if series:
            panels.append(Panel(workload, tuple(series)))
    if not panels:
        return []
    svg = draw_lines(panels, x_label="rejected share of draft tokens", y_label="tokens per step")
    return [Chart("Tokens per step by rejection (threshold sweep, no budget)", svg, caption)]


def ablation_chart(cells: Cells, field: str, caption: str) -> list[Chart]:
    """Change of a speed-up when a part of ours is switched off or a policy is another one, by workload and batch."""
    panels = []
    for workload in unique([cell["workload"] for cell in cells]):
        for batch_size in unique([cell["batch_size"] for cell in cells]):
            found = {cell["method"]: cell[field] for cell in cells
                     if (cell["workload"], cell["batch_size"]) == (workload, batch_size)}  # fmt: skip
            whole = found.get(OURS)
            names = tuple(name for name in found if is_variant(name) and found[name] is not None)
            if whole and names:
                values = tuple(100 * (found[name] / whole - 1) for name in names)
                short = tuple(name.removeprefix(f"{OURS}:") for name in names)
                panels.append(BarPanel(f"{workload}, batch {batch_size}", short, values))
    if not panels:
        return []
    svg = draw_bars(panels, x_label="change, %", form="+.1f")
    return [Chart(f"Change of the speed-up against {OURS}, part by part and policy by policy", svg, caption)]
