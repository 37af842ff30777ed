"""The part of a `serve` run: measured figures of every method on real engines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentspec.benchmarks.page.charts import Panel, Series, draw_lines
from agentspec.benchmarks.page.parts import Chart, Failure, Part, make_conditions, make_table, unique
from agentspec.benchmarks.page.replay_part import ablation_chart, block_chart
from agentspec.benchmarks.report import SERVE_COLUMNS, Columns

LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2el_ms": "E2EL"}
LATENCY_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("repeat", "repeat", "d"),
    ("latency, ms", "latency", "s"),
    ("observations", "num", "d"),
    ("P50", "p50", ".1f"),
    ("P90", "p90", ".1f"),
    ("P99", "p99", ".1f"),
    ("slowest tenth", "slowest_decile", ".1f"),
)
BUCKET_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("repeat", "repeat", "d"),
    ("rows of the step", "rows", "s"),
    ("steps", "num_steps", "d"),
    ("T, ms", "step_ms", ".1f"),
    ("D", "draft_tokens_per_step", ".1f"),
    ("acc. rate", "acceptance_rate", ".2f"),
    ("acc. length", "acceptance_length", ".2f"),
    ("goodput, tok/s", "decode_goodput", ".1f"),
)
QUALITY_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("repeat", "repeat", "d"),
    ("calls", "num_calls", "d"),
    ("identical", "num_identical_calls", "d"),
    ("final answers", "num_final_answers", "d"),
    ("equal", "num_equal_final_answers", "d"),
    ("tool calls", "num_tool_calls", "d"),
    ("same name", "num_equal_tool_names", "d"),
    ("same argument names", "num_equal_argument_names", "d"),
    ("same arguments", "num_equal_arguments", "d"),
)
CHANGE_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("repeat", "repeat", "d"),
    ("run", "run_id", "s"),
    ("node", "node", "s"),
    ("call", "call", "d"),
    ("first other token", "token", "d"),
    ("of tokens", "num_tokens", "d"),
)

Cells = Sequence[Mapping[str, Any]]
Read = Callable[[Mapping[str, Any]], float | None]


def serve_part(source: str, record: Mapping[str, Any]) -> Part:
    """Draw a file of `agentspec-bench serve`.

    Raises:
        KeyError: the file lacks a field that the command writes.
    """
    meta = record["meta"]
    conditions = meta["conditions"]
    cells = [cell for cell in record["cells"] if cell["status"] == "ok"]
    caption = (
        f"Measured on {meta.get('device', 'an unknown device')} ({conditions['machine']}), vLLM {meta.get('vllm')}, "
        f"{conditions['model']} in {conditions['dtype']}, target {conditions['target']}, "
        f"prefill {conditions['prefill']}, tool time {conditions['tool_time']} s, engines in lockstep, seed "
        f"{conditions['seed']}, commit {meta.get('commit') or 'unknown'}; median and range over the repeats."
    )
    charts = [
        *_by_batch_size(cells, lambda cell: cell["speedup_vs_plain"], title="Speed-up by batch size",
                        label="speed-up over plain", caption=caption, reference=1.0),
        *block_chart([{**_key(cell), **block} for cell in cells for block in cell["blocks"]], caption),
        *_by_batch_size(cells, lambda cell: cell["draft_tokens_per_step"], title="Budget use: draft tokens of a step",
                        label="D", caption=caption),
        *_time_charts(cells, caption),
        *_latency_charts(cells, caption),
        *ablation_chart(_medians(cells), "speedup_vs_plain", caption),
    ]  # fmt: skip
    tables = [
        make_table("Measured figures", SERVE_COLUMNS, cells),
        make_table("Measured latency on the engine's own clock", LATENCY_COLUMNS, _latency_rows(cells)),
        make_table("Measured by decode rows of the step", BUCKET_COLUMNS,
                   [{**_key(cell), **bucket} for cell in cells for bucket in cell["buckets"]]),
    ]  # fmt: skip
    compared = [cell for cell in cells if cell["quality"]]
    if compared:
        rows = [{**_key(cell), **cell["quality"]} for cell in compared]
        changes = [{**_key(cell), **change} for cell in compared for change in cell["quality"]["changes"]]
        tables.append(make_table("Measured against plain decoding's answers", QUALITY_COLUMNS, rows))
        tables.append(make_table("Measured changes of answers", CHANGE_COLUMNS, changes))
    failures = tuple(
        Failure(
            f"{cell['workload']}, batch {cell['batch_size']}, {cell['method']}, repeat {cell['repeat']}",
            cell["reason"],
            cell["log_tail"],
        )
        for cell in record["cells"]
        if cell["status"] != "ok"
    )
    title = "vLLM with every method"
    flat = {**{name: value for name, value in meta.items() if name != "conditions"}, **conditions}
    return Part(title, "measured", source, make_conditions(flat), tuple(charts), tuple(tables), failures)


def _key(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell[name] for name in ("workload", "batch_size", "method", "repeat")}


def _medians(cells: Cells) -> list[dict[str, Any]]:
    """One cell for all repeats, with the median of the speed-up."""
    groups: dict[tuple[str, int, str], list[float]] = {}
    for cell in cells:
        if cell["speedup_vs_plain"] is not None:
            key = cell["workload"], cell["batch_size"], cell["method"]
            groups.setdefault(key, []).append(cell["speedup_vs_plain"])
    return [
        {"workload": workload, "batch_size": batch, "method": method, "speedup_vs_plain": statistics.median(values)}
        for (workload, batch, method), values in groups.items()
    ]


def _by_batch_size(
    cells: Cells, read: Read, *, title: str, label: str, caption: str, reference: float | None = None
) -> list[Chart]:
    panels = []
    for workload in unique([cell["workload"] for cell in cells]):
        series = []
        for method in unique([cell["method"] for cell in cells]):
            points: dict[int, list[float]] = {}
            for cell in cells:
                value = read(cell) if (cell["workload"], cell["method"]) == (workload, method) else None
                if value is not None:
                    points.setdefault(cell["batch_size"], []).append(value)
            if points:
                series.append(_series(method, points))
        if series:
            panels.append(Panel(workload, tuple(series)))
    if not panels:
        return []
    svg = draw_lines(panels, x_label="batch size", y_label=label, reference=reference, is_log_x=True)
    return [Chart(title, svg, caption)]


def _series(name: str, points: Mapping[int, Sequence[float]]) -> Series:
    x = sorted(points)
    return Series(
        name,
        x,
        [statistics.median(points[key]) for key in x],
        [min(points[key]) for key in x],
        [max(points[key]) for key in x],
    )


def _time_charts(cells: Cells, caption: str) -> list[Chart]:
    """T by draft tokens, for each number of rows; a point is a set of steps, so its draft tokens are those chosen."""
    panels = []
    for batch_size in sorted({cell["batch_size"] for cell in cells}):
        series = []
        for method in unique([cell["method"] for cell in cells]):
            points: dict[int, list[float]] = {}
            for cell in cells:
                if (cell["batch_size"], cell["method"]) == (batch_size, method):
                    for step in cell["step_times"]:
                        if step["num_rows"] == batch_size:
                            points.setdefault(step["num_draft_tokens"], []).append(step["median_ms"])
            if points:
                one = _series(method, points)
                series.append(Series(method, one.x, one.y, one.low, one.high, is_joined=len(points) > 1))
        if series:
            panels.append(Panel(f"{batch_size} rows", tuple(series)))
    if not panels:
        return []
    svg = draw_lines(panels, x_label="draft tokens, rounded down to a power of 2", y_label="T, ms")
    return [Chart("Step time and the chosen points", svg, caption)]


def _latency_charts(cells: Cells, caption: str) -> list[Chart]:
    charts = []
    for name, label in LATENCIES.items():
        for percentile in ("p50", "p90"):

            def read(cell: Mapping[str, Any], name: str = name, percentile: str = percentile) -> float | None:
                figures = cell["latency"][name]
                return None if figures is None else figures[percentile]

            title = f"{label}, {percentile.upper()}"
            charts += _by_batch_size(cells, read, title=title, label=f"{label}, ms", caption=caption)
    return charts


def _latency_rows(cells: Cells) -> list[dict[str, Any]]:
    return [
        {**_key(cell), "latency": label, **cell["latency"][name]}
        for cell in cells
        for name, label in LATENCIES.items()
        if cell["latency"][name] is not None
    ]
